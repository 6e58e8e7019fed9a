// relax_disc.cpu.sort: the first elements of each row in sorted order, with their positions.
//
// Equal elements keep their order and NaN counts as the greatest, so that the order is total and
// results depend on nothing but the row.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <numeric>

#include "kernels/parallel.h"
#include "kernels/tensor_view.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

/*! \brief Elements that are worth a thread. */
constexpr int64_t kElementsPerThread = 1 << 12;

template <typename T>
bool IsLess(T a, T b) {
  return a < b || (b != b && a == a);  // NaN, unlike itself, is above all numbers
}

template <typename T>
void Sort(TensorView x_view, int64_t descending, TensorView values_view, TensorView places_view) {
  Tensor<T> x(x_view), values(values_view);
  Tensor<int64_t> places(places_view);
  TVM_FFI_CHECK(x.ndim > 0 && values.ndim == x.ndim && places.ndim == x.ndim, ValueError)
      << "sort: ranks " << x.ndim << ", " << values.ndim << ", " << places.ndim;
  const int64_t rows = x.Size(0, x.ndim - 1), length = x.shape[x.ndim - 1];
  const int64_t count = values.shape[values.ndim - 1];
  TVM_FFI_CHECK(count <= length && values.Size(0, values.ndim) == rows * count &&
                    places.Size(0, places.ndim) == rows * count,
                ValueError)
      << "sort: " << count << " of " << length << " elements of " << rows << " rows";
  const int64_t parts = std::clamp<int64_t>(std::min(rows, rows * length / kElementsPerThread), 1,
                                            NumThreads());
  WorkspaceScope workspace;
  int64_t* memory = workspace.Take<int64_t>(parts * length);
  ParallelFor(parts, [&](int64_t part) {
    int64_t* order = memory + part * length;
    for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
      const T* row = x.data + r * length;
      auto before = [row, descending](int64_t a, int64_t b) {
        if (descending ? IsLess(row[b], row[a]) : IsLess(row[a], row[b])) return true;
        if (descending ? IsLess(row[a], row[b]) : IsLess(row[b], row[a])) return false;
        return a < b;
      };
      std::iota(order, order + length, 0);
      if (count < length) {
        std::partial_sort(order, order + count, order + length, before);
      } else {
        std::sort(order, order + length, before);
      }
      for (int64_t k = 0; k < count; ++k) {
        values.data[r * count + k] = row[order[k]];
        places.data[r * count + k] = order[k];
      }
    }
  });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def(
      "relax_disc.cpu.sort",
      [](TensorView x, int64_t descending, TensorView values, TensorView places) {
        const bool wide = x.dtype().bits == 64;
        auto run = x.dtype().code == kDLFloat ? (wide ? &Sort<double> : &Sort<float>)
                                              : (wide ? &Sort<int64_t> : &Sort<int32_t>);
        run(x, descending, values, places);
      });
}

}  // namespace relax_disc
