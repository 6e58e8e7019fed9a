// relax_disc.cpu.depthwise_weight: gradient of a depthwise convolution by its weight, channels last.
//
// For windows of one axis, or wider than 3, oneDNN has no fast kernel and takes a weight of 16 by 16
// channels for each channel beside its arguments; this takes nothing and a tenth to a half of its
// time (5x5 and 7x7, 40 to 576 channels).  A task has some channels and a row of the
// window and adds up all positions in order, so that results do not depend on the threads.
#include "kernels/depthwise.h"

#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <utility>

#include "kernels/product/gemm_tile.h"
#include "kernels/parallel.h"
#include "kernels/tensor_view.h"

namespace relax_disc {
namespace {

/*! \brief One spatial axis. */
struct Axis {
  int64_t inner, outer, taps, stride, padding, dilation;

  /*! \brief Outer positions at which a tap reads inside: [first, last). */
  std::pair<int64_t, int64_t> Inside(int64_t tap) const {
    const int64_t shift = padding - tap * dilation;  // inner = outer * stride - shift
    const int64_t first = shift > 0 ? (shift + stride - 1) / stride : 0;
    const int64_t end = inner + shift;
    const int64_t last = end > 0 ? std::min(outer, (end + stride - 1) / stride) : 0;
    return {std::min(first, last), last};
  }
  int64_t Read(int64_t position, int64_t tap) const {
    return position * stride - padding + tap * dilation;
  }
};

constexpr int64_t kVectors = 4;  // independent sums hide the latency of additions
constexpr int64_t kBlock = kVectors * kLanes<float>;
constexpr int64_t kPositions = 256;  // added up before they join the whole: errors stay small

/*! \brief Rows of activations of one tap: `count` positions, steps apart. */
struct Rows {
  const float *grad, *x;
  int64_t grad_step, x_step, count;
};

/*! \brief Add products of so many whole vectors of channels to `sum`. */
template <int vectors>
void AddProducts(Rows rows, int64_t, float* sum) {
  typedef Vector<float>::Loose Loose;
  Vector<float>::Type total[vectors] = {};
  for (int64_t i = 0; i < rows.count; ++i, rows.grad += rows.grad_step, rows.x += rows.x_step) {
    const Loose* grad = reinterpret_cast<const Loose*>(rows.grad);
    const Loose* x = reinterpret_cast<const Loose*>(rows.x);
    for (int v = 0; v < vectors; ++v) total[v] += grad[v] * x[v];
  }
  for (int c = 0; c < vectors * kLanes<float>; ++c) sum[c] += total[c / kLanes<float>][c % kLanes<float>];
}

/*! \brief The same of fewer channels than a vector has. */
template <>
void AddProducts<0>(Rows rows, int64_t channels, float* sum) {
  float total[kLanes<float>] = {};
  for (int64_t i = 0; i < rows.count; ++i, rows.grad += rows.grad_step, rows.x += rows.x_step) {
    for (int64_t c = 0; c < channels; ++c) total[c] += rows.grad[c] * rows.x[c];
  }
  for (int64_t c = 0; c < channels; ++c) sum[c] += total[c];
}

void CallDepthwiseWeight(tvm::ffi::PackedArgs args, tvm::ffi::Any*) {
  const Tensor<float> grad(args[0].cast<TensorView>()), x(args[1].cast<TensorView>());
  const Tensor<float> out(args[args.size() - 1].cast<TensorView>());
  const int rank = out.ndim - 2;
  ConvolutionSizes s{x.shape[0], out.shape[0], out.shape[0], out.shape[0], {}, {}, {}, {}, {}, {}};
  if (rank == 1) s.inner = s.outer = s.kernel = s.stride = s.dilation = {1}, s.padding = {0};
  for (int k = 0; k < rank; ++k) {
    const auto number = [&](int list) { return args[2 + list * rank + k].cast<int64_t>(); };
    s.inner.push_back(x.shape[1 + k]);
    s.outer.push_back(grad.shape[1 + k]);
    s.kernel.push_back(out.shape[2 + k]);
    s.stride.push_back(number(0));
    s.padding.push_back(number(1));
    s.dilation.push_back(number(2));
  }
  DepthwiseWeight(s, grad.data, x.data, out.data);
}

}  // namespace

void DepthwiseWeight(const ConvolutionSizes& s, const float* outer, const float* inner,
                     float* weight) {
  const int64_t channels = s.groups;
  const auto axis = [&](int k) {
    return Axis{s.inner[k], s.outer[k], s.kernel[k], s.stride[k], s.padding[k], s.dilation[k]};
  };
  const Axis high = axis(0), wide = axis(1);
  static_assert(kVectors == 4, "the table below");
  static constexpr decltype(&AddProducts<0>) add[] = {
      &AddProducts<0>, &AddProducts<1>, &AddProducts<2>, &AddProducts<3>, &AddProducts<4>};
  const int64_t whole = channels / kLanes<float> * kLanes<float>;
  const int64_t blocks = (whole + kBlock - 1) / kBlock;
  ParallelFor((blocks + (whole < channels)) * high.taps, [&](int64_t task) {
    const int64_t block = task / high.taps, kh = task % high.taps;
    const int64_t first = std::min(block * kBlock, whole);
    const int64_t count = block < blocks ? std::min(kBlock, whole - first) : channels - first;
    const auto inside = high.Inside(kh);
    for (int64_t kw = 0; kw < wide.taps; ++kw) {
      const auto [left, right] = wide.Inside(kw);
      float sum[kBlock] = {};
      for (int64_t n = 0; n < s.batch; ++n) {
        for (int64_t row = inside.first; row < inside.second; ++row) {
          for (int64_t at = left; at < right; at += kPositions) {
            const int64_t to = (n * high.outer + row) * wide.outer + at;
            const int64_t from =
                (n * high.inner + high.Read(row, kh)) * wide.inner + wide.Read(at, kw);
            const Rows rows{outer + to * channels + first, inner + from * channels + first,
                            channels, wide.stride * channels, std::min(right - at, kPositions)};
            add[count / kLanes<float>](rows, count, sum);
          }
        }
      }
      for (int64_t c = 0; c < count; ++c) {
        weight[((first + c) * high.taps + kh) * wide.taps + kw] = sum[c];
      }
    }
  });
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("relax_disc.cpu.depthwise_weight", CallDepthwiseWeight);
}

}  // namespace relax_disc
