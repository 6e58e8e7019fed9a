#include "kernels/product/tile_convolution.h"

#include <algorithm>
#include <utility>

#include "kernels/parallel.h"
#include "kernels/product/gemm.h"
#include "kernels/product/window_matrix.h"
#include "kernels/product/window_product.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

/*! \brief Sizes of the product. */
struct Sizes {
  int64_t m, n, k;
  int64_t weight;  // floats of the weight's copy; 1 by 1 it is what it has to be

  Sizes(const ConvolutionSizes& s, int64_t which) {
    const int64_t taps = Volume(s.kernel);
    const int64_t positions = s.batch * Volume(which == 1 ? s.inner : s.outer);
    const int64_t from = which == 1 ? s.outer_channels : s.inner_channels;
    const int64_t to = which == 1 ? s.inner_channels : s.outer_channels;
    m = which == 2 ? to : positions;
    n = which == 2 ? taps * from : to;
    k = which == 2 ? positions : taps * from;
    weight = taps == 1 ? 0 : taps * from * to;
  }
};

/*!
 * \brief Whether enough is multiplied by each number that is packed.
 *
 * Measured next to oneDNN on a Xeon, two threads, 64 to 512 channels: with 3 by 3 taps 0.5 to 0.96
 * of its time, 1 by 1 with 128 columns or more 0.7 to 0.9, with 64 up to 1.4.
 */
bool IsWorthPacking(const Sizes& sizes, int64_t which, int64_t taps, bool is_strided) {
  if (is_strided) return true;  // oneDNN gathers what strides leave
  if (which == 2) return sizes.m * sizes.n >= 56 * (sizes.m + sizes.n);
  return taps > 1 || sizes.n >= 128;
}

WindowGeometry GeometryOf(const ConvolutionSizes& s,
                          int64_t which, const float* data) {
  WindowGeometry g{data,       s.inner[0], s.inner[1],  s.inner_channels, s.outer[0], s.outer[1],
                   s.kernel[1], {},         {},          {}};
  if (which == 1) {  // of the result's gradient, with taps in reverse
    std::swap(g.high, g.outer_high);
    std::swap(g.wide, g.outer_wide);
    g.channels = s.outer_channels;
  }
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t reach = s.dilation[axis] * (s.kernel[axis] - 1);
    g.stride[axis] = s.stride[axis];
    g.dilation[axis] = s.dilation[axis];
    g.padding[axis] = which == 1 ? reach - s.padding[axis] : s.padding[axis];
  }
  return g;
}

}  // namespace

bool IsTileConvolution(const ConvolutionSizes& s, int64_t which, int64_t element) {
  const int64_t least = std::min(s.inner_channels, s.outer_channels);
  const bool has_whole_steps = s.inner_channels % 32 == 0 && s.outer_channels % 32 == 0;
  const bool is_strided = Volume(s.stride) > 1;
  if (element != 4 || s.inner.size() != 2 || s.groups != 1 || !has_whole_steps || least < 64 ||
      (which == 1 && is_strided)) {
    return false;
  }
  const Sizes sizes(s, which);
  return sizes.m > 0 && sizes.k > 0 && MayUseAmx(sizes.n, sizes.k) &&
         IsWorthPacking(sizes, which, Volume(s.kernel), is_strided);
}

int64_t TileConvolutionBytes(const ConvolutionSizes& s, int64_t which, int64_t threads) {
  const Sizes sizes(s, which);
  return PieceBytes(4 * sizes.weight) + TeamBytes<AmxKernel>(sizes.m, sizes.n, sizes.k, threads);
}

void TileConvolution(const ConvolutionSizes& s, int64_t which, float* inner, float* outer,
                     float* weight, const float* bias) {
  const Sizes sizes(s, which);
  const int64_t taps = Volume(s.kernel), from = s.inner_channels, to = s.outer_channels;
  WorkspaceScope workspace;
  float* ordered = sizes.weight > 0 ? workspace.Take<float>(sizes.weight) : weight;
  const WindowGeometry geometry = GeometryOf(s, which, which == 1 ? outer : inner);
  const WindowMatrix windows{&geometry, 0, 0};
  if (which == 2) {  // [to, taps, from]
    MultiplyByTiles(Product<float, Matrix<float>, WindowMatrix>{
        sizes.m, sizes.n, sizes.k, {outer, 1, to}, windows, nullptr, 0, ordered, sizes.n});
    if (sizes.weight > 0) OrderLikeWeight(ordered, to, from, taps, weight);
    return;
  }
  if (sizes.weight > 0 && which == 0) {
    OrderByTaps(weight, to, from, taps, ordered);
  } else if (sizes.weight > 0) {  // [taps in reverse, to, from]
    ParallelFor(to, [&](int64_t row) {
      const float* source = weight + row * taps * from;
      for (int64_t tap = 0; tap < taps; ++tap) {
        float* target = ordered + ((taps - 1 - tap) * to + row) * from;
        for (int64_t c = 0; c < from; ++c) target[c] = source[c * taps + tap];
      }
    });
  }
  const Matrix<float> right =
      which == 0 ? Matrix<float>{ordered, 1, taps * from} : Matrix<float>{ordered, from, 1};
  MultiplyByTiles(Product<float, WindowMatrix>{sizes.m, sizes.n, sizes.k, windows, right, bias, 0,
                                               which == 0 ? outer : inner, sizes.n});
}

}  // namespace relax_disc
