#include "violin/kernels/cpu/row_ops.h"

namespace violin::kernels::cpu {

const AllRowOps& row_ops([[maybe_unused]] Level level) {
#ifdef VIOLIN_X86
  if (level == Level::kAvx512) return row_ops_avx512();
  if (level == Level::kAvx2) return row_ops_avx2();
#endif
  return row_ops_plain();
}

}  // namespace violin::kernels::cpu
