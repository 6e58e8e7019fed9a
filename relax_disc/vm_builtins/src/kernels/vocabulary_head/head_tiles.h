// Products of a vocabulary head by the matrix tiles of `amx_kernel.h`.
//
// Numbers are cut into parts before they are multiplied: the inputs once for a chunk, the weight
// and the logits' gradient twice each, for the two ways in which they are summed up.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_TILES_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_TILES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/parallel.h"
#include "kernels/product/amx_kernel.h"
#include "kernels/product/gemm.h"
#include "kernels/vocabulary_head/head_operands.h"
#include "kernels/workspace.h"

namespace relax_disc {

class HeadTiles {
  using Packed = AmxKernel::Packed;

 public:
  /*! \brief Whether tiles exist and pay: 8 rows take a sixth more time by them, 64 a sixth less. */
  static bool MayMultiply(int64_t width) { return MayUseAmx(kBlockClasses, width); }

  /*! \brief Most bytes that chunks of `room` rows, or fewer, take on so many threads. */
  static int64_t Bytes(int64_t room, int64_t classes, int64_t width, int64_t threads) {
    const Sizes sizes(room, classes, width);
    return PieceBytes((sizes.across + sizes.inputs + threads * sizes.scratch) * kPackedBytes) +
           PieceBytes(std::min((kMostParts - 1) * sizes.part * kFloatBytes, kPartBytes));
  }

  /*! \param workspace Lends `Bytes`. */
  HeadTiles(const HeadOperands& head, int64_t room, WorkspaceScope* workspace)
      : head_(head), sizes_(room, head.classes, head.width) {
    across_ = workspace->Take<Packed>(sizes_.across + sizes_.inputs +
                                      NumThreads() * sizes_.scratch);
    inputs_ = across_ + sizes_.across;
    scratch_ = inputs_ + sizes_.inputs;
    sums_ = workspace->Take<float>((sizes_.parts - 1) * sizes_.part);
  }

  /*! \brief Take a chunk: pack its inputs, and their transpose, as right operands. */
  void Begin(const HeadRows& chunk) {
    rows_ = chunk;
    const int64_t width = head_.width, count = chunk.count;
    ParallelFor(count, [&](int64_t r) {
      std::memcpy(chunk.inputs + r * width, head_.x + chunk.rows[r] * width, sizeof(float) * width);
    });
    PackRight({chunk.inputs, 1, width}, width, count, across_);
    PackRight({chunk.inputs, width, 1}, count, width, inputs_);
  }

  /*! \brief Logits of a block of classes on one of the threads: weight * inputs^T. */
  void Logits(int64_t block, int64_t thread) {
    // Columns up to the pitch: those of no row are zero.
    Multiply({head_.weight, head_.width, 1}, block, head_.width, across_, rows_.pitch,
             rows_.logits, rows_.pitch, false, true, thread);
  }

  /*! \brief Gradient of a block of the weight, added up over chunks: logits' gradient by inputs. */
  void WeightGradient(int64_t block, int64_t thread, bool is_first) {
    Multiply({rows_.logits, rows_.pitch, 1}, block, rows_.count, inputs_, head_.width,
             head_.grad_weight, head_.width, !is_first, false, thread);
  }

  /*! \brief Gradient of the inputs: logits' gradient^T * weight, into `across`. */
  void InputGradient() {
    const int64_t panels = (head_.width + kColumns - 1) / kColumns;
    const int64_t groups =
        std::min<int64_t>(panels, (NumThreads() + sizes_.parts - 1) / sizes_.parts);
    ParallelFor(sizes_.parts * groups, NumThreads(), [&](int64_t index, int thread) {
      const int64_t part = index / groups, group = index % groups;
      AddInputGradient(part, panels * group / groups * kColumns,
                       std::min(head_.width, panels * (group + 1) / groups * kColumns), thread);
    });
    const int64_t pitch = RoundUpRows(head_.width);
    ParallelFor(rows_.count, [&](int64_t r) {
      for (int64_t part = 1; part < sizes_.parts; ++part) {
        const float* from = sums_ + (part - 1) * sizes_.part + r * pitch;
        for (int64_t j = 0; j < head_.width; ++j) rows_.across[r * pitch + j] += from[j];
      }
    });
  }

 private:
  static constexpr int64_t kRows = AmxKernel::kRows, kColumns = AmxKernel::kColumns;
  static constexpr int64_t kPackedBytes = sizeof(Packed), kFloatBytes = sizeof(float);
  /*! \brief Classes summed at once into the gradient of the inputs: whole steps of the tiles. */
  static constexpr int64_t kGradientDepth = 2 * kBlockClasses;
  /*! \brief Parts of the classes, which threads sum up apart: at most so many, and so much room. */
  static constexpr int64_t kMostParts = 8, kPartBytes = 4 << 20;

  /*! \brief Packed numbers and floats of what chunks of `room` rows need. */
  struct Sizes {
    int64_t across, inputs;  // right operands
    int64_t scratch;         // of each thread
    int64_t parts, part;     // sums of parts of the classes

    Sizes(int64_t room, int64_t classes, int64_t width)
        : across(Panels(width, room)),
          inputs(Panels(room, width)),
          part(room * RoundUpRows(width)) {
      const int64_t blocks = (classes + kGradientDepth - 1) / kGradientDepth;
      const int64_t most = kPartBytes / (part * kFloatBytes);
      parts = std::max<int64_t>(1, std::min({blocks, most, kMostParts}));
      const int64_t tiles = (room + kRows - 1) / kRows;
      scratch = std::max(AmxKernel::MostPanelOfA(std::max(room, width)),
                         tiles * AmxKernel::PanelOfA(kGradientDepth) +
                             AmxKernel::PanelOfB(kGradientDepth));
    }
  };

  /*! \brief Packed numbers of a right operand. */
  static int64_t Panels(int64_t depth, int64_t columns) {
    const int64_t block = DepthBlock<AmxKernel>(depth), blocks = (depth + block - 1) / block;
    return blocks * ((columns + kColumns - 1) / kColumns) * AmxKernel::PanelOfB(block);
  }

  /*! \brief Sum up a part of the classes into some columns of the gradient of the inputs. */
  void AddInputGradient(int64_t part, int64_t left, int64_t right, int64_t thread) {
    AmxKernel::Scope scope;
    const int64_t width = head_.width, pitch = RoundUpRows(width);
    const int64_t tiles = (rows_.count + kRows - 1) / kRows;
    const int64_t panel = AmxKernel::PanelOfA(kGradientDepth);
    Packed* of_a = scratch_ + thread * sizes_.scratch;
    Packed* of_b = of_a + tiles * panel;
    float* sums = part == 0 ? rows_.across : sums_ + (part - 1) * sizes_.part;
    const auto [begin, end] = Share(head_.classes, kGradientDepth, sizes_.parts, part);
    for (int64_t v = begin; v < end; v += kGradientDepth) {
      const int64_t depth = std::min(kGradientDepth, end - v);
      AmxKernel::PackA({rows_.logits + v * rows_.pitch, 1, rows_.pitch}, rows_.count, depth, tiles,
                       of_a, panel);
      for (int64_t j = left; j < right; j += kColumns) {
        const int64_t columns = std::min(kColumns, width - j);
        AmxKernel::PackB({head_.weight + v * width + j, width, 1}, depth, columns, of_b);
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t top = AmxKernel::Top(rows_.count, tiles, t);
          float* c = sums + top * pitch + j;
          AmxKernel::Run(of_a + t * panel, of_b, depth,
                         {AmxKernel::Top(rows_.count, tiles, t + 1) - top, columns, c, pitch,
                          v > begin ? c : nullptr, pitch});
        }
      }
    }
  }

  static void PackRight(const Matrix<float>& from, int64_t depth, int64_t columns, Packed* target) {
    const int64_t block = DepthBlock<AmxKernel>(depth), size = AmxKernel::PanelOfB(block);
    const int64_t panels = (columns + kColumns - 1) / kColumns;
    ParallelFor(panels, [&](int64_t panel) {
      const int64_t j = panel * kColumns;
      for (int64_t k = 0; k < depth; k += block) {
        AmxKernel::PackB(from.At(k, j), std::min(block, depth - k), std::min(kColumns, columns - j),
                         target + (k / block * panels + panel) * size);
      }
    });
  }

  /*!
   * \brief Rows of C that belong to a block of classes: rows of A by a packed right operand.
   * \param asks Whether the next rows of A, which are contiguous, are asked for meanwhile: of the
   *   weight; in C it made others wait for more.
   */
  void Multiply(const Matrix<float>& a, int64_t index, int64_t depth, const Packed* right,
                int64_t columns, float* c, int64_t c_pitch, bool adds, bool asks, int64_t thread) {
    AmxKernel::Scope scope;
    Packed* packed = scratch_ + thread * sizes_.scratch;
    const int64_t block = DepthBlock<AmxKernel>(depth), size = AmxKernel::PanelOfB(block);
    const int64_t panels = (columns + kColumns - 1) / kColumns, end = head_.BlockEnd(index);
    for (int64_t v = index * kBlockClasses; v < end; v += kRows) {
      TileTarget<float> target{};
      target.rows = std::min(kRows, end - v);
      target.c_pitch = target.addend_pitch = c_pitch;
      LinesAhead ahead{reinterpret_cast<const char*>(a.data + (v + kRows) * depth), 0};
      if (asks) ahead.lines = kRows * AmxKernel::kDepthUnit / 16 / panels;
      for (int64_t k = 0; k < depth; k += block) {
        const int64_t steps = std::min(block, depth - k);
        AmxKernel::PackA(a.At(v, k), target.rows, steps, 1, packed, 0);
        for (int64_t panel = 0; panel < panels; ++panel) {
          target.columns = std::min(kColumns, columns - panel * kColumns);
          target.c = c + v * c_pitch + panel * kColumns;
          target.addend = adds || k > 0 ? target.c : nullptr;
          for (int64_t r = 0; r < target.rows && target.addend; ++r) {
            PrefetchRow(target.c + r * c_pitch, target.columns);
          }
          AmxKernel::Run(packed, right + (k / block * panels + panel) * size, steps, target, ahead);
          ahead.from += ahead.lines * 64 * AmxKernel::Steps(steps);
        }
      }
    }
  }

  const HeadOperands& head_;
  const Sizes sizes_;
  HeadRows rows_{};
  Packed *across_, *inputs_, *scratch_;
  float* sums_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_TILES_H_
