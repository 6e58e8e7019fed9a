// Products of groups of rows with a matrix each (mixtures of experts): relax_disc.cpu.grouped_matmul
// and relax_disc.cpu.grouped_outer.  Groups lie one behind the other, `ends` says where each ends.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/product/gemm.h"
#include "kernels/parallel.h"
#include "kernels/tensor_view.h"

namespace relax_disc {
namespace {

/*! \brief First and last row of each group, inside the rows whatever `ends` holds. */
template <typename Index>
std::vector<std::pair<int64_t, int64_t>> Borders(TensorView ends_view, int64_t rows) {
  Tensor<Index> ends(ends_view);
  std::vector<std::pair<int64_t, int64_t>> borders;
  int64_t start = 0;
  for (int64_t group = 0; group < ends.Size(0, ends.ndim); ++group) {
    const int64_t end = std::clamp<int64_t>(ends.data[group], start, rows);
    borders.emplace_back(start, end);
    start = end;
  }
  return borders;
}

std::vector<std::pair<int64_t, int64_t>> Groups(TensorView ends, int64_t rows, int64_t count) {
  const bool is_long = ends.dtype().bits == 64;
  auto groups = is_long ? Borders<int64_t>(ends, rows) : Borders<int32_t>(ends, rows);
  TVM_FFI_CHECK(static_cast<int64_t>(groups.size()) == count, ValueError)
      << "grouped product: " << groups.size() << " groups of rows for " << count << " matrices";
  return groups;
}

/*! \brief out[s] = rows[s] @ matrices[group of s], or by the transpose; 0 for rows of no group. */
template <typename T>
void GroupedMatmul(TensorView rows_view, TensorView matrices_view, TensorView ends,
                   int64_t transposed, TensorView out_view) {
  Tensor<T> rows(rows_view), matrices(matrices_view), out(out_view);
  const int64_t high = matrices.shape[1], wide = matrices.shape[2];
  const int64_t k = transposed ? wide : high, n = transposed ? high : wide;
  TVM_FFI_CHECK(rows.shape[1] == k && out.shape[1] == n && out.shape[0] == rows.shape[0],
                ValueError)
      << "grouped_matmul: shapes do not fit";
  const auto groups = Groups(ends, rows.shape[0], matrices.shape[0]);
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto [start, end] = groups[group];
    T* matrix = matrices.data + static_cast<int64_t>(group) * high * wide;
    const Matrix<T> right = transposed ? Matrix<T>{matrix, 1, wide} : Matrix<T>{matrix, wide, 1};
    const Matrix<T> left{rows.data + start * k, k, 1};
    Multiply(Product<T>{end - start, n, k, left, right, nullptr, 0, out.data + start * n, n});
  }
  const int64_t done = groups.empty() ? 0 : groups.back().second;
  std::fill(out.data + done * n, out.data + out.shape[0] * n, T(0));
}

/*! \brief out[g] = left[rows of g]^T @ right[rows of g]. */
template <typename T>
void GroupedOuter(TensorView left_view, TensorView right_view, TensorView ends,
                  TensorView out_view) {
  Tensor<T> left(left_view), right(right_view), out(out_view);
  const int64_t m = out.shape[1], n = out.shape[2];
  TVM_FFI_CHECK(left.shape[1] == m && right.shape[1] == n && left.shape[0] == right.shape[0],
                ValueError)
      << "grouped_outer: shapes do not fit";
  const auto groups = Groups(ends, left.shape[0], out.shape[0]);
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto [start, end] = groups[group];
    T* target = out.data + static_cast<int64_t>(group) * m * n;
    const Matrix<T> a{left.data + start * m, 1, m}, b{right.data + start * n, n, 1};
    Multiply(Product<T>{m, n, end - start, a, b, nullptr, 0, target, n});
  }
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.grouped_matmul",
           [](TensorView rows, TensorView matrices, TensorView ends, int64_t transposed,
              TensorView out) {
             (IsDouble(out) ? &GroupedMatmul<double> : &GroupedMatmul<float>)(rows, matrices, ends,
                                                                              transposed, out);
           })
      .def("relax_disc.cpu.grouped_outer",
           [](TensorView left, TensorView right, TensorView ends, TensorView out) {
             (IsDouble(out) ? &GroupedOuter<double> : &GroupedOuter<float>)(left, right, ends, out);
           });
}

}  // namespace relax_disc
