// The kernel of matrix products on any processor: vector registers, multiply and add.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_FMA_KERNEL_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_FMA_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/product/gemm_pack.h"
#include "kernels/product/gemm_tile.h"

namespace relax_disc {

/*! \brief Part of C that a tile computes, and what it adds. */
template <typename T>
struct TileTarget {
  int64_t rows, columns;
  T* c;
  int64_t c_pitch;
  const T* addend;  // null: none; may be C itself
  int64_t addend_pitch;  // 0: one row for all
};

/*!
 * \brief How operands are packed and tiles computed; a team of threads shares one.
 *
 * What every kernel has: types, sizes of tiles and blocks, PackA, PackB and Run.
 */
template <typename T>
class FmaKernel {
 public:
  using Element = T;
  using Packed = T;  // one packed number
  static constexpr int64_t kRows = kTileRows, kColumns = kTileColumns<T>;
  static constexpr int64_t kRowUnit = 1;    // rows are cut into its multiples
  static constexpr int64_t kDepthUnit = 1;  // packed depths are its multiples
  static constexpr int64_t kMostDepth = kDepth;
  static constexpr int64_t kFlag = 0;  // packed numbers at the end of a panel for the kernel's use
  /*! \brief Tile rows packed at once per thread: 20 tiles of AVX-512, 450 KiB, half of L2. */
  static constexpr int64_t kBlockTiles = 20;
  /*! \brief Bytes of a row of a shared block of B: 1.5 MiB in all, which L3 holds. */
  static constexpr int64_t kBlockRowBytes = 4096;
  static constexpr bool kMayBePrivate = false;  // see `IsPrivate`

  /*! \param a The left operand of the product, by whose strides its panels lie. */
  explicit FmaKernel(const Matrix<T>& a) : by_rows_(a.column == 1 || a.row != 1) {}

  /*! \brief What a thread holds while it works. */
  struct Scope {};

  /*! \brief Row at which tile `index` of `tiles` starts. */
  static int64_t Top(int64_t rows, int64_t tiles, int64_t index) {
    return TileTop(rows, tiles, index);
  }
  /*! \brief Packed numbers between the panels of tile rows, and of tile columns, of a depth. */
  int64_t PanelOfA(int64_t depth) const {
    return by_rows_ ? MostPanelOfA(depth) : kTileRows * depth + kTileCopy<T>;
  }
  static int64_t PanelOfB(int64_t depth) { return kColumns * depth; }
  /*! \brief Most that `PanelOfA` says of any block of a product so deep, or less deep. */
  static int64_t MostPanelOfA(int64_t) { return kTileRows * kPitch<T>; }

  void PackA(const Matrix<T>& a, int64_t rows, int64_t depth, int64_t tiles, T* target,
             int64_t panel) {
    relax_disc::PackA(a, rows, depth, tiles, by_rows_, target, panel);
  }

  void PackB(const Matrix<T>& b, int64_t depth, int64_t columns, T* target) {
    relax_disc::PackB(b, depth, columns, target);
  }

  /*! \brief One tile of C from a packed tile row of A and a packed tile column of B. */
  void Run(const T* a, const T* b, int64_t depth, const TileTarget<T>& target) const {
    const int64_t vectors = PanelVectors<T>(target.columns);
    TileOperands<T> tile{};
    tile.depth = depth;
    tile.a = a;
    tile.a_step = target.rows;
    tile.b = b;
    tile.b_step = vectors * kLanes<T>;
    tile.c = target.c;
    tile.c_pitch = target.c_pitch;
    tile.addend = target.addend;
    tile.addend_pitch = target.addend_pitch;
    if (target.columns == tile.b_step) {
      RunTile(target.rows, vectors, by_rows_, tile);
    } else {
      RunEdge(target, tile);
    }
  }

 private:
  /*! \brief A tile whose last vector is not full: computed beside C, then copied. */
  void RunEdge(const TileTarget<T>& target, TileOperands<T> tile) const {
    alignas(kVectorBytes) T sums[kTileRows * kTileColumns<T>];
    alignas(kVectorBytes) T addends[kTileRows * kTileColumns<T>];
    if (target.addend) {
      for (int64_t r = 0; r < target.rows; ++r) {
        for (int64_t x = 0; x < tile.b_step; ++x) {
          addends[r * tile.b_step + x] =
              x < target.columns ? target.addend[r * target.addend_pitch + x] : T(0);
        }
      }
      tile.addend = addends;
    }
    tile.c = sums;
    tile.c_pitch = tile.addend_pitch = tile.b_step;
    RunTile(target.rows, PanelVectors<T>(target.columns), by_rows_, tile);
    for (int64_t r = 0; r < target.rows; ++r) {
      std::memcpy(target.c + r * target.c_pitch, sums + r * tile.b_step,
                  target.columns * sizeof(T));
    }
  }

  bool by_rows_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_FMA_KERNEL_H_
