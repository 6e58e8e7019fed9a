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
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mkldnn_convolution.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "aten/memory.h"
#include "aten/onednn.h"
#include "aten/onednn_faults.h"
#include "aten/patch_product.h"
#include "kernels/depthwise.h"
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
          spatial(outer), spatial(weight), g.stride,      g.padding, g.dilation};
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
  product(sizes, which, data(inner), data(outer), data(weight), bias);
  return true;
}

/*! \brief Multiply patches where that is the faster way, in bfloat16; false elsewhere. */
bool AsPatches(int64_t which, const at::Tensor& inner, const at::Tensor& outer,
               const at::Tensor& weight, const Geometry& g,
               const std::optional<at::Tensor>& bias = std::nullopt) {
  const ConvolutionSizes sizes = SizesOf(inner, outer, weight, g);
  const bool is_half = inner.scalar_type() == c10::kHalf;
  if (!IsPatchProduct(sizes, which, inner.element_size(), is_half)) return false;
  AtenScope scope(PatchProductBytes(sizes, which, NumThreads()), at::empty({0}));
  PatchProduct(sizes, which, inner, outer, weight, bias);
  return true;
}

/*! \brief Compute sample by sample in float32 where the library is wrong; false elsewhere. */
bool InFloat32(int64_t which, const at::Tensor& inner, const at::Tensor& outer,
               const at::Tensor& weight, const Geometry& g, const at::Tensor& bias = {}) {
  ConvolutionSizes sizes = SizesOf(inner, outer, weight, g);
  const int64_t element = inner.element_size();
  const bool is_half = inner.scalar_type() == c10::kHalf;
  if (!IsMiscomputed(sizes, which, element, is_half)) return false;
  int64_t bytes = ConvolutionBytes(sizes, which, element, is_half, NumThreads());
  sizes.batch = std::min<int64_t>(sizes.batch, 1);
  const bool is_alone = IsOwnDepthwise(sizes, which);
  if (!is_alone && (IsWindowProduct(sizes, which, 4) || IsTileConvolution(sizes, which, 4))) {
    bytes -= ConvolutionBytes(sizes, which, 4, false, NumThreads());  // taken by the product itself
  }
  AtenScope scope(bytes, at::empty({0}));
  const at::Tensor kernel = weight.to(c10::kFloat);
  at::Tensor addend, sum;
  if (bias.defined()) addend = bias.to(c10::kFloat);
  const void* numbers = bias.defined() ? addend.const_data_ptr() : nullptr;
  for (int64_t first = 0; first < inner.size(0); ++first) {
    const at::Tensor x = inner.narrow(0, first, 1).to(c10::kFloat);
    const at::Tensor y = outer.narrow(0, first, 1).to(c10::kFloat);
    const at::Tensor part = which == 2 ? at::empty_like(kernel) : kernel;
    if (is_alone) {
      DepthwiseWeight(sizes, y.const_data_ptr<float>(), x.const_data_ptr<float>(),
                      part.mutable_data_ptr<float>());
    }
    const bool is_done =
        is_alone || AsProduct(which, x, y, part, g, static_cast<const float*>(numbers));
    if (which == 0) {
      const auto plain = bias.defined() ? std::make_optional(addend) : std::nullopt;
      Deliver(is_done ? y : Forward(x, kernel, plain, g), outer.narrow(0, first, 1));
      continue;
    }
    const at::Tensor found = is_done ? part : Backward(1, y, x, kernel, g);
    if (sum.defined()) {
      sum.add_(found);
    } else {
      sum = found;
    }
  }
  if (which == 2) sum.defined() ? Deliver(sum, weight) : static_cast<void>(weight.zero_());
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
  if (AsPatches(0, x, out, weight, g, with_bias ? std::make_optional(addend) : std::nullopt)) return;
  if (InFloat32(0, x, out, weight, g, addend)) return;
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
  if (AsProduct(2, given, grad, out, g) || AsPatches(2, given, grad, out, g)) return;
  if (InFloat32(2, given, grad, out, g)) return;
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

}  // namespace

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
