// Register tiles of matrix products: C[rows, columns] = init + A-panel * B-panel.
//
// Written with the compilers' vector extensions, so that one source serves AVX-512, AVX2 and NEON.
// The sum over k of every element runs in ascending order in one accumulator, whatever the tile.
#ifndef RELAX_DISC_GEMM_TILE_H_
#define RELAX_DISC_GEMM_TILE_H_

#include <cstdint>
#include <cstring>
#include <utility>

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

/*! \brief Depth of one panel: a B panel of it fills two thirds of a 48 KiB L1 cache. */
constexpr int kDepth = 256;

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
 * \brief One register tile: C = init + A * B over `depth` steps.
 *
 * B is [depth, Vectors * lanes], packed; A is [Rows, kPitch] if `ByRows`, else [depth, Rows].
 * `init` is null for zero; its pitch may be 0 (one row for all) and it may be C itself.
 */
template <typename T, int Rows, int Vectors, bool ByRows>
void Tile(int64_t depth, const T* a, const T* b, const T* init, int64_t init_pitch, T* c,
          int64_t c_pitch) {
  typedef typename Vector<T>::Type V;
  typedef typename Vector<T>::Loose Loose;
  constexpr int L = kLanes<T>;
  V sum[Rows][Vectors];
  if (init == nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] = V{};
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        sum[i][j] = *reinterpret_cast<const Loose*>(init + i * init_pitch + j * L);
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    V row[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) row[j] = *reinterpret_cast<const V*>(b + j * L);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      V value = V{} + (ByRows ? a[i * kPitch<T>] : a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] += value * row[j];
    }
    b += Vectors * L;
    a += ByRows ? 1 : Rows;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) *reinterpret_cast<Loose*>(c + i * c_pitch + j * L) = sum[i][j];
  }
}

/*! \brief Tile<T, rows, vectors, by_rows> chosen at run time; instantiated in gemm_tile.cc. */
template <typename T>
void RunTile(int64_t depth, const T* a, int64_t rows, bool by_rows, const T* b, int64_t vectors,
             const T* init, int64_t init_pitch, T* c, int64_t c_pitch);
extern template void RunTile<float>(int64_t, const float*, int64_t, bool, const float*, int64_t,
                                    const float*, int64_t, float*, int64_t);
extern template void RunTile<double>(int64_t, const double*, int64_t, bool, const double*, int64_t,
                                     const double*, int64_t, double*, int64_t);

}  // namespace relax_disc

#endif  // RELAX_DISC_GEMM_TILE_H_
