#include "aten/onednn_faults.h"

#include "aten/onednn.h"
#include "aten/onednn_scratch.h"

namespace relax_disc {
namespace {

/*! \brief Whether a part of the window has whole tiles of numbers, and its channels have not. */
bool FillsTiles(int64_t channels, int64_t taps) {
  return taps > 1 && channels % 32 != 0 && channels * taps % 32 == 0;
}

/*! \brief Whether no window reads some places, of any axis. */
bool LeavesOut(const ConvolutionSizes& s) {
  for (size_t axis = 0; axis < s.kernel.size(); ++axis) {
    if (s.stride[axis] > s.kernel[axis]) return true;
  }
  return false;
}

/*! \brief Whether all windows lie in the padding, along some axis. */
bool ReadsNothing(const ConvolutionSizes& s) {
  for (size_t axis = 0; axis < s.kernel.size(); ++axis) {
    const auto reads = [&s, axis](int64_t position) {
      const int64_t first = position * s.stride[axis] - s.padding[axis];
      for (int64_t tap = 0; tap < s.kernel[axis]; ++tap) {
        const int64_t place = first + tap * s.dilation[axis];
        if (place >= 0 && place < s.inner[axis]) return true;
      }
      return false;
    };
    int64_t position = 0;
    while (position < s.outer[axis] && !reads(position)) ++position;
    if (position == s.outer[axis]) return true;
  }
  return false;
}

/*! \brief Whether a result is one wide, and strides say how wide its windows could lie apart. */
bool IsStridedColumn(const ConvolutionSizes& s) {
  return s.outer.back() == 1 && s.stride.back() > 1;
}

/*!
 * \brief Whether the last channels of a dilated window's gradient are read beyond their rows.
 *
 * Tiles compute it themselves, but where a window is longer than an axis.
 */
bool IsDilatedTail(const ConvolutionSizes& s) {
  const int64_t channels = s.inner_channels / s.groups;
  if (channels <= 16 || channels % 16 == 0 || s.outer.back() <= 28) return false;
  const Reach reach(s);
  bool is_dilated = false, is_longer = false;
  for (size_t axis = 0; axis < s.kernel.size(); ++axis) {
    is_dilated |= axis + 1 < s.kernel.size() && s.dilation[axis] > 1;
    is_longer |= reach.span[axis] > s.inner[axis];
  }
  return is_dilated && (is_longer || !OneDnnHasTiles());
}

/*! \brief Whether padding is higher than an image of many channels. */
bool IsLowerThanPadding(const ConvolutionSizes& s) {
  return s.inner_channels / s.groups >= 128 && s.inner[0] < s.padding[0];
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
  if (which == 0 && ReadsNothing(s)) return true;
  if (!OneDnnHasTiles()) {
    const bool is_alone = channels == 1 && (IsStridedColumn(s) || s.kernel[0] >= 12);
    if (which == 2 ? s.groups > 1 && !is_deep : is_alone || last > 1) return true;
  }
  if (which == 2 && (IsDilatedTail(s) || IsLowerThanPadding(s))) return true;
  const bool is_dilated = Most(s.dilation) > 1, is_strided = Most(s.stride) > 1;
  const bool is_column = s.outer[last] == 1 && is_strided;
  if (which == 2) {
    const bool is_usual =
        last == 1 && !is_dilated && Most(s.kernel) <= 3 && Volume(s.kernel) > 1;
    return is_column || (is_dilated && is_strided) || (is_deep && !is_usual);
  }
  if (is_deep) return false;
  const bool is_line = Least(s.kernel) == 1;
  return (last > 1 && channels % 32 != 0) || Most(s.stride) > 4 || is_column ||
         (is_dilated && is_strided) || FillsTiles(channels, wide) ||
         (is_line && FillsTiles(channels, Volume(s.kernel)));
}

bool IsMiscomputedInFloat32(const ConvolutionSizes& s, int64_t which) {
  const bool has_three_axes = s.outer.size() == 3, is_one_wide = s.outer.back() == 1;
  switch (which) {
    case 0:
      return ReadsNothing(s) ||
             (s.inner_channels == 1 && ((has_three_axes && LeavesOut(s)) || IsStridedColumn(s)));
    case 1:
      return s.groups > 1 && is_one_wide && s.kernel.back() >= 15;
    default:
      return has_three_axes && (is_one_wide || s.kernel[0] >= 7);
  }
}

}  // namespace relax_disc
