// Packing of matrix operands into the panels that `gemm_tile.h` reads.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_PACK_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_PACK_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/product/gemm_tile.h"

namespace relax_disc {

/*! \brief A matrix in memory; strides count elements, and usually one of them is 1. */
template <typename T>
struct Matrix {
  const T* data;
  int64_t row;
  int64_t column;

  Matrix At(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
};

/*! \brief Ask early for a row that the hardware cannot guess, since rows lie far apart. */
template <typename T>
inline void PrefetchRow(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(row + i);
  }
}

namespace detail {

/*! \brief Lanes I of the concatenation of a and b. */
template <int... I, typename V>
inline V Shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else  // GCC has __builtin_shufflevector from version 12 on
  return __builtin_shuffle(a, b, decltype(a < b){I...});
#endif
}
template <int H, int L, typename V, int... C>
inline V MergeLow(V a, V b, std::integer_sequence<int, C...>) {
  return Shuffle<((C & H) == 0 ? C : L + C - H)...>(a, b);
}
template <int H, int L, typename V, int... C>
inline V MergeHigh(V a, V b, std::integer_sequence<int, C...>) {
  return Shuffle<((C & H) == 0 ? C + H : L + C)...>(a, b);
}

template <int H, int L, typename V>
inline void TransposeStep(V (&r)[L]) {
  if constexpr (H > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if ((i & H) == 0) {
        V low = MergeLow<H, L>(r[i], r[i + H], std::make_integer_sequence<int, L>{});
        V high = MergeHigh<H, L>(r[i], r[i + H], std::make_integer_sequence<int, L>{});
        r[i] = low;
        r[i + H] = high;
      }
    }
    TransposeStep<H / 2, L>(r);
  }
}

/*! \brief target[j * pitch + i] = source[i * source_pitch + j] for a square of vector lanes. */
template <typename T>
inline void TransposeSquare(const T* source, int64_t source_pitch, T* target, int64_t pitch) {
  constexpr int L = kLanes<T>;
  typename Vector<T>::Type r[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    r[i] = *reinterpret_cast<const typename Vector<T>::Loose*>(source + i * source_pitch);
  }
  TransposeStep<L / 2, L>(r);
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    *reinterpret_cast<typename Vector<T>::Loose*>(target + i * pitch) = r[i];
  }
}

}  // namespace detail

/*! \brief target[i * pitch + j] = source(j, i), a transposition of [columns, rows] to rows. */
template <typename T>
void CopyTransposed(const T* source, int64_t source_pitch, int64_t rows, int64_t columns, T* target,
                    int64_t pitch) {
  constexpr int L = kLanes<T>;
  constexpr int kAhead = kTileColumns<T>;
  int64_t i = 0;
  for (; i + L <= rows; i += L) {
    int64_t j = 0;
    for (; j + L <= columns; j += L) {
      const T* ahead = source + (j + kAhead) * source_pitch + i;
      for (int r = 0; r < L; ++r) __builtin_prefetch(ahead + r * source_pitch);
      detail::TransposeSquare(source + j * source_pitch + i, source_pitch, target + i * pitch + j,
                              pitch);
    }
    for (; j < columns; ++j) {
      for (int64_t r = i; r < i + L; ++r) target[r * pitch + j] = source[j * source_pitch + r];
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t r = i; r < rows; ++r) target[r * pitch + j] = source[j * source_pitch + r];
  }
}

/*! \brief Vectors that hold `columns` columns of one B panel. */
template <typename T>
inline int64_t PanelVectors(int64_t columns) {
  return std::min<int64_t>((columns + kLanes<T> - 1) / kLanes<T>, kTileVectors);
}

/*! \brief Pack [depth, columns] of B, at most a tile wide, padded with zeros to whole vectors. */
template <typename T>
void PackB(const Matrix<T>& b, int64_t depth, int64_t columns, T* target) {
  int64_t width = PanelVectors<T>(columns) * kLanes<T>;
  if (b.column == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* source = b.data + k * b.row;
      T* row = target + k * width;
      if (columns == kTileColumns<T>) {
        PrefetchRow(source + kTileColumns<T>, kTileColumns<T>);
        std::memcpy(row, source, kTileColumns<T> * sizeof(T));
      } else {
        for (int64_t j = 0; j < columns; ++j) row[j] = source[j];
        for (int64_t j = columns; j < width; ++j) row[j] = T(0);
      }
    }
    return;
  }
  if (b.row == 1) {
    CopyTransposed(b.data, b.column, depth, columns, target, width);
  } else {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        target[k * width + j] = b.data[k * b.row + j * b.column];
      }
    }
  }
  for (int64_t k = 0; k < depth && columns < width; ++k) {
    for (int64_t j = columns; j < width; ++j) target[k * width + j] = T(0);
  }
}

/*! \brief Row at which tile `index` of `tiles` starts: heights differ by one `unit` at most. */
inline int64_t TileTop(int64_t rows, int64_t tiles, int64_t index, int64_t unit = 1) {
  return std::min(rows, (rows + unit - 1) / unit * index / tiles * unit);
}

/*! \brief How early: packing the gradient of 32,000 logits became a tenth faster. */
constexpr int64_t kPrefetchRows = 4;

/*! \brief Elements copied at once for one tile row of a panel that is not stored by rows. */
template <typename T>
constexpr int kTileCopy = (kTileRows + kLanes<T> - 1) / kLanes<T> * kLanes<T>;

/*!
 * \brief Pack [rows, depth] of A as `tiles` panels, `panel` elements apart; layouts: see Tile.
 *
 * A panel not stored by rows needs room for kTileCopy elements more than it holds: whole vectors
 * are copied, and what is too much is overwritten by the next step's copy.
 */
template <typename T>
void PackA(const Matrix<T>& a, int64_t rows, int64_t depth, int64_t tiles, bool by_rows,
           T* target, int64_t panel) {
  if (!by_rows) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* source = a.data + k * a.column;
      if (k + kPrefetchRows < depth) PrefetchRow(source + kPrefetchRows * a.column, rows);
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t top = TileTop(rows, tiles, t), height = TileTop(rows, tiles, t + 1) - top;
        T* row = target + t * panel + k * height;
        if (top + kTileCopy<T> <= rows) {
          std::memcpy(row, source + top, kTileCopy<T> * sizeof(T));
        } else {
          for (int64_t i = 0; i < height; ++i) row[i] = source[top + i];
        }
      }
    }
    return;
  }
  for (int64_t t = 0; t < tiles; ++t) {
    int64_t top = TileTop(rows, tiles, t), bottom = TileTop(rows, tiles, t + 1);
    for (int64_t i = top; i < bottom; ++i) {
      T* row = target + t * panel + (i - top) * kPitch<T>;
      const T* source = a.data + i * a.row;
      if (a.column == 1) {
        if (i + kPrefetchRows < rows) PrefetchRow(source + kPrefetchRows * a.row, depth);
        std::memcpy(row, source, depth * sizeof(T));
      } else {
        for (int64_t k = 0; k < depth; ++k) row[k] = source[k * a.column];
      }
    }
  }
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_PACK_H_
