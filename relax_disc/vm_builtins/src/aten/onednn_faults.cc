#include "aten/onednn_faults.h"

#include <algorithm>

#include "aten/onednn.h"

namespace relax_disc {
namespace {

int64_t Most(const std::vector<int64_t>& x) { return *std::max_element(x.begin(), x.end()); }

/*! \brief Whether a part of the window has whole tiles of numbers, and its channels have not. */
bool FillsTiles(int64_t channels, int64_t taps) {
  return taps > 1 && channels % 32 != 0 && channels * taps % 32 == 0;
}

}  // namespace

bool IsStridedTail(const ConvolutionSizes& s) {
  return Volume(s.kernel) == 1 && Volume(s.stride) > 1 && s.inner.size() == 2 && s.groups == 1 &&
         s.inner_channels % 8 != 0;
}

bool IsMiscomputed(const ConvolutionSizes& s, int64_t which, int64_t element, bool is_half) {
  if (which == 1 || element != 2) return false;
  const size_t last = s.kernel.size() - 1;
  const int64_t channels = s.inner_channels / s.groups, wide = s.kernel[last];
  const bool is_deep = s.IsDeep();
  if (which == 0 && is_deep && s.groups > 1 && wide >= 12) return true;
  if (is_half || !OneDnnComputes(c10::kBFloat16)) return false;
  if (!OneDnnHasTiles()) {
    const bool is_one_wide = s.outer[last] == 1 && s.stride[last] > 1;
    if (which == 2 && s.groups > 1 && !is_deep) return true;
    if (which == 0 && channels == 1 && (is_one_wide || s.kernel[0] >= 12)) return true;
    if (which == 0 && last > 1) return true;
  }
  const bool is_dilated = Most(s.dilation) > 1, is_strided = Most(s.stride) > 1;
  const bool is_column = s.outer[last] == 1 && is_strided;
  if (which == 2) {
    const bool is_usual =
        last == 1 && !is_dilated && Most(s.kernel) <= 3 && Volume(s.kernel) > 1;
    return is_column || (is_dilated && is_strided) || (is_deep && !is_usual);
  }
  if (is_deep) return false;
  const bool is_line = *std::min_element(s.kernel.begin(), s.kernel.end()) == 1;
  return (last > 1 && channels % 32 != 0) || Most(s.stride) > 4 || is_column ||
         (is_dilated && is_strided) || FillsTiles(channels, wide) ||
         (is_line && FillsTiles(channels, Volume(s.kernel)));
}

}  // namespace relax_disc
