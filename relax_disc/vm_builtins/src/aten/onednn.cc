#include "aten/onednn.h"

#include <cpuinfo.h>

namespace relax_disc {

bool OneDnnComputes(c10::ScalarType type) {
  static const bool known = cpuinfo_initialize();
  static const bool bfloat = known && cpuinfo_has_x86_avx512vl() && cpuinfo_has_x86_avx512bw() &&
                             cpuinfo_has_x86_avx512dq();
  static const bool half = known && cpuinfo_has_x86_avx512fp16();
  return type == c10::kFloat || (type == c10::kBFloat16 && bfloat) || (type == c10::kHalf && half);
}

bool OneDnnHasTiles() {
  static const bool known = cpuinfo_initialize();
  return known && cpuinfo_has_x86_amx_bf16();
}

}  // namespace relax_disc
