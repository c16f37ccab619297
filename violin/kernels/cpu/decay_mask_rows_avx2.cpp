#define VIOLIN_MASK_ROWS_NAME decay_mask_rows_avx2
#define VIOLIN_VECTOR_BYTES 32
#include "violin/kernels/cpu/decay_mask_rows_impl.h"
