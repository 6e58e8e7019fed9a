// Workspace of convolutions: bounds of what oneDNN takes, which tells nobody before.
#include <algorithm>
#include <vector>

#include "aten/convolution.h"
#include "aten/onednn.h"
#include "aten/onednn_faults.h"
#include "aten/patch_product.h"
#include "kernels/product/tile_convolution.h"
#include "kernels/product/window_product.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t Most(const std::vector<int64_t>& x) { return *std::max_element(x.begin(), x.end()); }

/*! \brief Channels as oneDNN pads them in its blocks of weights. */
int64_t Padded(int64_t channels) { return RoundUp(channels, channels <= 64 ? 16 : 64); }

/*! \brief Product of all extents but the last. */
int64_t Lines(const std::vector<int64_t>& extents) {
  return Volume({extents.begin(), extents.end() - 1});
}

/*! \brief Windows of the usual networks. */
bool IsUsual(const ConvolutionSizes& s) {
  return s.kernel.size() <= 2 && Most(s.dilation) == 1 && Most(s.stride) <= 2 &&
         Most(s.kernel) <= 7;
}

/*!
 * \brief What oneDNN's kernels for matrix tiles take, in bfloat16.
 *
 * From the sources of oneDNN 3.12, where they book their scratchpads:
 * `src/cpu/x64/jit_brgemm_conv{,_bwd}_utils.cpp`.
 */
class TileKernels {
 public:
  explicit TileKernels(const ConvolutionSizes& s) : s_(s), last_(s.inner.size() - 1) {
    for (size_t axis = 0; axis <= last_; ++axis) {
      const int64_t span = s.dilation[axis] * (s.kernel[axis] - 1) + 1;
      const int64_t end = (s.outer[axis] - 1) * s.stride[axis] + span;
      span_.push_back(span);
      after_.push_back(std::max<int64_t>(0, end - s.inner[axis] - s.padding[axis]));
    }
  }

  /*! \brief Whether they compute it at all. */
  bool Compute(int64_t which) const {
    if (s_.IsDeep()) return false;
    for (size_t axis = 0; axis <= last_; ++axis) {
      const bool is_dilated = s_.dilation[axis] > 1;
      if (std::max(s_.padding[axis], after_[axis]) > span_[axis] / 2) return false;
      if (which == 2 && is_dilated && (s_.stride[axis] > 1 || span_[axis] > s_.inner[axis])) {
        return false;
      }
    }
    if (which == 2 && s_.inner.size() > 2 && s_.dilation[0] > 1) return false;
    return which != 1 || Most(s_.stride) == 1 || Most(s_.dilation) == 1;
  }

  /*! \brief Elements of four bytes that a thread takes. */
  int64_t Elements(int64_t which) const {
    const int64_t inner = s_.inner_channels / s_.groups, outer = s_.outer_channels / s_.groups;
    const int64_t read = which == 1 ? outer : inner;
    const int64_t batches = 8 * Volume(s_.kernel) * (RoundUp(read, 16) / 16) +
                            8 * Lines(s_.outer);
    return kLeast + batches + (which == 2       ? WeightElements(inner, outer)
                               : which == 0     ? ForwardElements(inner, outer)
                               : IsStrided()    ? StridedElements(outer)
                                                : BackwardElements(inner, outer));
  }

 private:
  static constexpr int64_t kLeast = 32768;

  bool IsStrided() const { return Most(s_.stride) > 1; }

  /*!
   * \brief Rows in which windows are read, of positions and of what lies around them.
   *
   * `results` are the extents of what is computed; blocks of its rows round those that are read up.
   */
  int64_t Copies(int64_t channels, const std::vector<int64_t>& extents,
                 const std::vector<int64_t>& edges, const std::vector<int64_t>& results,
                 const std::vector<int64_t>& strides) const {
    const size_t high = last_ - 1;
    const int64_t wide = extents[last_], stride = strides[last_], span = span_[last_];
    const int64_t skipped =
        (span - 1) / stride * strides[high] + (strides[high] - 1) * results[last_];
    const int64_t block = results[high] * results[last_] + (results[high] - 1) * skipped;
    int64_t rows = block / wide + 1 + s_.kernel[high] * s_.dilation[high];
    rows += extents[high] + edges[high];
    for (size_t axis = 0; axis < high; ++axis) rows *= extents[axis] + edges[axis];
    const int64_t padded = RoundUp(channels, channels <= 32 ? 2 : 32);
    return rows * wide * s_.groups * padded * stride * (results[last_] == 1 ? span : 1);
  }

  int64_t ForwardElements(int64_t inner, int64_t outer) const {
    std::vector<int64_t> extents, edges;
    for (size_t axis = 0; axis <= last_; ++axis) {
      edges.push_back(s_.padding[axis] + after_[axis]);
      extents.push_back(s_.inner[axis] + edges[axis]);
    }
    // Channels that fill tiles are read where they are, but in narrow or padded rows.
    const bool in_place = inner % 32 == 0 && edges[last_] == 0 && s_.outer[last_] > 50;
    int64_t copies = in_place ? 0 : Copies(inner, extents, edges, s_.outer, s_.stride);
    const bool fills_tiles = s_.outer[last_] > 48 || s_.outer[last_] % 16 == 0;
    if (last_ == 1 && inner <= 16 && Most(s_.dilation) == 1 && fills_tiles) {
      // Few channels: the rows of a window become one, for each position.
      const int64_t row = s_.kernel[0] * s_.stride[1] * inner;
      const int64_t high = 2 * span_[0] + edges[0] + 1;
      copies = std::max(copies, s_.kernel[0] * high * extents[1] * s_.groups * row +
                                    (s_.outer[0] - 1) * s_.stride[0] * row + row);
    }
    return copies / 2 + Volume(s_.outer) * std::min<int64_t>(RoundUp(outer, 16), 64);
  }

  /*! \brief Of the input's gradient without strides: a convolution of the result's. */
  int64_t BackwardElements(int64_t inner, int64_t outer) const {
    std::vector<int64_t> extents, edges;
    for (size_t axis = 0; axis <= last_; ++axis) {
      edges.push_back(span_[axis] - 1);
      extents.push_back(s_.inner[axis] + edges[axis]);
    }
    return Copies(outer, extents, edges, s_.inner, s_.stride) / 2 +
           Volume(s_.inner) * std::min<int64_t>(RoundUp(inner, 16), 64);
  }

  int64_t StridedElements(int64_t outer) const {
    int64_t positions = 1;
    for (size_t axis = 0; axis <= last_; ++axis) {
      positions *= s_.outer[axis] + 2 * ((span_[axis] - 1) / s_.stride[axis]);
    }
    const int64_t wide = RoundUp(s_.inner[last_], s_.stride[last_]);
    return s_.groups * RoundUp(outer, 64) * positions / 2 + 64 * wide +
           s_.inner_channels * wide * (s_.stride[last_] - 1) / 2;
  }

  /*! \brief Both sides with positions last, and the weight's gradient in float32. */
  int64_t WeightElements(int64_t inner, int64_t outer) const {
    const int64_t edge = s_.padding[last_] + after_[last_], stride = s_.stride[last_];
    const int64_t wide = RoundUp((s_.inner[last_] + edge + stride - 1) / stride, 32) * stride;
    const int64_t blocks = RoundUp(inner, 16), outer_blocks = RoundUp(outer, 16);
    const int64_t x = s_.groups * blocks * wide * Lines(s_.inner) + edge + 32;
    const int64_t grad = s_.groups * outer_blocks * RoundUp(s_.outer[last_], 32) * Lines(s_.outer) +
                         16 * wide;
    return (x + grad) / 2 + s_.groups * blocks * outer_blocks * Volume(s_.kernel);
  }

  const ConvolutionSizes& s_;
  const size_t last_;
  std::vector<int64_t> span_, after_;  // of a window; padding behind the last position
};

/*! \brief Of the library's kernels. */
int64_t LibraryBytes(const ConvolutionSizes& s, int64_t which, int64_t element, bool is_half,
                     int64_t threads) {
  const int64_t taps = Volume(s.kernel), g = s.groups;
  const int64_t inner = s.inner_channels / g, outer = s.outer_channels / g;  // of a group
  const int64_t weight = s.outer_channels * inner * taps;
  const int64_t inner_sample = s.inner_channels * Volume(s.inner);
  const int64_t outer_sample = s.outer_channels * Volume(s.outer);
  const int64_t windows = s.inner_channels * taps * Volume(s.outer);
  if (element == 8) {
    return PieceBytes(8 * (4 * weight + 4 * (inner_sample + outer_sample) + 2 * windows)) +
           (1 << 16);
  }
  const bool in_tiles = element == 2 && !is_half && OneDnnHasTiles();
  const TileKernels tiles(s);
  const bool is_tiled = in_tiles && tiles.Compute(which);
  const bool is_deep = s.IsDeep(), is_usual = IsUsual(s);
  const bool is_line = s.inner[0] == 1 && s.kernel[0] == 1;  // one axis, or like one
  const bool is_low = s.inner[0] < s.kernel[0] + Most(s.stride) - 1;  // no window lies inside
  const bool is_dense =
      !is_deep || !is_usual || (which == 2 && (is_line || is_low || Most(s.kernel) > 3));
  const int64_t packed =
      is_dense ? g * Padded(inner) * Padded(outer) * taps : RoundUp(g, 16) * taps;
  int64_t elements = 16384 * (threads + 1 + is_deep) + (which == 2 ? 2 : 1) * weight + packed;
  if (inner * outer < 256 && !is_deep) elements += threads * 4096 * taps;
  if (which == 1 && !is_tiled && (Most(s.stride) > 1 || !is_usual)) {
    // Rows of the gradient spread by strides.
    int64_t plane = 1;
    for (size_t axis = 0; axis < s.outer.size(); ++axis) plane *= s.outer[axis] + s.kernel[axis];
    elements += threads * std::min(g * Padded(outer), s.outer_channels + 64) * plane;
    // Along one axis: windows, and the sample in other orders (1,500 shapes took up to 5 of it).
    if (is_line) {
      const int64_t stride = Most(s.stride);
      elements += threads * windows + (stride > 2 ? std::max<int64_t>(8, 2 * stride) : 1) * inner_sample;
    }
    elements += 16384 * threads;
  }
  if (taps == 1 && Most(s.stride) > 1) {  // each thread gathers what the strides leave of a sample
    elements += threads * s.inner_channels * Volume(s.outer);
  }
  if (which == 2 && IsStridedTail(s)) elements += s.batch * s.inner_channels * Volume(s.outer);
  // Threads sum weights' gradients apart where the weight is small, or its windows are unusual.
  const int64_t apart = (threads - 1) * packed;
  const bool is_bounded = is_tiled || (is_usual && (is_deep || !in_tiles));
  if (which == 2) {
    elements += packed + (is_bounded ? std::min<int64_t>(apart, threads << 18) : apart);
  }
  if (!is_bounded) {
    elements += threads * (inner * taps * Volume(s.outer) + (which == 2 ? 2 : 1) * packed);
    // Of 1,500 shapes of one and two axes in float32 none took half of it.
    const bool is_known = element == 4 && s.kernel.size() <= 2;
    elements += !is_known ? 1 << 19 : which == 2 ? 1 << 18 : 1 << 15;
  }
  if (Volume(s.inner) == 1 || Volume(s.outer) == 1) {  // no order of axes tells channels last
    elements += 2 * s.batch * (inner_sample + outer_sample);
  }
  if (element == 2) elements += 32768 * threads + weight;  // sums and conversions in float32
  if (in_tiles) {
    elements += threads * (is_deep && is_usual ? 16384 : tiles.Elements(which));
  }
  if (element == 2 && !OneDnnComputes(is_half ? c10::kHalf : c10::kBFloat16)) {
    // All operands and the result in float32.
    elements += weight + s.outer_channels + 2 * s.batch * (inner_sample + outer_sample) + 16384;
  }
  return PieceBytes(4 * elements);
}

}  // namespace

ConvolutionSizes ConvolutionSizes::Read(const std::vector<int64_t>& n, size_t first) {
  ConvolutionSizes s{n.at(first), n.at(first + 1), n.at(first + 2), n.at(first + 3),
                     {},          {},              {},              {},
                     {},          {}};
  const size_t rank = (n.size() - first - 4) / 6;
  auto from = n.begin() + static_cast<int64_t>(first) + 4;
  for (auto* list : {&s.inner, &s.outer, &s.kernel, &s.stride, &s.padding, &s.dilation}) {
    list->assign(from, from + static_cast<int64_t>(rank));
    from += static_cast<int64_t>(rank);
  }
  return s;
}

int64_t ConvolutionBytes(const ConvolutionSizes& s, int64_t which, int64_t element, bool is_half,
                         int64_t threads) {
  if (IsWindowProduct(s, which, element)) return WindowProductBytes(s, which, threads);
  if (IsTileConvolution(s, which, element)) return TileConvolutionBytes(s, which, threads);
  if (IsPatchProduct(s, which, element, is_half)) return PatchProductBytes(s, which, threads);
  if (IsMiscomputed(s, which, element, is_half)) {
    ConvolutionSizes one = s;  // a sample at a time, all of it in float32
    one.batch = std::min<int64_t>(s.batch, 1);
    const int64_t weight = s.outer_channels * (s.inner_channels / s.groups) * Volume(s.kernel);
    const int64_t sample = PieceBytes(4 * s.inner_channels * Volume(s.inner)) +
                           PieceBytes(4 * s.outer_channels * Volume(s.outer));
    // Of a weight's gradient the sum and a part; of a convolution the bias and the result.
    const int64_t copies = (which == 2 ? 4 : 1) * PieceBytes(4 * weight) + sample +
                           PieceBytes(4 * s.outer_channels * (1 + Volume(s.outer)));
    return (IsOwnDepthwise(s, which) ? 0 : ConvolutionBytes(one, which, 4, false, threads)) + copies;
  }
  return LibraryBytes(s, which, element, is_half, threads);
}

}  // namespace relax_disc
