// One chunk of rows of a linear head with cross-entropy: losses and gradients.
//
// Logits lie by class, [classes, rows of the chunk].
// Results depend on neither the number of threads nor who runs what: classes are cut into blocks of
// one size, and every sum runs over them in ascending order.
// Rows whose label is ignored may be here for z-loss: they have a log-sum-exp, and no loss.
// Whole blocks of classes can be computed alone where each row's log-sum-exp is known: the gradient
// of those rows of the weight, the same to the last bit.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_CHUNK_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_CHUNK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/parallel.h"
#include "kernels/product/gemm_tile.h"
#include "kernels/subnormals.h"
#include "kernels/vector_exp.h"
#include "kernels/vocabulary_head/head_operands.h"

namespace relax_disc {

/*! \tparam Products `HeadVectors` or `HeadTiles`. */
template <typename Products>
class HeadChunk {
 public:
  /*!
   * \param head Operands and results.
   * \param rows Which rows of x are in the chunk.
   * \param count How many they are.
   * \param workspace RoundUpRows(count) * HeadRowFloats floats.
   * \param products Of this head.
   */
  HeadChunk(const HeadOperands& head, const int64_t* rows, int64_t count, float* workspace,
            Products* products)
      : head_(head), products_(products), rows_(rows), count_(count) {
    pitch_ = (count + kLanes<float> - 1) / kLanes<float> * kLanes<float>;
    blocks_ = (head.classes + kBlockClasses - 1) / kBlockClasses;
    const int64_t across = RoundUpRows(head.width) * pitch_;
    logits_ = workspace;
    across_ = logits_ + head.classes * pitch_;
    tops_ = across_ + 2 * across;
    sums_ = tops_ + blocks_ * pitch_;
    logit_sums_ = sums_ + blocks_ * pitch_;
    ignores_ = head.lse_factor && std::any_of(rows, rows + count, [&](int64_t row) {
                 return head.target[row] == head.ignore_index;
               });
  }

  /*! \brief Compute all; `wanted` and `losses` have room for each row. */
  void Run(double* losses, float* wanted, bool is_first) {
    Logits(wanted);
    ParallelFor(pitch_, [&](int64_t r) {
      const double loss = Normaliser(r, wanted);
      if (r < count_) losses[r] = loss;
    });
    // Probabilities of what a model rules out times the scale of a mean are subnormal numbers: five
    // times the time of a step was seen, and nothing of that size reaches a float32 sum.
    ParallelFor(blocks_, NumThreads(), [&](int64_t block, int thread) {
      FlushSubnormals flush;
      LogitGradient(block);
      if (head_.grad_bias) BiasGradient(block, is_first);
      if (head_.grad_weight) products_->WeightGradient(block, thread, is_first);
    });
    InputGradient();
  }

  /*! \brief Compute the gradient of the weight alone, with the log-sum-exp of `Run`. */
  void RunWeight(float* wanted, bool is_first) {
    Logits(wanted);
    ParallelFor(pitch_, [&](int64_t r) { Factors(r, r < count_ ? head_.row_lse[rows_[r]] : 0); });
    ParallelFor(blocks_, NumThreads(), [&](int64_t block, int thread) {
      FlushSubnormals flush;
      LogitGradient(block);
      products_->WeightGradient(block, thread, is_first);
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
  int64_t End(int64_t block) const { return head_.BlockEnd(block); }
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

  /*! \brief Exponentials of all logits. */
  void Logits(float* wanted) {
    products_->Begin({rows_, count_, pitch_, logits_, across_,
                      across_ + RoundUpRows(head_.width) * pitch_});
    ParallelFor(blocks_, NumThreads(), [&](int64_t block, int thread) {
      products_->Logits(block, thread);
      Exponentials(block, wanted);
    });
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

  /*! \brief Gradient of the inputs, to the rows of x that it belongs to. */
  void InputGradient() {
    products_->InputGradient();
    ParallelFor(count_, [&](int64_t r) {
      std::memcpy(head_.grad_x + rows_[r] * head_.width, across_ + r * RoundUpRows(head_.width),
                  sizeof(float) * head_.width);
    });
  }

  const HeadOperands& head_;
  Products* products_;
  const int64_t* rows_;
  int64_t count_, pitch_, blocks_;
  bool ignores_;  // whether the label of some row is ignored
  float *logits_, *across_, *tops_, *sums_, *logit_sums_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_CHUNK_H_
