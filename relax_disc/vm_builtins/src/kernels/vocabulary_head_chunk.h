// One chunk of rows of a linear head with cross-entropy: losses and gradients.
//
// Logits lie by class, [classes, rows of the chunk]: like this the weight and the logits are
// operands of the register tiles as they are stored. A chunk has too few rows to pay for packing a
// table as large as the vocabulary; only its inputs are packed. What the next tiles read is asked
// for while a tile runs, little by little: bursts of prefetches would stall.
// Results depend on neither the number of threads nor who runs what: classes are cut into blocks of
// one size, and every sum runs over them in ascending order.
// Rows whose label is ignored may be here for z-loss: they have a log-sum-exp, and no loss.
// Whole blocks of classes can be computed alone where each row's log-sum-exp is known: the gradient
// of those rows of the weight, the same to the last bit.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_CHUNK_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_CHUNK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/product/gemm_pack.h"
#include "kernels/product/gemm_tile.h"
#include "kernels/parallel.h"
#include "kernels/subnormals.h"
#include "kernels/vector_exp.h"

namespace relax_disc {

/*! \brief Classes that a thread computes and sums up at once: whole tiles on any processor. */
constexpr int64_t kBlockClasses = 336;
/*! \brief Rows of a chunk come in whole vectors: its pitch is a multiple of this. */
constexpr int64_t kRowUnit = 16;
/*! \brief Numbers kept for each block of classes and row. */
constexpr int64_t kStatistics = 3;
/*! \brief Classes summed at once into the gradient of the input: a packed panel fits in L1. */
constexpr int64_t kGradientDepth = 192;
/*! \brief Floats that each thread packs operands into. */
constexpr int64_t kHeadScratch =
    std::max<int64_t>(kTileRows * kPitch<float>, kGradientDepth * kTileColumns<float>);

inline int64_t RoundUpRows(int64_t count) { return (count + kRowUnit - 1) / kRowUnit * kRowUnit; }

/*! \brief Floats of workspace for each row of a chunk. */
inline int64_t HeadRowFloats(int64_t classes, int64_t width) {
  const int64_t blocks = (classes + kBlockClasses - 1) / kBlockClasses;
  return classes + 2 * RoundUpRows(width) + kStatistics * blocks;
}

/*! \brief What a head computes; pointers to tensors. */
struct HeadOperands {
  int64_t classes, width;
  int64_t first_class, all_classes;  // the first of `classes`, whole blocks of them; how many exist
  const float* x;       // [rows, width]
  const float* weight;  // [classes, width]
  const float* bias;    // [all_classes], or null
  const int64_t* target;
  const float* lse_factor;  // null without z-loss; to the gradients it is lse_factor * lse^2 / 2
  float* grad_x;
  float* grad_weight;  // null if nobody wants it
  float* grad_bias;    // null without a bias
  float* lse;          // null without z-loss
  double* row_lse;     // [rows] log-sum-exp, made by `Run`, read by `RunWeight`; null: not wanted
  int64_t ignore_index;
  double label_smoothing;
  float scale;  // gradient of the loss by that of one row
};

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

class HeadChunk {
 public:
  /*!
   * \param head Operands and results.
   * \param rows Which rows of x are in the chunk.
   * \param count How many they are.
   * \param workspace RoundUpRows(count) * HeadRowFloats floats.
   * \param scratch kHeadScratch floats for each thread.
   */
  HeadChunk(const HeadOperands& head, const int64_t* rows, int64_t count, float* workspace,
            float* scratch)
      : head_(head), rows_(rows), count_(count), scratch_(scratch) {
    pitch_ = (count + kLanes<float> - 1) / kLanes<float> * kLanes<float>;
    const int64_t steps = (head.width + kDepth - 1) / kDepth, columns = kTileColumns<float>;
    depth_ = ((head.width + steps - 1) / steps + columns - 1) / columns * columns;
    blocks_ = (head.classes + kBlockClasses - 1) / kBlockClasses;
    grad_pitch_ = RoundUpRows(head.width);
    logits_ = workspace;
    across_ = logits_ + head.classes * pitch_;
    inputs_ = across_ + grad_pitch_ * pitch_;
    tops_ = inputs_ + grad_pitch_ * pitch_;
    sums_ = tops_ + blocks_ * pitch_;
    logit_sums_ = sums_ + blocks_ * pitch_;
    ignores_ = head.lse_factor && std::any_of(rows, rows + count, [&](int64_t row) {
                 return head.target[row] == head.ignore_index;
               });
  }

  /*! \brief Compute all; `wanted` and `losses` have room for each row. */
  void Run(double* losses, float* wanted, bool is_first) {
    PackInputs();
    ParallelFor(blocks_, NumThreads(), [&](int64_t block, int thread) {
      Logits(block, scratch_ + thread * kHeadScratch);
      Exponentials(block, wanted);
    });
    ParallelFor(pitch_, [&](int64_t r) {
      const double loss = Normaliser(r, wanted);
      if (r < count_) losses[r] = loss;
    });
    // Probabilities of what a model rules out times the scale of a mean are subnormal numbers: five
    // times the time of a step was seen, and nothing of that size reaches a float32 sum.
    ParallelFor(blocks_, [&](int64_t block) {
      FlushSubnormals flush;
      LogitGradient(block);
      if (head_.grad_bias) BiasGradient(block, is_first);
      if (head_.grad_weight) WeightGradient(block, is_first);
    });
    InputGradient();
  }

  /*! \brief Compute the gradient of the weight alone, with the log-sum-exp of `Run`. */
  void RunWeight(float* wanted, bool is_first) {
    PackInputs();
    ParallelFor(blocks_, NumThreads(), [&](int64_t block, int thread) {
      Logits(block, scratch_ + thread * kHeadScratch);
      Exponentials(block, wanted);
    });
    ParallelFor(pitch_, [&](int64_t r) { Factors(r, r < count_ ? head_.row_lse[rows_[r]] : 0); });
    ParallelFor(blocks_, [&](int64_t block) {
      FlushSubnormals flush;
      LogitGradient(block);
      WeightGradient(block, is_first);
    });
  }

 private:
  static FloatVector Load(const float* from) {
    return *reinterpret_cast<const LooseFloatVector*>(from);
  }
  static void Store(float* to, FloatVector value) {
    *reinterpret_cast<LooseFloatVector*>(to) = value;
  }
  int64_t Begin(int64_t block) const { return block * kBlockClasses; }
  int64_t End(int64_t block) const { return std::min(head_.classes, Begin(block) + kBlockClasses); }
  float Bias(int64_t v) const { return head_.bias ? head_.bias[head_.first_class + v] : 0.0f; }
  bool Counts(int64_t r) const {
    return r < count_ && head_.target[rows_[r]] != head_.ignore_index;
  }
  /*! \brief Class of row r, from the first one here; -1 if its label is ignored, be that a class. */
  int64_t Label(int64_t r) const {
    return Counts(r) ? head_.target[rows_[r]] - head_.first_class : -1;
  }
  /*! \brief What label smoothing takes off the gradient of each logit of a row that counts. */
  float Spread() const {
    const float smoothing = static_cast<float>(head_.label_smoothing);
    return smoothing / static_cast<float>(head_.all_classes) * head_.scale;
  }

  /*! \brief Pack the chunk's inputs, and their transpose, as right operands. */
  void PackInputs() {
    constexpr int64_t kColumns = kTileColumns<float>;
    const int64_t width = head_.width;
    ParallelFor((width + kColumns - 1) / kColumns, [&](int64_t panel) {
      const int64_t j = panel * kColumns, columns = std::min(kColumns, width - j);
      const int64_t step = PanelVectors<float>(columns) * kLanes<float>;
      float* packed = inputs_ + j * count_;
      for (int64_t r = 0; r < count_; ++r) {
        float* row = packed + r * step;
        std::memcpy(row, head_.x + rows_[r] * width + j, sizeof(float) * columns);
        std::fill(row + columns, row + step, 0.0f);
      }
      const int64_t k = j / depth_ * depth_, depth = std::min(depth_, width - k);
      for (int64_t r = 0; r < count_; r += kColumns) {
        const int64_t rows = std::min(kColumns, count_ - r);
        PackB(Matrix<float>{packed + r * step, 1, step}, columns, rows,
              across_ + k * pitch_ + r * depth +
                  (j - k) * PanelVectors<float>(rows) * kLanes<float>);
      }
    });
  }

  /*! \brief Logits of a block of classes: weight * inputs^T. */
  void Logits(int64_t block, float* packed) {
    const int64_t width = head_.width, begin = Begin(block), end = End(block);
    // Rows a page apart would share one cache set.
    const bool direct = width * sizeof(float) % 4096 != 0;
    for (int64_t v = begin; v < end; v += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, end - v);
      Ahead ahead(head_.weight + (v + kTileRows) * width, kTileRows * width, pitch_ * width);
      for (int64_t k = 0; k < width; k += depth_) {
        const int64_t depth = std::min(depth_, width - k);
        const float* a = head_.weight + v * width + k;
        if (!direct) PackA(Matrix<float>{a, width, 1}, height, depth, 1, true, packed, 0);
        for (int64_t r = 0; r < pitch_; r += kTileColumns<float>) {
          const int64_t vectors = PanelVectors<float>(pitch_ - r);
          TileOperands<float> tile{};
          tile.depth = depth;
          tile.a = direct ? a : packed;
          tile.a_step = width;
          tile.b = across_ + k * pitch_ + r * depth;
          tile.b_step = vectors * kLanes<float>;
          tile.c = logits_ + v * pitch_ + r;
          tile.c_pitch = tile.addend_pitch = pitch_;
          tile.addend = k > 0 ? tile.c : nullptr;
          ahead.Next(vectors * kLanes<float> * depth, &tile);
          RunTile(height, vectors, direct ? LayoutOfA::kRows : LayoutOfA::kPackedRows, tile);
        }
      }
    }
  }

  /*! \brief Replace a block's logits by exp(logit - top), top being a row's largest of them. */
  void Exponentials(int64_t block, float* wanted) {
    constexpr int kGroup = 4;  // vectors at once: what a cache line of each class holds, four times
    const int64_t begin = Begin(block), end = End(block);
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t label = Label(r);
      if (label >= begin && label < end) wanted[r] = logits_[label * pitch_ + r] + Bias(label);
    }
    const bool smooth = head_.label_smoothing != 0;
    for (int64_t r = 0; r < pitch_; r += kGroup * kLanes<float>) {
      const int vectors = static_cast<int>(std::min<int64_t>(kGroup, (pitch_ - r) / kLanes<float>));
      float* first = logits_ + begin * pitch_ + r;
      FloatVector top[kGroup], sum[kGroup], total[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        top[i] = Splat(std::numeric_limits<float>::lowest());
        sum[i] = total[i] = FloatVector{};
      }
      const float* row = first;
      for (int64_t v = begin; v < end; ++v, row += pitch_) {
        for (int i = 0; i < vectors; ++i) {
          const FloatVector x = Load(row + i * kLanes<float>) + Bias(v);
          top[i] = x > top[i] ? x : top[i];
          if (smooth) total[i] += x;
        }
      }
      float* to = first;
      for (int64_t v = begin; v < end; ++v, to += pitch_) {
        for (int i = 0; i < vectors; ++i) {
          const FloatVector e = VectorExp(Load(to + i * kLanes<float>) + Bias(v) - top[i]);
          Store(to + i * kLanes<float>, e);
          sum[i] += e;
        }
      }
      for (int i = 0; i < vectors; ++i) {
        const int64_t at = block * pitch_ + r + i * kLanes<float>;
        Store(tops_ + at, top[i]);
        Store(sums_ + at, sum[i]);
        Store(logit_sums_ + at, total[i]);
      }
    }
  }

  /*! \brief Loss of row r, and its factors. */
  double Normaliser(int64_t r, const float* wanted) {
    float top = std::numeric_limits<float>::lowest();
    for (int64_t b = 0; b < blocks_; ++b) top = std::max(top, tops_[b * pitch_ + r]);
    double sum = 0, logits = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      sum += sums_[b * pitch_ + r] * std::exp(static_cast<double>(tops_[b * pitch_ + r] - top));
      logits += logit_sums_[b * pitch_ + r];
    }
    const double lse = top + std::log(sum);
    if (r < count_ && head_.lse_factor) head_.lse[rows_[r]] = static_cast<float>(lse);
    if (r < count_ && head_.row_lse) head_.row_lse[rows_[r]] = lse;
    Factors(r, lse);
    if (!Counts(r)) return 0;
    const double smoothing = head_.label_smoothing;
    double loss = lse - (1.0 - smoothing) * wanted[r];
    if (smoothing != 0) loss -= smoothing / static_cast<double>(head_.classes) * logits;
    return loss;
  }

  /*!
   * \brief `tops_` of row r become the factors of each block's exponentials and, where some label
   * is ignored, the first of `logit_sums_` what is taken off each row's gradients.
   */
  void Factors(int64_t r, double lse) {
    const bool counts = Counts(r);
    double scale = counts ? head_.scale : 0.0;
    if (r < count_ && head_.lse_factor) scale += head_.lse_factor[rows_[r]] * lse;
    for (int64_t b = 0; b < blocks_; ++b) {
      float& value = tops_[b * pitch_ + r];
      value = static_cast<float>(std::exp(value - lse) * scale);
    }
    if (ignores_) logit_sums_[r] = counts ? Spread() : 0.0f;
  }

  /*! \brief Exponentials of a block become the gradient of its logits. */
  void LogitGradient(int64_t block) {
    const int64_t begin = Begin(block), end = End(block);
    const float* factors = tops_ + block * pitch_;
    const auto scale_all = [&](auto spread_at) {
      for (int64_t v = begin; v < end; ++v) {
        float* row = logits_ + v * pitch_;
        for (int64_t r = 0; r < pitch_; r += kLanes<float>) {
          Store(row + r, Load(row + r) * Load(factors + r) - spread_at(r));
        }
      }
    };
    if (ignores_) {
      scale_all([spreads = logit_sums_](int64_t r) { return Load(spreads + r); });
    } else {
      scale_all([spread = Splat(Spread())](int64_t) { return spread; });
    }
    const float hit = static_cast<float>(1.0 - head_.label_smoothing) * head_.scale;
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t label = Label(r);
      if (label >= begin && label < end) logits_[label * pitch_ + r] -= hit;
    }
  }

  /*! \brief Gradient of a block of the bias, added up over chunks: sums over the rows. */
  void BiasGradient(int64_t block, bool is_first) {
    const int64_t whole = count_ / kLanes<float> * kLanes<float>;
    for (int64_t v = Begin(block); v < End(block); ++v) {
      const float* row = logits_ + v * pitch_;
      FloatVector sums{};
      for (int64_t r = 0; r < whole; r += kLanes<float>) sums += Load(row + r);
      double sum = is_first ? 0.0 : head_.grad_bias[v];
      for (int i = 0; i < kLanes<float>; ++i) sum += sums[i];
      for (int64_t r = whole; r < count_; ++r) sum += row[r];
      head_.grad_bias[v] = static_cast<float>(sum);
    }
  }

  /*! \brief Gradient of a block of the weight, added up over chunks: logits' gradient * inputs. */
  void WeightGradient(int64_t block, bool is_first) {
    const int64_t width = head_.width, end = End(block);
    for (int64_t v = Begin(block); v < end; v += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, end - v);
      Ahead ahead(head_.grad_weight + (v + kTileRows) * width, kTileRows * width, width * count_);
      for (int64_t j = 0; j < width; j += kTileColumns<float>) {
        const int64_t columns = std::min<int64_t>(kTileColumns<float>, width - j);
        float* c = head_.grad_weight + v * width + j;
        for (int64_t k = 0; k < count_; k += kDepth) {
          TileOperands<float> tile{};
          tile.depth = std::min<int64_t>(kDepth, count_ - k);
          tile.a = logits_ + v * pitch_ + k;
          tile.a_step = pitch_;
          tile.b_step = PanelVectors<float>(columns) * kLanes<float>;
          tile.b = inputs_ + j * count_ + k * tile.b_step;
          tile.c = c;
          tile.c_pitch = tile.addend_pitch = width;
          tile.addend = k > 0 || !is_first ? c : nullptr;
          ahead.Next(columns * tile.depth, &tile);
          AnyWidth(height, columns, tile);
        }
      }
    }
  }

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

  /*! \brief Gradient of the inputs: logits' gradient^T * weight, by columns of the weight. */
  void InputGradient() {
    constexpr int64_t kColumns = kTileColumns<float>;
    const int64_t panels = (head_.width + kColumns - 1) / kColumns;
    const int64_t tiles = (count_ + kTileRows - 1) / kTileRows;
    const int64_t threads = NumThreads();
    const int64_t parts = std::min(panels, threads);
    const int64_t row_parts = std::min(std::max<int64_t>(threads / parts, 1), tiles);
    ParallelFor(parts * row_parts, NumThreads(), [&](int64_t index, int thread) {
      FlushSubnormals flush;
      const int64_t part = index % parts, row_part = index / parts;
      InputGradientPart(panels * part / parts, panels * (part + 1) / parts,
                        tiles * row_part / row_parts, tiles * (row_part + 1) / row_parts, tiles,
                        scratch_ + thread * kHeadScratch);
    });
    ParallelFor(count_, [&](int64_t r) {
      std::memcpy(head_.grad_x + rows_[r] * head_.width, across_ + r * grad_pitch_,
                  sizeof(float) * head_.width);
    });
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
          const int64_t top = TileTop(count_, tiles, t);
          TileOperands<float> tile{};
          tile.depth = depth;
          tile.a = logits_ + v * pitch_ + top;
          tile.a_step = pitch_;
          tile.b = packed;
          tile.b_step = vectors * kLanes<float>;
          tile.c = across_ + top * grad_pitch_ + j;
          tile.c_pitch = tile.addend_pitch = grad_pitch_;
          tile.addend = v > 0 ? tile.c : nullptr;
          ahead.Next(1, &tile);
          RunTile(TileTop(count_, tiles, t + 1) - top, vectors, LayoutOfA::kSteps, tile);
        }
      }
    }
  }

  const HeadOperands& head_;
  const int64_t* rows_;
  int64_t count_, pitch_, depth_, blocks_, grad_pitch_;
  bool ignores_;  // whether the label of some row is ignored
  float *logits_, *across_, *inputs_, *tops_, *sums_, *logit_sums_, *scratch_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_CHUNK_H_
