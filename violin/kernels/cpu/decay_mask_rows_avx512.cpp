#define VIOLIN_MASK_ROWS_NAME decay_mask_rows_avx512
#define VIOLIN_VECTOR_BYTES 64
#include "violin/kernels/cpu/decay_mask_rows_impl.h"
