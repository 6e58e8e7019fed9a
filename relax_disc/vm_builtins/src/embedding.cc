// relax_disc.cpu.embedding_backward: rows of a gradient added up by their index.
//
// The threads share out the columns, so that no two write one element and every element is summed
// in the order of the rows, whatever the number of threads.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>

#include "gemm.h"
#include "parallel.h"
#include "tensor_view.h"

namespace relax_disc {
namespace {

/*! \brief Elements that are worth a thread: about 4 microseconds of adding. */
constexpr int64_t kElementsPerThread = 1 << 14;

template <typename T, typename Index>
void EmbeddingBackward(TensorView grad_view, TensorView ids_view, int64_t padding_idx,
                       TensorView out_view) {
  Tensor<T> grad(grad_view), out(out_view);
  Tensor<Index> ids(ids_view);
  TVM_FFI_CHECK(out.ndim == 2, ValueError) << "embedding_backward: out has rank " << out.ndim;
  const int64_t rows = out.shape[0], dim = out.shape[1], count = ids.Size(0, ids.ndim);
  TVM_FFI_CHECK(grad.Size(0, grad.ndim) == count * dim, ValueError)
      << "embedding_backward: " << grad.Size(0, grad.ndim) << " gradients for " << count
      << " ids of " << dim << " columns";
  for (int64_t i = 0; i < count; ++i) {
    TVM_FFI_CHECK((ids.data[i] >= 0 && ids.data[i] < rows) || ids.data[i] == padding_idx,
                  IndexError)
        << "embedding_backward: id " << ids.data[i] << " at " << i << " is outside [0, " << rows
        << ")";
  }
  auto parts = [](int64_t elements, int64_t most) {
    return std::clamp<int64_t>(std::min(elements / kElementsPerThread, most), 1, NumThreads());
  };
  int64_t fills = parts(rows * dim, rows);
  ParallelFor(fills, [&](int64_t part) {
    auto [first, last] = Share(rows, 1, fills, part);
    std::memset(out.data + first * dim, 0, (last - first) * dim * sizeof(T));
  });
  int64_t adds = parts(count * dim, (dim + kLanes<T> - 1) / kLanes<T>);
  ParallelFor(adds, [&](int64_t part) {
    auto [first, last] = Share(dim, kLanes<T>, adds, part);
    for (int64_t i = 0; i < count; ++i) {
      if (ids.data[i] == padding_idx) continue;
      T* target = out.data + static_cast<int64_t>(ids.data[i]) * dim;
      const T* source = grad.data + i * dim;
      for (int64_t j = first; j < last; ++j) target[j] += source[j];
    }
  });
}

template <typename T>
void WithIndex(TensorView grad, TensorView ids, int64_t padding_idx, TensorView out) {
  auto function = ids.dtype().bits == 64 ? &EmbeddingBackward<T, int64_t>
                                         : &EmbeddingBackward<T, int32_t>;
  function(grad, ids, padding_idx, out);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def(
      "relax_disc.cpu.embedding_backward",
      [](TensorView grad, TensorView ids, int64_t padding_idx, TensorView out) {
        (IsDouble(out) ? &WithIndex<double> : &WithIndex<float>)(grad, ids, padding_idx, out);
      });
}

}  // namespace relax_disc
