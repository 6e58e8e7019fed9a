// A matrix packed once and multiplied many times, as a recurrent layer multiplies its weights.
//
// Sums run as in `gemm.h`: depth blocks in ascending k, so that a row's result does not depend on
// which rows are multiplied with it.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_PACKED_MATRIX_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_PACKED_MATRIX_H_

#include <algorithm>
#include <cstdint>

#include "kernels/product/gemm_pack.h"

namespace relax_disc {

/*! \brief The right operand [depth, columns] of products, in panels of a tile's width. */
template <typename T>
class PackedMatrix {
 public:
  /*! \brief Columns of a product as stored: what a row of the result needs room for. */
  static int64_t Pitch(int64_t columns) {
    return (columns + kTileColumns<T> - 1) / kTileColumns<T> * kTileColumns<T>;
  }
  /*! \brief Elements of memory that packing needs. */
  static int64_t Size(int64_t depth, int64_t columns) { return depth * Pitch(columns); }
  /*! \brief Elements of memory that one thread's products need. */
  static constexpr int64_t kWorkspace = kTileRows * kPitch<T>;

  PackedMatrix(const Matrix<T>& b, int64_t depth, int64_t columns, T* memory)
      : depth_(depth), columns_(columns), pitch_(Pitch(columns)), data_(memory) {
    for (int64_t k = 0; k < depth; k += kDepth) {
      int64_t steps = std::min<int64_t>(kDepth, depth - k);
      for (int64_t j = 0; j < columns; j += kTileColumns<T>) {
        PackB(b.At(k, j), steps, std::min<int64_t>(kTileColumns<T>, columns - j),
              memory + k * pitch_ + j * steps);
      }
    }
  }

  /*! \brief c[rows, Pitch(columns)] = a[rows, depth] * this; columns past the last are zero. */
  void Multiply(const T* a, int64_t a_pitch, int64_t rows, T* c, T* workspace) const {
    int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t k = 0; k < depth_; k += kDepth) {
      int64_t steps = std::min<int64_t>(kDepth, depth_ - k);
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t top = TileTop(rows, tiles, t), height = TileTop(rows, tiles, t + 1) - top;
        PackA(Matrix<T>{a + top * a_pitch + k, a_pitch, 1}, height, steps, 1, true, workspace, 0);
        for (int64_t j = 0; j < columns_; j += kTileColumns<T>) {
          int64_t vectors = PanelVectors<T>(columns_ - j);
          TileOperands<T> tile{};
          tile.depth = steps;
          tile.a = workspace;
          tile.a_step = height;
          tile.b = data_ + k * pitch_ + j * steps;
          tile.b_step = vectors * kLanes<T>;
          tile.c = c + top * pitch_ + j;
          tile.c_pitch = tile.addend_pitch = pitch_;
          tile.addend = k > 0 ? tile.c : nullptr;
          RunTile(height, vectors, true, tile);
        }
      }
    }
  }

 private:
  int64_t depth_, columns_, pitch_;
  const T* data_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_PACKED_MATRIX_H_
