#define VIOLIN_ROW_OPS_NAME row_ops_plain
#define VIOLIN_VECTOR_BYTES 16
#include "violin/kernels/cpu/row_ops_impl.h"
