// Register tiles of matrix products: C[rows, columns] = A-panel * B-panel + addend.
//
// Written with the compilers' vector extensions, so that one source serves AVX-512, AVX2 and NEON.
// The sum over k of every element runs in ascending order in one accumulator, whatever the tile.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_TILE_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_TILE_H_

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace relax_disc {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;  // 32 registers: 14 x 2 accumulators, 2 of B, 1 of A
constexpr int kTileRows = 14;
constexpr int kTileVectors = 2;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;  // 16 registers: 6 x 2 accumulators
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
#else
constexpr int kVectorBytes = 16;  // NEON: 32 registers
constexpr int kTileRows = 8;
constexpr int kTileVectors = 3;
#endif

/*! \brief Most steps of k in one panel; of 256, 384 and 512 the fastest over a Llama step. */
constexpr int kDepth = 384;

template <typename T>
struct Vector;
template <>
struct Vector<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef float Loose __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct Vector<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef double Loose __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <typename T>
constexpr int kTileColumns = kTileVectors * kLanes<T>;
/*! \brief Row pitch of A panels stored by rows; the pad keeps rows out of one cache set. */
template <typename T>
constexpr int kPitch = kDepth + kLanes<T>;

/*!
 * \brief a * b + c, rounded once where the processor can.
 *
 * Left to itself, GCC splits some chains of these into two operations (its tuning for Zen), and
 * then an element would depend on the shape of its tile.
 */
template <typename V>
inline V MultiplyAdd(V a, V b, V c) {
  return a * b + c;
}
#if defined(__AVX512F__)
template <>
inline Vector<float>::Type MultiplyAdd(Vector<float>::Type a, Vector<float>::Type b,
                                       Vector<float>::Type c) {
  return (Vector<float>::Type)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
template <>
inline Vector<double>::Type MultiplyAdd(Vector<double>::Type a, Vector<double>::Type b,
                                        Vector<double>::Type c) {
  return (Vector<double>::Type)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__FMA__)
template <>
inline Vector<float>::Type MultiplyAdd(Vector<float>::Type a, Vector<float>::Type b,
                                       Vector<float>::Type c) {
  return (Vector<float>::Type)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
template <>
inline Vector<double>::Type MultiplyAdd(Vector<double>::Type a, Vector<double>::Type b,
                                        Vector<double>::Type c) {
  return (Vector<double>::Type)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#endif

/*! \brief How a tile's part of A lies: packed, or as it is stored. */
enum class LayoutOfA {
  kPackedRows,   // [rows, depth], kPitch apart
  kPackedSteps,  // [depth, rows], `a_step` apart
  kRows,         // as kPackedRows, but `a_step` apart
  kSteps         // as kPackedSteps; what `ahead` points to is asked for meanwhile, as for kRows
};

/*! \brief Operands of one register tile: C = A * B + addend over `depth` steps. */
template <typename T>
struct TileOperands {
  int64_t depth;
  const T* a;  // see LayoutOfA
  int64_t a_step;
  const T* b;  // [depth, vectors * lanes], `b_step` apart
  int64_t b_step;
  T* c;
  int64_t c_pitch;
  const T* addend;  // null: none; may be C itself
  int64_t addend_pitch;  // 0: one row for all
  const T* ahead;  // where memory is needed next, read in steps of `ahead_step`
  int64_t ahead_step;
};

template <typename T, int Rows, int Vectors, LayoutOfA Layout>
void Tile(const TileOperands<T>& p) {
  typedef typename Vector<T>::Type V;
  typedef typename Vector<T>::Loose Loose;
  constexpr int L = kLanes<T>;
  V sum[Rows][Vectors];
  constexpr bool kByRows = Layout == LayoutOfA::kPackedRows || Layout == LayoutOfA::kRows;
  constexpr bool kIsStored = Layout == LayoutOfA::kRows || Layout == LayoutOfA::kSteps;
  // An address can hold once or twice a pitch that is not constant: one base for three rows.
  constexpr int kBases = Layout == LayoutOfA::kRows ? (Rows + 2) / 3 : 1;
  const T* a[kBases];
  const T* b = p.b;
  const T* ahead = p.ahead;
  const int64_t b_step = p.b_step, a_step = kByRows ? 1 : p.a_step, ahead_step = p.ahead_step;
  const int64_t pitch = Layout == LayoutOfA::kRows ? p.a_step : kPitch<T>;
#pragma GCC unroll 16
  for (int i = 0; i < kBases; ++i) a[i] = p.a + 3 * i * pitch;
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) sum[i][j] = V{};
  }
  for (int64_t k = 0; k < p.depth; ++k) {
    V row[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) row[j] = *reinterpret_cast<const Loose*>(b + j * L);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const T* at = kBases > 1 ? a[i / 3] + i % 3 * pitch : a[0] + (kByRows ? i * pitch : i);
      const V value = *at - V{};  // x - 0 is x, as compilers know: a load that broadcasts
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] = MultiplyAdd(value, row[j], sum[i][j]);
    }
    b += b_step;
#pragma GCC unroll 16
    for (int i = 0; i < kBases; ++i) a[i] += a_step;
    if constexpr (kIsStored) {
      __builtin_prefetch(ahead);
      ahead += ahead_step;
    }
  }
  if (p.addend != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        sum[i][j] += *reinterpret_cast<const Loose*>(p.addend + i * p.addend_pitch + j * L);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      *reinterpret_cast<Loose*>(p.c + i * p.c_pitch + j * L) = sum[i][j];
    }
  }
}

/*! \brief Tile<T, rows, vectors, layout> chosen at run time; instantiated in gemm_tile.cc. */
template <typename T>
void RunTile(int64_t rows, int64_t vectors, LayoutOfA layout, const TileOperands<T>& operands);
extern template void RunTile<float>(int64_t, int64_t, LayoutOfA, const TileOperands<float>&);
extern template void RunTile<double>(int64_t, int64_t, LayoutOfA, const TileOperands<double>&);

/*! \brief RunTile with A packed: by rows or by steps. */
template <typename T>
inline void RunTile(int64_t rows, int64_t vectors, bool by_rows, const TileOperands<T>& operands) {
  RunTile(rows, vectors, by_rows ? LayoutOfA::kPackedRows : LayoutOfA::kPackedSteps, operands);
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_TILE_H_
