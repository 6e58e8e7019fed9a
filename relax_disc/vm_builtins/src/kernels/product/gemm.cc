// Matrix products of tensors: relax_disc.cpu.matmul, relax_disc.cpu.batch_matmul; `own_` before a
// name leaves out the choice of PyTorch's kernels.
#include "kernels/product/gemm.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/product/product_choice.h"
#include "kernels/tensor_view.h"

namespace relax_disc {
namespace {

/*! \brief Multiply-adds that are worth one more thread: about 4 microseconds of one core. */
constexpr int64_t kWorkPerThread = 1 << 19;

/*! \brief Cut C over the threads so that the slowest has least to multiply and to pack. */
template <typename T, typename Left, typename Right>
std::pair<int, int> ChooseGrid(const Product<T, Left, Right>& p) {
  const int64_t work = p.m * p.n * p.k;
  const int threads = static_cast<int>(std::clamp<int64_t>(work / kWorkPerThread, 1, NumThreads()));
  std::pair<int, int> best{1, 1};
  double least = std::numeric_limits<double>::infinity();
  int64_t row_tiles = (p.m + kTileRows - 1) / kTileRows;
  int64_t column_tiles = (p.n + kTileColumns<T> - 1) / kTileColumns<T>;
  for (int rows = 1; rows <= threads; ++rows) {
    int columns = threads / rows;
    if (rows > row_tiles || columns > column_tiles) continue;
    double height = static_cast<double>((p.m + rows - 1) / rows);
    double width = static_cast<double>((column_tiles + columns - 1) / columns) * kTileColumns<T>;
    // Packing one element of A costs as much as about 16 multiply-adds.
    double cost = height * width + 16.0 * height;
    if (cost < least) {
      least = cost;
      best = {rows, columns};
    }
  }
  return best;
}

/*! \brief Compute a product by the kernel that its sizes ask for. */
template <typename T>
void RunAny(const Product<T>& product, int rows, int columns) {
  if constexpr (std::is_same_v<T, float>) {
    if (MayUseAmx(product.n, product.k)) return RunTeam<AmxKernel>(product, rows, columns);
  }
  RunTeam<FmaKernel<T>>(product, rows, columns);
}

/*! \brief Views of the last two axes of an operand for every index of the leading ones. */
template <typename T>
struct Batches {
  std::vector<int64_t> sizes;    // logical, batch axes first
  std::vector<int64_t> strides;  // elements
  T* data;

  Batches(const Tensor<T>& tensor, int64_t axes) : data(tensor.data) {
    int rank = tensor.ndim;
    std::vector<int64_t> pitch(rank);
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      pitch[i] = step;
      step *= tensor.shape[i];
    }
    for (int i = 0; i < rank; ++i) {
      int from = static_cast<int>(axes >> (4 * (rank - 1 - i)) & 15);
      TVM_FFI_CHECK(from < rank, ValueError) << "axes " << axes << " of a tensor of rank " << rank;
      sizes.push_back(tensor.shape[from]);
      strides.push_back(pitch[from]);
    }
  }
  int64_t Rows() const { return sizes[sizes.size() - 2]; }
  int64_t Columns() const { return sizes.back(); }
  Matrix<T> View(int64_t offset) const {
    return {data + offset, strides[strides.size() - 2], strides.back()};
  }
  bool IsTransposed() const { return strides.back() != 1 && Columns() > 1; }
};

Operands OperandsOf(bool transpose_a, bool transpose_b) {
  if (transpose_a) return Operands::kTransposedA;
  return transpose_b ? Operands::kTransposedB : Operands::kPlain;
}

template <typename T>
void BatchMatmul(TensorView a_view, TensorView b_view, int64_t a_axes, int64_t b_axes,
                 int64_t c_axes, TensorView c_view, bool has_choice) {
  Batches<T> a(Tensor<T>(a_view), a_axes), b(Tensor<T>(b_view), b_axes),
      c(Tensor<T>(c_view), c_axes);
  int64_t batch_rank = static_cast<int64_t>(c.sizes.size()) - 2;
  TVM_FFI_CHECK(a.Columns() == b.Rows() && a.Rows() == c.Rows() && b.Columns() == c.Columns() &&
                    (c.Columns() <= 1 || c.strides.back() == 1),
                ValueError)
      << "batch_matmul: shapes do not fit";
  int64_t count = 1;
  for (int64_t i = 0; i < batch_rank; ++i) count *= c.sizes[i];
  if (std::is_same_v<T, float> && has_choice) {
    const OtherProducts* others =
        ChosenProducts({count, c.Rows(), c.Columns(), a.Columns()},
                       OperandsOf(a.IsTransposed(), b.IsTransposed()), NumThreads());
    if (others && others->batch_matmul(a_view, b_view, a_axes, b_axes, c_axes, c_view)) return;
  }
  auto product = [&](int64_t index) {
    int64_t at[3] = {0, 0, 0};
    for (int64_t i = batch_rank - 1; i >= 0; --i) {
      int64_t coordinate = index % c.sizes[i];
      index /= c.sizes[i];
      const Batches<T>* all[3] = {&a, &b, &c};
      for (int x = 0; x < 3; ++x) {
        int64_t axis = i + static_cast<int64_t>(all[x]->sizes.size()) - 2 - batch_rank;
        if (axis >= 0 && all[x]->sizes[axis] != 1) at[x] += coordinate * all[x]->strides[axis];
      }
    }
    Matrix<T> target = c.View(at[2]);
    return Product<T>{c.Rows(),  c.Columns(), a.Columns(), a.View(at[0]),
                      b.View(at[1]), nullptr, 0, const_cast<T*>(target.data), target.row};
  };
  int64_t work = c.Rows() * c.Columns() * a.Columns();
  if (count >= 2 * NumThreads() || count * work < kWorkPerThread) {
    const int threads = count * work < kWorkPerThread ? 1 : NumThreads();
    const int64_t bytes = PieceBytes(GemmBytes<T>(c.Rows(), c.Columns(), a.Columns(), 1));
    WorkspaceScope workspace;
    char* memory = workspace.Take<char>(threads * bytes);
    ParallelFor(count, threads, [&](int64_t i, int thread) {
      MultiplySerial(product(i), memory + thread * bytes, bytes);
    });
  } else {
    for (int64_t i = 0; i < count; ++i) Multiply(product(i));
  }
}

template <typename T>
void Matmul(TensorView a_view, TensorView b_view, const TensorView* addend_view, int64_t a_split,
            int64_t b_split, int64_t transpose_a, int64_t transpose_b, TensorView c_view,
            bool has_choice) {
  Tensor<T> a(a_view), b(b_view), c(c_view);
  int64_t a_rows = a.Size(0, a_split), a_columns = a.Size(a_split, a.ndim);
  int64_t b_rows = b.Size(0, b_split), b_columns = b.Size(b_split, b.ndim);
  Product<T> p;
  p.m = transpose_a ? a_columns : a_rows;
  p.k = transpose_a ? a_rows : a_columns;
  p.n = transpose_b ? b_rows : b_columns;
  TVM_FFI_CHECK(p.k == (transpose_b ? b_columns : b_rows) && c.Size(0, c.ndim) == p.m * p.n,
                ValueError)
      << "matmul: [" << p.m << ", " << p.k << "] by [" << (transpose_b ? b_columns : b_rows)
      << ", " << p.n << "] into " << c.Size(0, c.ndim) << " elements";
  p.a = transpose_a ? Matrix<T>{a.data, 1, a_columns} : Matrix<T>{a.data, a_columns, 1};
  p.b = transpose_b ? Matrix<T>{b.data, 1, b_columns} : Matrix<T>{b.data, b_columns, 1};
  p.c = c.data;
  p.c_pitch = p.n;
  p.addend = nullptr;
  p.addend_pitch = 0;
  if (addend_view != nullptr) {
    Tensor<T> addend(*addend_view);
    int64_t size = addend.Size(0, addend.ndim);
    TVM_FFI_CHECK(size == p.m * p.n || size == p.n, ValueError)
        << "matmul_add: " << size << " elements to add to [" << p.m << ", " << p.n << "]";
    p.addend = addend.data;
    p.addend_pitch = size == p.m * p.n ? p.n : 0;
  }
  if (std::is_same_v<T, float> && has_choice) {
    const OtherProducts* others = ChosenProducts(
        {1, p.m, p.n, p.k}, OperandsOf(transpose_a != 0, transpose_b != 0), NumThreads());
    if (others && others->matmul(a_view, b_view, addend_view, a_split, b_split, transpose_a,
                                 transpose_b, c_view)) {
      return;
    }
  }
  Multiply(p);
}

/*! \brief Register the functions under a prefix. */
void Define(const std::string& prefix, bool has_choice) {
  auto product = [has_choice](TensorView a, TensorView b, const TensorView* addend,
                              int64_t a_split, int64_t b_split, int64_t transpose_a,
                              int64_t transpose_b, TensorView c) {
    const auto function = IsDouble(c) ? &Matmul<double> : &Matmul<float>;
    function(a, b, addend, a_split, b_split, transpose_a, transpose_b, c, has_choice);
  };
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def((prefix + "matmul").c_str(),
           [=](TensorView a, TensorView b, int64_t a_split, int64_t b_split, int64_t transpose_a,
               int64_t transpose_b, TensorView c) {
             product(a, b, nullptr, a_split, b_split, transpose_a, transpose_b, c);
           })
      .def((prefix + "matmul_add").c_str(),
           [=](TensorView a, TensorView b, TensorView addend, int64_t a_split, int64_t b_split,
               int64_t transpose_a, int64_t transpose_b, TensorView c) {
             product(a, b, &addend, a_split, b_split, transpose_a, transpose_b, c);
           })
      .def((prefix + "batch_matmul").c_str(),
           [=](TensorView a, TensorView b, int64_t a_axes, int64_t b_axes, int64_t c_axes,
               TensorView c) {
             const auto function = IsDouble(c) ? &BatchMatmul<double> : &BatchMatmul<float>;
             function(a, b, a_axes, b_axes, c_axes, c, has_choice);
           });
}

}  // namespace

template <typename T>
void MultiplySerial(const Product<T>& product, char* memory, int64_t bytes) {
  if (FillIfNoDepth(product)) return;
  LentWorkspace lent(memory, bytes);
  RunAny(product, 1, 1);
}

template <typename T>
void Multiply(const Product<T>& product) {
  if (FillIfNoDepth(product)) return;
  auto [rows, columns] = ChooseGrid(product);
  RunAny(product, rows, columns);
}

template <typename Left, typename Right>
void MultiplyByTiles(const Product<float, Left, Right>& product) {
  auto [rows, columns] = ChooseGrid(product);
  RunTeam<AmxKernel>(product, rows, columns);
}

template void MultiplySerial<float>(const Product<float>&, char*, int64_t);
template void MultiplySerial<double>(const Product<double>&, char*, int64_t);
template void Multiply<float>(const Product<float>&);
template void Multiply<double>(const Product<double>&);
template void MultiplyByTiles(const Product<float, WindowMatrix>&);
template void MultiplyByTiles(const Product<float, Matrix<float>, WindowMatrix>&);

TVM_FFI_STATIC_INIT_BLOCK() {
  Define("relax_disc.cpu.", true);
  Define("relax_disc.cpu.own_", false);
}

}  // namespace relax_disc
