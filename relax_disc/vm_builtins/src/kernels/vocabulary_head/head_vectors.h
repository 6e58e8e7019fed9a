// Products of a vocabulary head by the register tiles of vectors.
//
// Logits lie by class, [classes, rows of the chunk]: like this the weight and the logits are
// operands of the register tiles as they are stored. A chunk has too few rows to pay for packing a
// table as large as the vocabulary; only its inputs are packed. What the next tiles read is asked
// for while a tile runs, little by little: bursts of prefetches would stall.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_VECTORS_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_VECTORS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/parallel.h"
#include "kernels/product/gemm_pack.h"
#include "kernels/product/gemm_tile.h"
#include "kernels/subnormals.h"
#include "kernels/vocabulary_head/head_operands.h"
#include "kernels/workspace.h"

namespace relax_disc {

/*! \brief Shares out memory that is needed next over the tiles that run before. */
class Ahead {
 public:
  /*! \param parts Into how many the `size` elements from `from` on are cut. */
  Ahead(const float* from, int64_t size, int64_t parts) : from_(from), size_(size), parts_(parts) {}
  /*! \brief Have a tile ask for the next so many parts. */
  void Next(int64_t parts, TileOperands<float>* tile) {
    const int64_t begin = size_ * done_ / parts_;
    done_ += parts;
    const int64_t end = size_ * done_ / parts_;
    tile->ahead = from_ + begin;
    tile->ahead_step = (end - begin + tile->depth - 1) / tile->depth;
  }

 private:
  const float* from_;
  int64_t size_, parts_, done_ = 0;
};

class HeadVectors {
 public:
  /*! \brief Most bytes that products of chunks of so many rows take on so many threads. */
  static int64_t Bytes(int64_t, int64_t, int64_t, int64_t threads) {
    return PieceBytes(threads * kScratch * static_cast<int64_t>(sizeof(float)));
  }

  /*! \param workspace Lends `Bytes`. */
  HeadVectors(const HeadOperands& head, int64_t, WorkspaceScope* workspace)
      : head_(head), scratch_(workspace->Take<float>(NumThreads() * kScratch)) {
    const int64_t steps = (head.width + kDepth - 1) / kDepth, columns = kTileColumns<float>;
    depth_ = ((head.width + steps - 1) / steps + columns - 1) / columns * columns;
  }

  /*! \brief Take a chunk: pack its inputs, and their transpose, as right operands. */
  void Begin(const HeadRows& chunk) {
    rows_ = chunk;
    constexpr int64_t kColumns = kTileColumns<float>;
    const int64_t width = head_.width;
    ParallelFor((width + kColumns - 1) / kColumns, [&](int64_t panel) {
      const int64_t j = panel * kColumns, columns = std::min(kColumns, width - j);
      const int64_t step = PanelVectors<float>(columns) * kLanes<float>;
      float* packed = rows_.inputs + j * rows_.count;
      for (int64_t r = 0; r < rows_.count; ++r) {
        float* row = packed + r * step;
        std::memcpy(row, head_.x + rows_.rows[r] * width + j, sizeof(float) * columns);
        std::fill(row + columns, row + step, 0.0f);
      }
      const int64_t k = j / depth_ * depth_, depth = std::min(depth_, width - k);
      for (int64_t r = 0; r < rows_.count; r += kColumns) {
        const int64_t rows = std::min(kColumns, rows_.count - r);
        PackB(Matrix<float>{packed + r * step, 1, step}, columns, rows,
              rows_.across + k * rows_.pitch + r * depth +
                  (j - k) * PanelVectors<float>(rows) * kLanes<float>);
      }
    });
  }

  /*! \brief Logits of a block of classes on one of the threads: weight * inputs^T. */
  void Logits(int64_t block, int64_t thread) {
    float* packed = scratch_ + thread * kScratch;
    const int64_t width = head_.width, begin = block * kBlockClasses, end = head_.BlockEnd(block);
    // Rows a page apart would share one cache set.
    const bool direct = width * sizeof(float) % 4096 != 0;
    for (int64_t v = begin; v < end; v += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, end - v);
      Ahead ahead(head_.weight + (v + kTileRows) * width, kTileRows * width, rows_.pitch * width);
      for (int64_t k = 0; k < width; k += depth_) {
        const int64_t depth = std::min(depth_, width - k);
        const float* a = head_.weight + v * width + k;
        if (!direct) PackA(Matrix<float>{a, width, 1}, height, depth, 1, true, packed, 0);
        for (int64_t r = 0; r < rows_.pitch; r += kTileColumns<float>) {
          const int64_t vectors = PanelVectors<float>(rows_.pitch - r);
          TileOperands<float> tile{};
          tile.depth = depth;
          tile.a = direct ? a : packed;
          tile.a_step = width;
          tile.b = rows_.across + k * rows_.pitch + r * depth;
          tile.b_step = vectors * kLanes<float>;
          tile.c = rows_.logits + v * rows_.pitch + r;
          tile.c_pitch = tile.addend_pitch = rows_.pitch;
          tile.addend = k > 0 ? tile.c : nullptr;
          ahead.Next(vectors * kLanes<float> * depth, &tile);
          RunTile(height, vectors, direct ? LayoutOfA::kRows : LayoutOfA::kPackedRows, tile);
        }
      }
    }
  }

  /*! \brief Gradient of a block of the weight, added up over chunks: logits' gradient by inputs. */
  void WeightGradient(int64_t block, int64_t, bool is_first) {
    const int64_t width = head_.width, end = head_.BlockEnd(block);
    for (int64_t v = block * kBlockClasses; v < end; v += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, end - v);
      Ahead ahead(head_.grad_weight + (v + kTileRows) * width, kTileRows * width,
                  width * rows_.count);
      for (int64_t j = 0; j < width; j += kTileColumns<float>) {
        const int64_t columns = std::min<int64_t>(kTileColumns<float>, width - j);
        float* c = head_.grad_weight + v * width + j;
        for (int64_t k = 0; k < rows_.count; k += kDepth) {
          TileOperands<float> tile{};
          tile.depth = std::min<int64_t>(kDepth, rows_.count - k);
          tile.a = rows_.logits + v * rows_.pitch + k;
          tile.a_step = rows_.pitch;
          tile.b_step = PanelVectors<float>(columns) * kLanes<float>;
          tile.b = rows_.inputs + j * rows_.count + k * tile.b_step;
          tile.c = c;
          tile.c_pitch = tile.addend_pitch = width;
          tile.addend = k > 0 || !is_first ? c : nullptr;
          ahead.Next(columns * tile.depth, &tile);
          AnyWidth(height, columns, tile);
        }
      }
    }
  }

  /*! \brief Gradient of the inputs: logits' gradient^T * weight, into `across`. */
  void InputGradient() {
    constexpr int64_t kColumns = kTileColumns<float>;
    const int64_t panels = (head_.width + kColumns - 1) / kColumns;
    const int64_t tiles = (rows_.count + kTileRows - 1) / kTileRows;
    const int64_t threads = NumThreads();
    const int64_t parts = std::min(panels, threads);
    const int64_t row_parts = std::min(std::max<int64_t>(threads / parts, 1), tiles);
    ParallelFor(parts * row_parts, NumThreads(), [&](int64_t index, int thread) {
      FlushSubnormals flush;
      const int64_t part = index % parts, row_part = index / parts;
      InputGradientPart(panels * part / parts, panels * (part + 1) / parts,
                        tiles * row_part / row_parts, tiles * (row_part + 1) / row_parts, tiles,
                        scratch_ + thread * kScratch);
    });
  }

 private:
  /*! \brief Classes summed at once into the gradient of the input: a packed panel fits in L1. */
  static constexpr int64_t kGradientDepth = 192;
  /*! \brief Floats that each thread packs operands into. */
  static constexpr int64_t kScratch =
      std::max<int64_t>(kTileRows * kPitch<float>, kGradientDepth * kTileColumns<float>);

  /*! \brief A tile whose columns may not be whole vectors: then computed beside C and copied. */
  static void AnyWidth(int64_t rows, int64_t columns, TileOperands<float> tile) {
    const int64_t vectors = PanelVectors<float>(columns);
    if (columns == tile.b_step) return RunTile(rows, vectors, LayoutOfA::kRows, tile);
    alignas(kVectorBytes) float sums[kTileRows * kTileColumns<float>];
    float* c = std::exchange(tile.c, sums);
    const int64_t pitch = std::exchange(tile.c_pitch, tile.b_step);
    const bool adds = std::exchange(tile.addend, nullptr) != nullptr;
    RunTile(rows, vectors, LayoutOfA::kRows, tile);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        c[i * pitch + j] = adds ? sums[i * tile.c_pitch + j] + c[i * pitch + j]
                                : sums[i * tile.c_pitch + j];
      }
    }
  }

  void InputGradientPart(int64_t first_panel, int64_t last_panel, int64_t first_tile,
                         int64_t last_tile, int64_t tiles, float* packed) {
    constexpr int64_t kColumns = kTileColumns<float>;
    const int64_t width = head_.width;
    for (int64_t v = 0; v < head_.classes; v += kGradientDepth) {
      const int64_t depth = std::min(kGradientDepth, head_.classes - v);
      // All columns: what other threads ask for is not asked for twice.
      const int64_t parts = (last_panel - first_panel) * (last_tile - first_tile);
      Ahead ahead(head_.weight + (v + depth) * width, kGradientDepth * width, parts);
      for (int64_t j = first_panel * kColumns; j < std::min(width, last_panel * kColumns);
           j += kColumns) {
        const int64_t columns = std::min(kColumns, width - j);
        const int64_t vectors = PanelVectors<float>(columns);
        PackB(Matrix<float>{head_.weight + v * width + j, width, 1}, depth, columns, packed);
        for (int64_t t = first_tile; t < last_tile; ++t) {
          const int64_t top = TileTop(rows_.count, tiles, t);
          TileOperands<float> tile{};
          tile.depth = depth;
          tile.a = rows_.logits + v * rows_.pitch + top;
          tile.a_step = rows_.pitch;
          tile.b = packed;
          tile.b_step = vectors * kLanes<float>;
          tile.c = rows_.across + top * RoundUpRows(width) + j;
          tile.c_pitch = tile.addend_pitch = RoundUpRows(width);
          tile.addend = v > 0 ? tile.c : nullptr;
          ahead.Next(1, &tile);
          RunTile(TileTop(rows_.count, tiles, t + 1) - top, vectors, LayoutOfA::kSteps, tile);
        }
      }
    }
  }

  const HeadOperands& head_;
  HeadRows rows_{};
  int64_t depth_;  // of the width, summed at once into logits
  float* scratch_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_VECTORS_H_
