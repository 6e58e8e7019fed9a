// Matrix products by PyTorch's kernels (oneDNN, MKL): relax_disc.cpu.aten_matmul and its kin, with
// the arguments of the functions without the prefix.
//
// MKL keeps the buffers that it packs float32 into, and takes others for other sizes: up to 72 MB
// after twenty products.  They are given back after each product, so that a plan can count them.
#include "aten/product.h"

#include <ATen/Context.h>
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
#include "aten/onednn.h"
#include "kernels/parallel.h"
#include "kernels/product/product_choice.h"

extern "C" void mkl_serv_free_buffers() __attribute__((weak));  // as mkl_free_buffers
extern "C" int64_t mkl_serv_mem_stat(int* count) __attribute__((weak));  // as mkl_mem_stat

namespace relax_disc {
namespace {

/*! \brief Most columns that MKL is given at once: it packs all of them. */
constexpr int64_t kMklColumns = 2048;
/*! \brief Most that MKL takes on a thread for so many columns: 9.1 MB of 1,500 products. */
constexpr int64_t kMklBytes = 9 << 20;

/*! \brief Most that MKL takes from malloc in such products of float32. */
int64_t MklBytes(const ProductSizes& sizes, int64_t threads) {
  return sizes.count * sizes.m * sizes.n * sizes.k == 0 ? 0 : threads * kMklBytes;
}

/*! \brief Terms from which on oneDNN keeps sums of two-byte elements in float32. */
constexpr int64_t kLongSum = 1024;
/*! \brief Most that it may keep: of 8,192 tokens and 768 channels it were 25 MB. */
constexpr int64_t kSumBytes = 4 << 20;

/*! \brief Rows of a product that are computed at a time. */
int64_t RowsAtOnce(const AtenProduct& p) {
  if (p.element > 2 || p.k <= kLongSum) return p.m;
  return std::max<int64_t>(64, kSumBytes / (4 * (p.n + 63) / 64 * 64) / 64 * 64);
}

/*! \brief Bytes that MKL holds. */
int64_t MklHeld() {
  int count = 0;
  return mkl_serv_mem_stat == nullptr ? 0 : mkl_serv_mem_stat(&count);
}

/*!
 * \brief Gives back what MKL keeps; other types go to oneDNN, which keeps nothing.
 *
 * MKL takes its buffers from malloc, which cannot be lent to it: what it took beyond the plan's
 * bound is counted.
 */
struct MklScope {
  MklScope(c10::ScalarType type, const ProductSizes& sizes)
      : is_needed(type == c10::kFloat || type == c10::kDouble),
        planned_bytes(MklBytes(sizes, NumThreads())) {
    if (is_needed && MklHeld() > 0) mkl_serv_free_buffers();  // kept by calls that are not ours
  }
  ~MklScope() {
    if (!is_needed || mkl_serv_free_buffers == nullptr) return;
    CountOverflow(MklHeld() - planned_bytes);
    mkl_serv_free_buffers();
  }
  bool is_needed;
  int64_t planned_bytes;
};

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
  const ProductSizes sizes{1, c.size(0), c.size(1), a.size(1)};
  const AtenProduct product{1,       sizes.m,          sizes.n,
                            sizes.k, c.element_size(), c.scalar_type() == c10::kBFloat16};
  AtenScope scope(AtenProductBytes(product, NumThreads()), at::empty({0}));
  MklScope mkl(c.scalar_type(), sizes);
  at::Tensor extra;
  if (addend != nullptr) {
    extra = AtenView(*addend);
    extra = extra.view({extra.numel() == c.numel() ? c.size(0) : 1, c.size(1)});
    if (extra.const_data_ptr() == c.const_data_ptr()) extra = c;  // not copied onto itself
  }
  const int64_t width = mkl.is_needed ? kMklColumns : c.size(1), height = RowsAtOnce(product);
  for (int64_t row = 0; row < c.size(0); row += height) {
    const int64_t rows = std::min(height, c.size(0) - row);
    const at::Tensor left = a.narrow(0, row, rows);
    for (int64_t first = 0; first < c.size(1); first += width) {
      const int64_t columns = std::min(width, c.size(1) - first);
      const auto part = [&](const at::Tensor& x) { return x.narrow(1, first, columns); };
      const auto block = [&](const at::Tensor& x) {
        return part(x.size(0) == c.size(0) ? x.narrow(0, row, rows) : x);
      };
      at::Tensor target = block(c);
      if (addend == nullptr) {
        at::mm_out(target, left, part(b));
      } else if (a.size(1) == 0) {
        target.copy_(block(extra));
      } else {
        const at::Tensor sum = extra.is_same(c) ? target : block(extra);
        at::addmm_out(target, sum, left, part(b));
      }
    }
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
  const ProductSizes sizes{c10::multiply_integers(batch), c.size(-2), c.size(-1), a.size(-1)};
  const AtenProduct product{sizes.count, sizes.m,          sizes.n,
                            sizes.k,     c.element_size(), c.scalar_type() == c10::kBFloat16};
  AtenScope scope(AtenProductBytes(product, NumThreads()), at::empty({0}));
  MklScope mkl(c.scalar_type(), sizes);
  for (at::Tensor* x : {&a, &b}) {
    std::vector<int64_t> whole(batch.begin(), batch.end());
    whole.insert(whole.end(), {x->size(-2), x->size(-1)});
    *x = x->expand(whole);
  }
  Multiply(a, b, c);
}

/*! \brief Whether the processor multiplies the type itself: else float32 is as fast. */
bool Multiplies(const std::string& dtype) {
  if (!cpuinfo_initialize()) return false;
  if (dtype == "bfloat16") return cpuinfo_has_x86_avx512bf16() || cpuinfo_has_x86_amx_bf16();
  return dtype == "float16" && (cpuinfo_has_x86_avx512fp16() || cpuinfo_has_x86_amx_fp16());
}

/*!
 * \brief Whether PyTorch's product of float32 is what ours is: exact but for the last bit.
 *
 * Its users may allow it to round operands.  MKL promises equal bits for equal sizes where operands
 * lie at multiples of 64 bytes.
 */
bool IsLikeOwn(std::initializer_list<const TensorView*> operands) {
  const at::Float32Precision precision =
      at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  if (precision == at::Float32Precision::BF16 || precision == at::Float32Precision::TF32) {
    return false;
  }
  return std::all_of(operands.begin(), operands.end(), [](const TensorView* x) {
    const auto address = reinterpret_cast<uintptr_t>(x->data_ptr()) + x->byte_offset();
    return address % 64 == 0;
  });
}

bool TryMatmul(TensorView a, TensorView b, const TensorView* addend, int64_t a_split,
               int64_t b_split, int64_t transpose_a, int64_t transpose_b, TensorView c) {
  if (!IsLikeOwn({&a, &b, addend == nullptr ? &c : addend, &c})) return false;
  Matmul(a, b, addend, a_split, b_split, transpose_a, transpose_b, c);
  return true;
}

bool TryBatchMatmul(TensorView a, TensorView b, int64_t a_axes, int64_t b_axes, int64_t c_axes,
                    TensorView c) {
  if (!IsLikeOwn({&a, &b, &c})) return false;
  BatchMatmul(a, b, a_axes, b_axes, c_axes, c);
  return true;
}

}  // namespace

int64_t AtenProductBytes(const AtenProduct& p, int64_t threads) {
  if (p.element > 2 || p.m == 0 || p.n == 0 || p.k == 0) return 0;
  // A thread copies blocks of both operands, float16 as float32 where the processor has no tiles of
  // it, and sums a block in float32: no more than all of them, and no more than twice what its cache
  // holds (6,000 shapes, 1 and 2 threads, took up to 0.9), in tiles of bfloat16 once (16,000 up to 0.75).
  static const int64_t l2 = cpuinfo_initialize() && cpuinfo_get_l2_caches_count() > 0
                                ? cpuinfo_get_l2_cache(0)->size
                                : 1 << 20;
  const auto up = [](int64_t value) { return (value + 63) / 64 * 64; };
  const int64_t all = 4 * (up(p.m) + up(p.n)) * up(p.k) + 4 * up(p.m) * up(p.n);
  const int64_t held = p.is_bfloat && OneDnnHasTiles() ? l2 : 2 * l2;
  // Long sums are added up in float32 outside of the blocks: of all results at once.
  const int64_t rows = p.count > 1 ? p.m * std::min(threads, p.count) : std::min(p.m, RowsAtOnce(p));
  const int64_t sums = p.k > kLongSum ? 4 * up(rows) * up(p.n) : 0;
  return PieceBytes(threads * std::min(std::max<int64_t>(held, 2 << 20), all)) + PieceBytes(sums);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  if (mkl_serv_free_buffers != nullptr) OfferProducts({&TryMatmul, &TryBatchMatmul, &MklBytes});
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
