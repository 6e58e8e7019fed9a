// relax_disc.cpu.embedding_backward: rows of a gradient added up by their index, onto nothing or
// (embedding_backward_add) onto another gradient of a tied table, whose place the sum may take; or
// some rows of it alone (embedding_backward_rows, embedding_backward_add_rows), the same to the last
// bit.
//
// The threads share out the columns, so that no two write one element and every element is summed
// in the order of the rows, whatever the number of threads.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>

#include "kernels/product/gemm.h"
#include "kernels/parallel.h"
#include "kernels/tensor_view.h"

namespace relax_disc {
namespace {

/*! \brief Elements that are worth a thread: about 4 microseconds of adding. */
constexpr int64_t kElementsPerThread = 1 << 14;

/*! \brief Rows of the table that are computed: from `begin` on, of so many in all. */
struct RowRange {
  int64_t begin, all;
};

template <typename T, typename Index>
void EmbeddingBackward(TensorView grad_view, TensorView ids_view, const TensorView* addend_view,
                       int64_t padding_idx, RowRange range, TensorView out_view) {
  Tensor<T> grad(grad_view), out(out_view);
  const T* addend = nullptr;
  if (addend_view != nullptr) {
    Tensor<T> onto(*addend_view);
    TVM_FFI_CHECK(onto.Size(0, onto.ndim) == out.Size(0, out.ndim), ValueError)
        << "embedding_backward_add: " << onto.Size(0, onto.ndim) << " elements to add to "
        << out.Size(0, out.ndim);
    addend = onto.data;
  }
  Tensor<Index> ids(ids_view);
  TVM_FFI_CHECK(out.ndim == 2, ValueError) << "embedding_backward: out has rank " << out.ndim;
  const int64_t rows = out.shape[0], dim = out.shape[1], count = ids.Size(0, ids.ndim);
  TVM_FFI_CHECK(grad.Size(0, grad.ndim) == count * dim, ValueError)
      << "embedding_backward: " << grad.Size(0, grad.ndim) << " gradients for " << count
      << " ids of " << dim << " columns";
  for (int64_t i = 0; i < count; ++i) {
    TVM_FFI_CHECK((ids.data[i] >= 0 && ids.data[i] < range.all) || ids.data[i] == padding_idx,
                  IndexError)
        << "embedding_backward: id " << ids.data[i] << " at " << i << " is outside [0, "
        << range.all << ")";
  }
  auto parts = [](int64_t elements, int64_t most) {
    return std::clamp<int64_t>(std::min(elements / kElementsPerThread, most), 1, NumThreads());
  };
  int64_t fills = addend == out.data ? 0 : parts(rows * dim, rows);
  ParallelFor(fills, [&](int64_t part) {
    auto [first, last] = Share(rows, 1, fills, part);
    T* start = out.data + first * dim;
    const size_t bytes = (last - first) * dim * sizeof(T);
    addend ? std::memcpy(start, addend + first * dim, bytes) : std::memset(start, 0, bytes);
  });
  int64_t adds = parts(count * dim, (dim + kLanes<T> - 1) / kLanes<T>);
  ParallelFor(adds, [&](int64_t part) {
    auto [first, last] = Share(dim, kLanes<T>, adds, part);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = static_cast<int64_t>(ids.data[i]) - range.begin;
      if (ids.data[i] == padding_idx || row < 0 || row >= rows) continue;
      T* target = out.data + row * dim;
      const T* source = grad.data + i * dim;
      for (int64_t j = first; j < last; ++j) target[j] += source[j];
    }
  });
}

template <typename T>
void WithIndex(TensorView grad, TensorView ids, const TensorView* addend, int64_t padding_idx,
               RowRange range, TensorView out) {
  auto function = ids.dtype().bits == 64 ? &EmbeddingBackward<T, int64_t>
                                         : &EmbeddingBackward<T, int32_t>;
  function(grad, ids, addend, padding_idx, range, out);
}

void Dispatch(TensorView grad, TensorView ids, const TensorView* addend, int64_t padding_idx,
              RowRange range, TensorView out) {
  auto function = IsDouble(out) ? &WithIndex<double> : &WithIndex<float>;
  function(grad, ids, addend, padding_idx, range, out);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.embedding_backward",
           [](TensorView grad, TensorView ids, int64_t padding_idx, TensorView out) {
             Dispatch(grad, ids, nullptr, padding_idx, {0, out.size(0)}, out);
           })
      .def("relax_disc.cpu.embedding_backward_add",
           [](TensorView grad, TensorView ids, TensorView addend, int64_t padding_idx,
              TensorView out) {
             Dispatch(grad, ids, &addend, padding_idx, {0, out.size(0)}, out);
           })
      .def("relax_disc.cpu.embedding_backward_rows",
           [](TensorView grad, TensorView ids, int64_t padding_idx, int64_t begin, int64_t all,
              TensorView out) { Dispatch(grad, ids, nullptr, padding_idx, {begin, all}, out); })
      .def("relax_disc.cpu.embedding_backward_add_rows",
           [](TensorView grad, TensorView ids, TensorView addend, int64_t padding_idx,
              int64_t begin, int64_t all, TensorView out) {
             Dispatch(grad, ids, &addend, padding_idx, {begin, all}, out);
           });
}

}  // namespace relax_disc
