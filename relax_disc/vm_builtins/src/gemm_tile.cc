// Instances of the register tiles, one per number of rows, vectors and layout of A.
#include "gemm_tile.h"

namespace relax_disc {
namespace {

template <typename T>
using TileFunction = void (*)(const TileOperands<T>&);

template <typename T, int Vectors, bool ByRows, size_t... R>
TileFunction<T> Choose(int64_t rows, std::index_sequence<R...>) {
  static constexpr TileFunction<T> table[] = {
      &Tile<T, static_cast<int>(R) + 1, Vectors, ByRows>...};
  return table[rows - 1];
}

template <typename T, size_t... V>
TileFunction<T> Choose(int64_t rows, int64_t vectors, bool by_rows, std::index_sequence<V...>) {
  constexpr auto all_rows = std::make_index_sequence<kTileRows>{};
  using Chooser = TileFunction<T> (*)(int64_t, decltype(all_rows));
  static constexpr Chooser by_row_table[] = {&Choose<T, static_cast<int>(V) + 1, true>...};
  static constexpr Chooser by_column_table[] = {&Choose<T, static_cast<int>(V) + 1, false>...};
  return (by_rows ? by_row_table : by_column_table)[vectors - 1](rows, all_rows);
}

}  // namespace

template <typename T>
void RunTile(int64_t rows, int64_t vectors, bool by_rows, const TileOperands<T>& operands) {
  Choose<T>(rows, vectors, by_rows, std::make_index_sequence<kTileVectors>{})(operands);
}

template void RunTile<float>(int64_t, int64_t, bool, const TileOperands<float>&);
template void RunTile<double>(int64_t, int64_t, bool, const TileOperands<double>&);

}  // namespace relax_disc
