#define VIOLIN_ROW_OPS_NAME row_ops_avx2
#define VIOLIN_VECTOR_BYTES 32
#include "violin/kernels/cpu/row_ops_impl.h"
