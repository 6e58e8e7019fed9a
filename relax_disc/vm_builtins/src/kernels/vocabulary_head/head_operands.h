// What a linear head with cross-entropy computes, and one chunk of its rows.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_OPERANDS_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_OPERANDS_H_

#include <algorithm>
#include <cstdint>

namespace relax_disc {

/*! \brief Classes that a thread computes and sums up at once: whole tiles on any processor. */
constexpr int64_t kBlockClasses = 336;
/*! \brief Rows of a chunk come in whole vectors: its pitch is a multiple of this. */
constexpr int64_t kRowUnit = 16;
/*! \brief Numbers kept for each block of classes and row. */
constexpr int64_t kStatistics = 3;

inline int64_t RoundUpRows(int64_t count) { return (count + kRowUnit - 1) / kRowUnit * kRowUnit; }

/*! \brief Rows for which a chunk needs room: of so many, where there is room for `room`. */
inline int64_t MostChunkRows(int64_t rows, int64_t room) {
  return std::max(kRowUnit, std::min(room, RoundUpRows(rows)));
}

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

  int64_t BlockEnd(int64_t block) const { return std::min(classes, (block + 1) * kBlockClasses); }
};

/*! \brief Rows of x that are computed at a time, and where. */
struct HeadRows {
  const int64_t* rows;  // which of x's
  int64_t count, pitch;
  float* logits;  // [classes, pitch], where their gradient replaces them
  float* across;  // [pitch, width rounded up]: at last the gradient of the inputs by rows
  float* inputs;  // as much again, for what the products pack
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_VOCABULARY_HEAD_HEAD_OPERANDS_H_
