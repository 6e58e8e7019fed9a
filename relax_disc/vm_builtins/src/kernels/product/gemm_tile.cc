// Instances of the register tiles, one per number of rows, vectors and layout of A.
#include "kernels/product/gemm_tile.h"

namespace relax_disc {
namespace {

template <typename T>
using TileFunction = void (*)(const TileOperands<T>&);

template <typename T, int Vectors, LayoutOfA Layout, size_t... R>
TileFunction<T> Choose(int64_t rows, std::index_sequence<R...>) {
  static constexpr TileFunction<T> table[] = {
      &Tile<T, static_cast<int>(R) + 1, Vectors, Layout>...};
  return table[rows - 1];
}

template <typename T, LayoutOfA Layout, size_t... V>
TileFunction<T> Choose(int64_t rows, int64_t vectors, std::index_sequence<V...>) {
  constexpr auto all_rows = std::make_index_sequence<kTileRows>{};
  using Chooser = TileFunction<T> (*)(int64_t, decltype(all_rows));
  static constexpr Chooser table[] = {&Choose<T, static_cast<int>(V) + 1, Layout>...};
  return table[vectors - 1](rows, all_rows);
}

}  // namespace

template <typename T>
void RunTile(int64_t rows, int64_t vectors, LayoutOfA layout, const TileOperands<T>& operands) {
  constexpr auto all_vectors = std::make_index_sequence<kTileVectors>{};
  switch (layout) {
    case LayoutOfA::kPackedRows:
      return Choose<T, LayoutOfA::kPackedRows>(rows, vectors, all_vectors)(operands);
    case LayoutOfA::kPackedSteps:
      return Choose<T, LayoutOfA::kPackedSteps>(rows, vectors, all_vectors)(operands);
    case LayoutOfA::kRows:
      return Choose<T, LayoutOfA::kRows>(rows, vectors, all_vectors)(operands);
    case LayoutOfA::kSteps:
      return Choose<T, LayoutOfA::kSteps>(rows, vectors, all_vectors)(operands);
  }
}

template void RunTile<float>(int64_t, int64_t, LayoutOfA, const TileOperands<float>&);
template void RunTile<double>(int64_t, int64_t, LayoutOfA, const TileOperands<double>&);

}  // namespace relax_disc
