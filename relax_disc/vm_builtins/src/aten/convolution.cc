// Convolutions by PyTorch's kernels (oneDNN): relax_disc.cpu.convolution and its two gradients.
//
// Activations are stored with channels last, weights as PyTorch keeps them.  oneDNN then reads and
// writes activations where they are; it reorders weights only.  Products of windows take the place
// of some, see `kernels/product/{window_product,tile_convolution}.h`.
#include "aten/convolution.h"

#include <ATen/native/ConvUtils.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mkldnn_convolution.h>
#include <cpuinfo.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "aten/memory.h"
#include "kernels/parallel.h"
#include "kernels/product/tile_convolution.h"
#include "kernels/product/window_product.h"

namespace relax_disc {
namespace {

using tvm::ffi::Any;
using tvm::ffi::PackedArgs;

/*! \brief One entry for each spatial axis of ATen's view, of which there are at least two. */
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};

/*! \brief Whether oneDNN has kernels for the type on this processor, as PyTorch asks. */
bool OneDnnComputes(c10::ScalarType type) {
  static const bool known = cpuinfo_initialize();
  static const bool bfloat = known && cpuinfo_has_x86_avx512vl() && cpuinfo_has_x86_avx512bw() &&
                             cpuinfo_has_x86_avx512dq();
  static const bool half = known && cpuinfo_has_x86_avx512fp16();
  return type == c10::kFloat || (type == c10::kBFloat16 && bfloat) || (type == c10::kHalf && half);
}

/*! \brief Whether oneDNN multiplies bfloat16 in tiles, for which it copies operands into others. */
bool HasTiles() {
  static const bool known = cpuinfo_initialize();
  return known && cpuinfo_has_x86_amx_bf16();
}

Geometry ReadGeometry(PackedArgs args, int first, int64_t rank) {
  Geometry result;
  for (auto* values : {&result.stride, &result.padding, &result.dilation}) {
    if (rank == 1) values->push_back(values == &result.padding ? 0 : 1);
    for (int64_t axis = 0; axis < rank; ++axis) values->push_back(args[first++].cast<int64_t>());
  }
  result.groups = args[first].cast<int64_t>();
  return result;
}

at::Tensor WeightView(TensorView view) {
  at::Tensor weight = AtenView(view);
  return weight.dim() == 3 ? weight.unsqueeze(2) : weight;
}

at::Tensor Forward(const at::Tensor& x, const at::Tensor& weight,
                   const std::optional<at::Tensor>& bias, const Geometry& g) {
  if (OneDnnComputes(x.scalar_type())) {
    return at::mkldnn_convolution(x, weight, bias, g.padding, g.stride, g.dilation, g.groups);
  }
  const std::vector<int64_t> none(g.stride.size(), 0);
  return at::convolution(x, weight, bias, g.stride, g.padding, g.dilation, false, none, g.groups);
}

/*! \brief Gradient of the input (`which` 0) or of the weight (1). */
at::Tensor Backward(int which, const at::Tensor& grad, const at::Tensor& x,
                    const at::Tensor& weight, const Geometry& g) {
  std::array<bool, 3> mask{which == 0, which == 1, false};
  std::tuple<at::Tensor, at::Tensor, at::Tensor> found;
  if (OneDnnComputes(x.scalar_type())) {
    // One function for every instruction set: oneDNN chooses by itself.
    found = at::native::mkldnn_convolution_backward_stub_DECLARE_DISPATCH_type::DEFAULT(
        x, grad, weight, g.padding, g.stride, g.dilation, g.groups, mask);
  } else {
    const std::vector<int64_t> none(g.stride.size(), 0);
    found = at::convolution_backward(grad, x, weight, std::nullopt, g.stride, g.padding, g.dilation,
                                     false, none, g.groups, mask);
  }
  return which == 0 ? std::get<0>(found) : std::get<1>(found);
}

ConvolutionSizes SizesOf(const at::Tensor& inner, const at::Tensor& outer,
                         const at::Tensor& weight, const Geometry& g) {
  const auto spatial = [](const at::Tensor& x) { return x.sizes().slice(2).vec(); };
  return {inner.size(0),  inner.size(1),   outer.size(1), g.groups,  spatial(inner),
          spatial(outer), spatial(weight), g.stride,      g.dilation};
}

/*! \brief Workspace of a call, of which the plan knows the same numbers. */
int64_t BytesOf(const at::Tensor& inner, const at::Tensor& outer, const at::Tensor& weight,
                const Geometry& g, int64_t which) {
  return ConvolutionBytes(SizesOf(inner, outer, weight, g), which, inner.element_size(),
                          inner.scalar_type() == c10::kHalf, NumThreads());
}

/*! \brief Compute by a product with windows where that is the faster way; false elsewhere. */
bool AsProduct(int64_t which, const at::Tensor& inner, const at::Tensor& outer,
               const at::Tensor& weight, const Geometry& g, const float* bias = nullptr) {
  const ConvolutionSizes sizes = SizesOf(inner, outer, weight, g);
  const int64_t element = inner.element_size();
  const auto product = IsWindowProduct(sizes, which, element)     ? &WindowProduct
                       : IsTileConvolution(sizes, which, element) ? &TileConvolution
                                                                  : nullptr;
  if (product == nullptr) return false;
  const auto data = [](const at::Tensor& x) { return static_cast<float*>(x.data_ptr()); };
  product(sizes, g.padding, which, data(inner), data(outer), data(weight), bias);
  return true;
}

/*!
 * \brief Run `compute(slice)` for the whole batch, or sample by sample where it needs windows.
 *
 * ATen's own kernels, which serve what oneDNN does not, write out the windows of every sample.
 */
template <typename F>
void InSamples(bool whole, int64_t batch, const F& compute) {
  const int64_t step = whole ? std::max<int64_t>(batch, 1) : 1;
  for (int64_t first = 0; first < batch; first += step) compute(first, step);
}

/*! \brief Operands in a type that there are kernels for. */
at::Tensor Computable(const at::Tensor& x) {
  const bool direct = OneDnnComputes(x.scalar_type()) || x.scalar_type() == c10::kDouble;
  return direct ? x : x.to(c10::kFloat);
}

void Convolution(PackedArgs args, bool with_bias) {
  const TensorView out_view = args[args.size() - 1].cast<TensorView>();
  const at::Tensor x = ChannelsFirst(args[0].cast<TensorView>());
  const at::Tensor weight = WeightView(args[1].cast<TensorView>());
  const at::Tensor out = ChannelsFirst(out_view);
  const Geometry g = ReadGeometry(args, 2 + with_bias, out_view.ndim() - 2);
  at::Tensor addend;
  if (with_bias) addend = AtenView(args[2].cast<TensorView>());
  const void* numbers = with_bias ? addend.const_data_ptr() : nullptr;
  if (AsProduct(0, x, out, weight, g, static_cast<const float*>(numbers))) return;
  const bool whole = x.scalar_type() != c10::kDouble;
  AtenScope scope(BytesOf(x, out, weight, g, 0), out, whole);
  const at::Tensor kernel = Computable(weight);
  std::optional<at::Tensor> bias;
  if (with_bias) bias = Computable(addend);
  InSamples(whole, x.size(0), [&](int64_t first, int64_t count) {
    Deliver(Forward(Computable(x.narrow(0, first, count)), kernel, bias, g),
            out.narrow(0, first, count));
  });
}

void ConvolutionInput(PackedArgs args, Any*) {
  const TensorView out_view = args[args.size() - 1].cast<TensorView>();
  const at::Tensor grad = ChannelsFirst(args[0].cast<TensorView>());
  const at::Tensor weight = WeightView(args[1].cast<TensorView>());
  const at::Tensor out = ChannelsFirst(out_view);
  const Geometry g = ReadGeometry(args, 2, out_view.ndim() - 2);
  if (AsProduct(1, out, grad, weight, g)) return;
  const bool whole = grad.scalar_type() != c10::kDouble;
  AtenScope scope(BytesOf(out, grad, weight, g, 1), out, whole);
  const at::Tensor kernel = Computable(weight);
  InSamples(whole, grad.size(0), [&](int64_t first, int64_t count) {
    const at::Tensor target = out.narrow(0, first, count);
    const at::Tensor outer = Computable(grad.narrow(0, first, count));
    // Of the input the kernels read sizes, strides and type only.
    const bool same = target.scalar_type() == outer.scalar_type();
    const at::Tensor like = same ? target : Computable(target);
    Deliver(Backward(0, outer, like, kernel, g), target);
  });
}

/*!
 * \brief Whether oneDNN 3.x sums such a gradient wrongly, now and then or always.
 *
 * `jit_1x1:avx2` gathers what strides leave of an image whose channels are last.  Where these fill
 * no whole vectors and there are several threads or images, elements of the gradient are wrong (26
 * of 300 runs of PyTorch itself with 3 channels of 16 by 16, 40 of 40 with 4 of 18 by 16).
 */
bool IsStridedTail(const ConvolutionSizes& s) {
  return Volume(s.kernel) == 1 && Volume(s.stride) > 1 && s.inner.size() == 2 && s.groups == 1 &&
         s.inner_channels % 8 != 0;
}

/*! \brief What strides leave of the positions, channels last; `geometry` has strides no more. */
at::Tensor Gathered(at::Tensor x, Geometry* geometry) {
  for (size_t axis = 0; axis < geometry->stride.size(); ++axis) {
    int64_t& stride = geometry->stride[axis];
    x = x.slice(static_cast<int64_t>(axis) + 2, std::nullopt, std::nullopt, stride);
    stride = 1;
  }
  return x.contiguous(at::MemoryFormat::ChannelsLast);
}

void ConvolutionWeight(PackedArgs args, Any*) {
  const TensorView out_view = args[args.size() - 1].cast<TensorView>();
  const at::Tensor grad = ChannelsFirst(args[0].cast<TensorView>());
  const at::Tensor given = ChannelsFirst(args[1].cast<TensorView>());
  const at::Tensor out = WeightView(out_view);
  Geometry g = ReadGeometry(args, 2, out_view.ndim() - 2);
  if (AsProduct(2, given, grad, out, g)) return;
  AtenScope scope(BytesOf(given, grad, out, g, 2), out);
  const bool is_padded = *std::max_element(g.padding.begin(), g.padding.end()) > 0;
  const bool gathers = !is_padded && IsStridedTail(SizesOf(given, grad, out, g));
  const at::Tensor x = gathers ? Gathered(given, &g) : given;
  const bool whole = x.scalar_type() != c10::kDouble;
  // Of the weight they read sizes and type.
  const at::Tensor like = Computable(out);
  at::Tensor sum;
  InSamples(whole, x.size(0), [&](int64_t first, int64_t count) {
    at::Tensor part = Backward(1, Computable(grad.narrow(0, first, count)),
                               Computable(x.narrow(0, first, count)), like, g);
    if (sum.defined()) {
      sum.add_(part);
    } else {
      sum = part;
    }
  });
  if (sum.defined()) {
    Deliver(sum, out);
  } else {
    out.zero_();
  }
}

int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/*! \brief Channels as oneDNN pads them in its blocks of weights. */
int64_t Padded(int64_t channels) { return RoundUp(channels, channels <= 64 ? 16 : 64); }

/*!
 * \brief Elements of four bytes that a thread takes beyond what it takes without tiles.
 *
 * Fitted to kernels of random geometry on an Intel Xeon, three axes without dilation; of 17,763
 * others three took more, all with windows larger than what they go over or with far strides.
 */
int64_t TileElements(const ConvolutionSizes& s, int64_t which) {
  constexpr int64_t kLeast = 16384;
  const int64_t inner = s.inner_channels * Volume(s.inner);
  const int64_t outer = s.outer_channels * Volume(s.outer);
  const bool is_deep = s.groups == s.inner_channels && s.groups == s.outer_channels;
  if (which == 0) return kLeast + 4 * inner * Volume(s.stride) * Volume(s.dilation) + 2 * outer;
  if (which == 1) return kLeast + 3 * inner + 2 * outer;
  const int64_t stride = *std::max_element(s.stride.begin(), s.stride.end());
  const int64_t samples = (is_deep ? 18 : 1) + (s.inner.size() > 2 ? 6 * stride : 0);
  return kLeast + samples * inner + 4 * outer;
}

}  // namespace

ConvolutionSizes ConvolutionSizes::Read(const std::vector<int64_t>& n, size_t first) {
  ConvolutionSizes s{n.at(first), n.at(first + 1), n.at(first + 2), n.at(first + 3),
                     {},          {},              {},              {},
                     {}};
  const size_t rank = (n.size() - first - 4) / 5;
  auto from = n.begin() + static_cast<int64_t>(first) + 4;
  for (auto* list : {&s.inner, &s.outer, &s.kernel, &s.stride, &s.dilation}) {
    list->assign(from, from + static_cast<int64_t>(rank));
    from += static_cast<int64_t>(rank);
  }
  return s;
}

int64_t ConvolutionBytes(const ConvolutionSizes& s, int64_t which, int64_t element, bool is_half,
                         int64_t threads) {
  if (IsWindowProduct(s, which, element)) return WindowProductBytes(s, which, threads);
  if (IsTileConvolution(s, which, element)) return TileConvolutionBytes(s, which, threads);
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
  const auto most = [](const std::vector<int64_t>& x) {
    return *std::max_element(x.begin(), x.end());
  };
  const bool is_usual = s.kernel.size() <= 2 && most(s.dilation) == 1 && most(s.stride) <= 2 &&
                        most(s.kernel) <= 7;
  const bool is_line = s.inner[0] == 1 && s.kernel[0] == 1;  // one axis, or like one
  const bool is_deep = inner == 1 && outer == 1;
  const bool is_low = s.inner[0] < s.kernel[0] + most(s.stride) - 1;  // no window lies inside
  const bool is_dense =
      !is_deep || !is_usual || (which == 2 && (is_line || is_low || most(s.kernel) > 3));
  const int64_t packed =
      is_dense ? g * Padded(inner) * Padded(outer) * taps : RoundUp(g, 16) * taps;
  int64_t elements = 16384 * (threads + 1) + (which == 2 ? 2 : 1) * weight + packed;
  if (inner * outer < 256 && !is_deep) elements += threads * 4096 * taps;
  if (which == 1 && (most(s.stride) > 1 || !is_usual)) {  // rows of the gradient spread by strides
    int64_t plane = 1;
    for (size_t axis = 0; axis < s.outer.size(); ++axis) plane *= s.outer[axis] + s.kernel[axis];
    elements += threads * std::min(g * Padded(outer), s.outer_channels + 64) * plane;
    // Along one axis: windows, and the sample in other orders (1,500 shapes took up to 5 of it).
    if (is_line) elements += threads * windows + (most(s.stride) > 2 ? 8 : 1) * inner_sample;
    elements += 16384 * threads;
  }
  if (taps == 1 && most(s.stride) > 1) {  // each thread gathers what the strides leave of a sample
    elements += threads * s.inner_channels * Volume(s.outer);
  }
  if (which == 2 && IsStridedTail(s)) elements += s.batch * s.inner_channels * Volume(s.outer);
  // Threads sum weights' gradients apart where the weight is small, or its windows are unusual.
  const int64_t apart = (threads - 1) * packed;
  if (which == 2) elements += packed + (is_usual ? std::min<int64_t>(apart, threads << 18) : apart);
  if (!is_usual) {
    elements += threads * (inner * taps * Volume(s.outer) + (which == 2 ? 2 : 1) * packed);
    // Of 1,500 shapes of one and two axes in float32 none took half of it.
    const bool is_known = element == 4 && s.kernel.size() <= 2;
    elements += !is_known ? 1 << 19 : which == 2 ? 1 << 18 : 1 << 15;
  }
  if (Volume(s.inner) == 1 || Volume(s.outer) == 1) {  // no order of axes tells channels last
    elements += 2 * s.batch * (inner_sample + outer_sample);
  }
  if (element == 2) elements += 32768 * threads + weight;  // sums and conversions in float32
  if (element == 2 && !is_half && HasTiles()) elements += threads * TileElements(s, which);
  if (element == 2 && !OneDnnComputes(is_half ? c10::kHalf : c10::kBFloat16)) {
    // All operands and the result in float32.
    elements += weight + s.outer_channels + 2 * s.batch * (inner_sample + outer_sample) + 16384;
  }
  return PieceBytes(4 * elements);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def_packed("relax_disc.cpu.convolution",
                  [](PackedArgs args, Any*) { Convolution(args, false); })
      .def_packed("relax_disc.cpu.convolution_bias",
                  [](PackedArgs args, Any*) { Convolution(args, true); })
      .def_packed("relax_disc.cpu.convolution_input", ConvolutionInput)
      .def_packed("relax_disc.cpu.convolution_weight", ConvolutionWeight);
}

}  // namespace relax_disc
