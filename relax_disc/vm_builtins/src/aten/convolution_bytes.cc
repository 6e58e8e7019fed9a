// Workspace of convolutions: bounds of what oneDNN takes, which tells nobody before.
#include <algorithm>
#include <vector>

#include "aten/convolution.h"
#include "aten/onednn.h"
#include "aten/onednn_faults.h"
#include "aten/onednn_scratch.h"
#include "aten/patch_product.h"
#include "kernels/product/tile_convolution.h"
#include "kernels/product/window_product.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

/*! \brief Channels as oneDNN pads them in its blocks of weights. */
int64_t Padded(int64_t channels) { return RoundUp(channels, channels <= 32 ? 16 : 64); }

/*!
 * \brief Windows of the usual networks, at most so wide where they do not stride.
 *
 * With AVX-512 float32 takes no more for wide ones (style transfer, super resolution): none of the
 * random shapes that were tried. Without it oneDNN makes products with windows of some of these.
 */
bool IsUsual(const ConvolutionSizes& s, int64_t widest) {
  return s.kernel.size() <= 2 && Most(s.dilation) == 1 && Most(s.stride) <= 2 &&
         Most(s.kernel) <= (Most(s.stride) == 1 ? widest : 7);
}

/*! \brief Elements of a gradient of the input by strides, whose rows lie apart for each thread. */
int64_t Spread(const ConvolutionSizes& s, const Reach& reach, int64_t threads) {
  int64_t plane = 1;
  for (size_t axis = 0; axis < s.outer.size(); ++axis) {
    const int64_t edges = 2 * ((reach.span[axis] - 1) / s.stride[axis]) + 1;
    plane *= s.outer[axis] + std::max(s.kernel[axis], edges);
  }
  const int64_t padded = s.groups * Padded(s.outer_channels / s.groups);
  const int64_t channels = std::min(padded, s.outer_channels + 64);
  // Rows that strides do not divide are made apart, with gaps (`brgconv_strided`).
  const int64_t stride = s.stride.back(), wide = RoundUp(s.inner.back(), stride);
  const bool is_even = wide == s.inner.back();
  const int64_t row = is_even ? 0 : RoundUp(wide * stride * s.inner_channels, 4096);
  return threads * (channels * plane + row);
}

/*! \brief Elements of copies in another order, by oneDNN or for it. */
int64_t Reordered(const ConvolutionSizes& s, int64_t which, int64_t threads) {
  const int64_t gathered = s.inner_channels * Volume(s.outer);
  int64_t elements = 0;
  // Each thread gathers what the strides leave of a sample.
  if (Volume(s.kernel) == 1 && Most(s.stride) > 1) elements += threads * gathered;
  if (which == 2 && IsStridedTail(s)) elements += s.batch * gathered;
  if (Volume(s.inner) == 1 || Volume(s.outer) == 1) {  // no order of axes tells channels last
    const int64_t inner_sample = s.inner_channels * Volume(s.inner);
    elements += 2 * s.batch * (inner_sample + s.outer_channels * Volume(s.outer));
  }
  return elements;
}

/*! \brief In bfloat16 where there are no matrix tiles: two bytes but for sums. */
int64_t VectorBytes(const ConvolutionSizes& s, const Reach& reach, int64_t which,
                    int64_t threads) {
  const int64_t taps = Volume(s.kernel), g = s.groups;
  const int64_t inner = s.inner_channels / g, outer = s.outer_channels / g;  // of a group
  // Channels of results are in blocks of up to 64, those of a gradient of the weight of 16.
  const int64_t blocked = which == 0   ? Padded(outer)
                          : which == 1 ? Padded(inner)
                                       : RoundUp(outer, 16);
  const int64_t others = RoundUp(which == 1 ? outer : inner, 16);
  const VectorKernels vectors(s, threads);
  int64_t halves = s.outer_channels * inner * taps + g * blocked * others * taps;
  halves += vectors.Copied(which) + Reordered(s, which, threads);
  if (which == 1 && Most(s.stride) > 1) halves += Spread(s, reach, threads) + 32768 * threads;
  return PieceBytes(2 * halves + 4 * (16384 * (threads + 1) + vectors.InBfloat16(which)));
}

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
  const bool has_avx512 = OneDnnComputes(c10::kBFloat16);  // natively, or by float32
  const bool is_bfloat16 = element == 2 && !is_half && has_avx512;
  const bool in_tiles = is_bfloat16 && OneDnnHasTiles();
  const TileKernels tiles(s);
  const bool is_tiled = in_tiles && tiles.Compute(which);
  const bool is_deep = s.IsDeep(), is_usual = IsUsual(s, element == 4 && has_avx512 ? 11 : 7);
  const bool is_line = s.inner[0] == 1 && s.kernel[0] == 1;  // one axis, or like one
  const bool is_low = s.inner[0] < s.kernel[0] + Most(s.stride) - 1;  // no window lies inside
  const Reach reach(s);
  const bool is_dense = !is_deep || !is_usual ||
                        (which == 2 && (Least(s.kernel) == 1 || is_low || Most(s.kernel) > 3 ||
                                        !reach.is_narrow));
  // Kernels of their own multiply channels that have one window each, and sum its usual gradients.
  const bool has_vectors =
      is_bfloat16 && !is_tiled && (!is_deep || g == 1 || (which == 2 && is_dense));
  if (has_vectors && !in_tiles) return VectorBytes(s, reach, which, threads);
  const int64_t packed =
      is_dense ? g * Padded(inner) * Padded(outer) * taps : RoundUp(g, 16) * taps;
  int64_t elements = 16384 * (threads + 1 + is_deep) + (which == 2 ? 2 : 1) * weight + packed;
  if (inner * outer < 256 && !is_deep) elements += threads * 4096 * taps;
  if (which == 1 && !is_tiled && (Most(s.stride) > 1 || !is_usual)) {
    elements += Spread(s, reach, threads) + 16384 * threads;
    // Along one axis: windows, and the sample in other orders (1,500 shapes took up to 5 of it).
    if (is_line) elements += threads * windows + (Most(s.stride) > 2 ? 8 : 1) * inner_sample;
  }
  elements += Reordered(s, which, threads);
  // Threads sum weights' gradients apart where the weight is small, or its windows are unusual.
  const int64_t apart = (threads - 1) * packed;
  // Before AVX-512 images lower than a window are products with windows.
  const bool is_direct = has_avx512 || which != 2 || !is_low;
  if (!has_avx512) elements += 32768;
  const bool is_bounded = is_tiled || (is_usual && is_direct && (is_deep || !in_tiles)) ||
                          (which == 0 && has_avx512 && !in_tiles && LoweredElements(s) > 0);
  if (which == 2) {
    elements += packed + (is_bounded ? std::min<int64_t>(apart, threads << 18) : apart);
  }
  if (!is_bounded) {
    elements += threads * (inner * taps * Volume(s.outer) + packed);
    // Of products with windows (`gemm`) every thread has four gradients and a sample.
    if (which == 2) elements += threads * (std::max(packed, 4 * weight) + inner_sample);
    // Of 1,500 shapes of one and two axes in float32 none took half of it.
    const bool is_known = element == 4 && s.kernel.size() <= 2;
    elements += !is_known ? 1 << 19 : which == 2 ? 1 << 18 : 1 << 15;
  }
  if (element == 2) elements += 32768 * threads + weight;  // sums and conversions in float32
  if (in_tiles) {
    elements += threads * (is_deep && is_usual ? 16384 : tiles.Elements(which));
  }
  const VectorKernels vectors(s, threads);
  if (!in_tiles) elements += vectors.Copied(which) * element / 4;
  if (has_vectors) elements += vectors.InBfloat16(which);
  if (element == 2 && !OneDnnComputes(is_half ? c10::kHalf : c10::kBFloat16)) {
    // All operands and the result in float32.
    elements += weight + s.outer_channels + 2 * s.batch * (inner_sample + outer_sample) + 16384;
  }
  return PieceBytes(4 * elements);
}

}  // namespace

int64_t LoweredElements(const ConvolutionSizes& s) {
  const bool is_alone = s.inner_channels == s.groups && (s.groups == 1 || !s.IsDeep());
  if (!is_alone || s.inner.size() != 2) return 0;
  if (s.kernel[0] == 1 || s.outer[1] <= 4 || Most(s.dilation) > 1) return 0;
  const Reach reach(s);
  const int64_t high = s.kernel[0], row = high * s.stride[1];
  // Results of all rows are one block where their windows do not overlap.
  const bool is_joined = s.stride[0] == 1 && s.kernel[1] <= s.stride[1];
  const int64_t rows = high + s.padding[0] + reach.after[0] + (is_joined ? high + 1 : 0);
  const int64_t wide = s.inner[1] + s.padding[1] + reach.after[1];
  const int64_t all = high * rows * wide * row + ((s.outer[0] - 1) * s.stride[0] + 1) * row;
  return s.groups * RoundUp(all, 4096);
}

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
