// Matrix products by PyTorch's kernels (oneDNN, MKL): relax_disc.cpu.aten_matmul and its kin, with
// the arguments of the functions without the prefix.
#include "aten/product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <cpuinfo.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <string>
#include <vector>

#include "aten/memory.h"
#include "kernels/parallel.h"

namespace relax_disc {
namespace {

/*! \brief A compact tensor as a matrix whose rows are its first `split` axes, or its transpose. */
at::Tensor MatrixView(TensorView view, int64_t split, bool transpose) {
  int64_t rows = 1, columns = 1;
  for (int64_t axis = 0; axis < view.ndim(); ++axis) {
    (axis < split ? rows : columns) *= view.shape()[axis];
  }
  at::Tensor matrix = AtenView(view).view({rows, columns});
  return transpose ? matrix.t() : matrix;
}

void Matmul(TensorView a_view, TensorView b_view, const TensorView* addend, int64_t a_split,
            int64_t b_split, int64_t transpose_a, int64_t transpose_b, TensorView c_view) {
  const at::Tensor a = MatrixView(a_view, a_split, transpose_a != 0);
  const at::Tensor b = MatrixView(b_view, b_split, transpose_b != 0);
  at::Tensor c = AtenView(c_view).view({a.size(0), b.size(1)});
  AtenScope scope(
      AtenProductBytes(c.size(0), c.size(1), a.size(1), c.element_size(), NumThreads()),
      at::empty({0}));
  if (addend == nullptr) {
    at::mm_out(c, a, b);
    return;
  }
  at::Tensor extra = AtenView(*addend);
  extra = extra.view({extra.numel() == c.numel() ? c.size(0) : 1, c.size(1)});
  if (a.size(1) == 0) {
    c.copy_(extra);
  } else {
    at::addmm_out(c, extra, a, b);
  }
}

at::Tensor Permuted(TensorView view, int64_t axes) {
  std::vector<int64_t> order;
  for (int64_t axis = view.ndim() - 1; axis >= 0; --axis) order.push_back(axes >> 4 * axis & 15);
  return AtenView(view).permute(order);
}

/*! \brief Batch axes as one, if strides allow that without a copy. */
std::optional<at::Tensor> AsBatch(const at::Tensor& x) {
  const int64_t count = c10::multiply_integers(x.sizes().slice(0, x.dim() - 2));
  const std::vector<int64_t> sizes{count, x.size(-2), x.size(-1)};
  const auto strides = at::detail::computeStride(x.sizes(), x.strides(), sizes);
  if (!strides) return std::nullopt;
  return x.as_strided(sizes, *strides);
}

void Multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  auto left = AsBatch(a), right = AsBatch(b), target = AsBatch(c);
  if (left && right && target && target->is_contiguous()) {
    at::bmm_out(*target, *left, *right);
    return;
  }
  if (c.dim() == 2) {
    at::Tensor result = c;
    at::mm_out(result, a, b);
    return;
  }
  for (int64_t i = 0; i < c.size(0); ++i) Multiply(a.select(0, i), b.select(0, i), c.select(0, i));
}

void BatchMatmul(TensorView a_view, TensorView b_view, int64_t a_axes, int64_t b_axes,
                 int64_t c_axes, TensorView c_view) {
  at::Tensor a = Permuted(a_view, a_axes), b = Permuted(b_view, b_axes);
  const at::Tensor c = Permuted(c_view, c_axes);
  const at::IntArrayRef batch = c.sizes().slice(0, c.dim() - 2);
  AtenScope scope(AtenProductBytes(c.size(-2), c.size(-1), a.size(-1), c.element_size(),
                                   NumThreads()),
                  at::empty({0}));
  for (at::Tensor* x : {&a, &b}) {
    std::vector<int64_t> sizes(batch.begin(), batch.end());
    sizes.insert(sizes.end(), {x->size(-2), x->size(-1)});
    *x = x->expand(sizes);
  }
  Multiply(a, b, c);
}

/*! \brief Whether the processor multiplies the type itself: else float32 is as fast. */
bool Multiplies(const std::string& dtype) {
  if (!cpuinfo_initialize()) return false;
  if (dtype == "bfloat16") return cpuinfo_has_x86_avx512bf16() || cpuinfo_has_x86_amx_bf16();
  return dtype == "float16" && (cpuinfo_has_x86_avx512fp16() || cpuinfo_has_x86_amx_fp16());
}

}  // namespace

int64_t AtenProductBytes(int64_t m, int64_t n, int64_t k, int64_t element, int64_t threads) {
  if (element > 2 || m == 0 || n == 0 || k == 0) return 0;
  // A thread copies blocks of both operands and sums a block in float32: no more than all of them,
  // and no more than twice what its cache holds (500 shapes, 1 and 2 threads, took up to 0.7).
  static const int64_t l2 = cpuinfo_initialize() && cpuinfo_get_l2_caches_count() > 0
                                ? cpuinfo_get_l2_cache(0)->size
                                : 1 << 20;
  const auto up = [](int64_t value) { return (value + 63) / 64 * 64; };
  const int64_t all = element * (up(m) + up(n)) * up(k) + 4 * up(m) * up(n);
  return PieceBytes(threads * std::min(std::max<int64_t>(2 * l2, 2 << 20), all));
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.multiplies",
           [](const tvm::ffi::String& dtype) { return Multiplies(std::string(dtype)); })
      .def("relax_disc.cpu.aten_matmul",
           [](TensorView a, TensorView b, int64_t a_split, int64_t b_split, int64_t transpose_a,
              int64_t transpose_b, TensorView c) {
             Matmul(a, b, nullptr, a_split, b_split, transpose_a, transpose_b, c);
           })
      .def("relax_disc.cpu.aten_matmul_add",
           [](TensorView a, TensorView b, TensorView addend, int64_t a_split, int64_t b_split,
              int64_t transpose_a, int64_t transpose_b, TensorView c) {
             Matmul(a, b, &addend, a_split, b_split, transpose_a, transpose_b, c);
           })
      .def("relax_disc.cpu.aten_batch_matmul", BatchMatmul);
}

}  // namespace relax_disc
