#define VIOLIN_ROW_OPS_NAME row_ops_avx512
#define VIOLIN_VECTOR_BYTES 64
#include "violin/kernels/cpu/row_ops_impl.h"
