// Block sizes of the attention kernels, and the memory that one thread needs for its blocks.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_ATTENTION_ATTENTION_WORKSPACE_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_ATTENTION_ATTENTION_WORKSPACE_H_

#include <cstdint>

#include "kernels/product/gemm_tile.h"

namespace relax_disc {

constexpr int64_t kForwardQueries = 2 * kTileRows;     // rows of scores: 45 KiB, about L1
constexpr int64_t kForwardChunk = 16 * kForwardQueries;  // rows of a task; it packs keys once
constexpr int64_t kForwardKeys = kDepth;               // keys at a time
constexpr int64_t kBackwardQueries = 4 * kTileRows;    // rows of scores at a time
constexpr int64_t kBackwardKeys = kDepth / 2;          // keys at a time: all operands fit L2

template <typename T>
inline int64_t RoundUpLanes(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

/*! \brief Elements that a thread needs for heads of these widths, forward. */
template <typename T>
inline int64_t AttentionElements(int64_t key_dim, int64_t value_dim) {
  const int64_t width = RoundUpLanes<T>(value_dim);
  return kForwardKeys * (key_dim + width) + 2 * kForwardQueries * kPitch<T> +
         kForwardChunk * (width + 2);
}

/*! \brief Elements that a thread needs for heads of these widths, backward. */
template <typename T>
inline int64_t AttentionBackwardElements(int64_t key_dim, int64_t value_dim) {
  const int64_t key_width = RoundUpLanes<T>(key_dim), value_width = RoundUpLanes<T>(value_dim);
  return kBackwardKeys * (key_dim + value_dim + 2 * key_width + value_width) +
         kBackwardQueries * (4 * kPitch<T> + key_width) + 64;
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_ATTENTION_ATTENTION_WORKSPACE_H_
