#define VIOLIN_MASK_ROWS_NAME decay_mask_rows_plain
#define VIOLIN_VECTOR_BYTES 16
#include "violin/kernels/cpu/decay_mask_rows_impl.h"
