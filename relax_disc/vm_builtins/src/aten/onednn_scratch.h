/*!
 * \file onednn_scratch.h
 * \brief What oneDNN 3.12 takes for a convolution besides its weights, as its sources book it.
 */
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_SCRATCH_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_SCRATCH_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "aten/convolution.h"
#include "aten/onednn_faults.h"
#include "runtime/memory.h"

namespace relax_disc {

inline int64_t Most(const std::vector<int64_t>& x) { return *std::max_element(x.begin(), x.end()); }

inline int64_t Least(const std::vector<int64_t>& x) {
  return *std::min_element(x.begin(), x.end());
}

/*! \brief Product of all extents but the last. */
inline int64_t Lines(const std::vector<int64_t>& extents) {
  return Volume({extents.begin(), extents.end() - 1});
}

/*! \brief Where windows reach. */
struct Reach {
  explicit Reach(const ConvolutionSizes& s) {
    for (size_t axis = 0; axis < s.inner.size(); ++axis) {
      span.push_back(s.dilation[axis] * (s.kernel[axis] - 1) + 1);
      const int64_t end = (s.outer[axis] - 1) * s.stride[axis] + span[axis];
      after.push_back(std::max<int64_t>(0, end - s.inner[axis] - s.padding[axis]));
      const int64_t most = std::max(s.padding[axis], after[axis]);
      is_narrow = is_narrow && most <= span[axis] / 2;
      const bool is_last = axis + 1 == s.inner.size();
      is_read = is_read && (is_last ? most < span[axis] : most <= span[axis] / 2);
    }
  }

  std::vector<int64_t> span, after;  // of a window; padding behind the last position
  bool is_narrow = true;             // no more than half of a window lies outside
  bool is_read = true;               // nor more than a row of it along the last axis
};

/*!
 * \brief What oneDNN takes from AVX-512 on besides weights, without matrix tiles.
 *
 * From the sources of oneDNN 3.12, where they book their scratchpads:
 * `src/cpu/x64/jit_brgemm_conv_utils.cpp`, `jit_avx512_core_bf16{,_1x1}_conv_kernel.cpp`,
 * `src/cpu/gemm_convolution_utils.cpp`.
 */
class VectorKernels {
 public:
  VectorKernels(const ConvolutionSizes& s, int64_t threads)
      : s_(s),
        threads_(threads),
        inner_(s.inner_channels / s.groups),
        outer_(s.outer_channels / s.groups),
        last_(s.inner.size() - 1),
        reach_(s) {}

  /*! \brief Elements that copies of what is read have, of a convolution or an input's gradient. */
  int64_t Copied(int64_t which) const {
    if (which == 1) {
      return s_.inner[last_] == 1 ? Column(s_.outer_channels) : 0;
    }
    if (which == 2) return 0;
    if (const int64_t lowered = LoweredElements(s_)) return threads_ * lowered;
    const int64_t stride = inner_ == 1 ? s_.stride[last_] : 1;
    const bool is_copied = s_.outer[last_] == 1 || (inner_ == 1 && s_.kernel[last_] > 1);
    return is_copied ? Column(s_.inner_channels * stride) : 0;
  }

  /*! \brief Elements of four bytes that all threads take in bfloat16. */
  int64_t InBfloat16(int64_t which) const {
    const int64_t columns = inner_ * Volume(s_.kernel) * Volume(s_.outer);
    const int64_t positions = Volume(s_.inner);
    if (which != 2) {
      const int64_t wide = (which == 0 ? s_.outer : s_.inner)[last_];
      const int64_t channels = std::min<int64_t>(64, RoundUp(which == 0 ? outer_ : inner_, 16));
      const bool is_rare = !reach_.is_narrow || (s_.groups > 1 && Most(s_.kernel) > 7) ||
                           (Most(s_.dilation) > 1 && Most(s_.stride) > 1);
      const bool is_product = which == 1 && is_rare;
      return threads_ * (wide * channels +  // sums of a row
                         (is_product ? columns + s_.inner_channels * positions : 0));
    }
    if (IsProduct()) return ProductElements();
    const int64_t most = inner_ < 16 ? 24 : 14;
    const bool is_copied = reach_.is_read && s_.kernel.back() <= most;
    if (is_copied && Most(s_.dilation) == 1) return CopyElements();
    const int64_t weight = s_.outer_channels * inner_ * Volume(s_.kernel);
    const int64_t products =
        threads_ * (columns + s_.inner_channels * positions) / 2 + 2 * (threads_ + 1) * weight;
    return std::max(products, is_copied ? CopyElements() : 0);
  }

 private:
  /*! \brief Windows of one element; strides that leave nothing over are gathered before. */
  bool IsProduct() const {
    if (s_.groups > 1 || Volume(s_.kernel) > 1 || Most(s_.padding) > 0) return false;
    if (IsStridedTail(s_)) return true;
    for (size_t axis = 0; axis < s_.inner.size(); ++axis) {
      if (s_.outer[axis] * s_.stride[axis] != s_.inner[axis]) return false;
    }
    return true;
  }

  /*! \brief Least divisor of a number of blocks that is not below `least`. */
  static int64_t Blocking(int64_t blocks, int64_t least) {
    for (int64_t divisor = least; divisor < blocks; ++divisor) {
      if (blocks % divisor == 0) return divisor;
    }
    return blocks;
  }

  /*! \brief Elements of what windows as wide as it read, its rows rounded up to blocks. */
  int64_t Column(int64_t channels) const {
    int64_t places = s_.kernel[last_] * (inner_ == 1 ? reach_.span[last_] : 1);
    if (s_.outer[last_] > 1) places = s_.inner[last_] + s_.padding[last_] + reach_.after[last_];
    for (size_t axis = 0; axis < last_; ++axis) {
      places *= 2 * (s_.inner[axis] + s_.padding[axis] + reach_.after[axis] + reach_.span[axis]);
    }
    return threads_ * RoundUp(places * channels, 4096);
  }

  int64_t ProductElements() const {
    const int64_t blocks = RoundUp(inner_, 16) / 16, outer_blocks = RoundUp(outer_, 16) / 16;
    const int64_t positions = Volume(s_.outer);
    const int64_t copied = 16 * (Blocking(outer_blocks, 16) + Blocking(blocks, 5));
    const int64_t gathered = Most(s_.stride) > 1 ? inner_ : 0;
    return threads_ * (RoundUp(positions, 2) * (copied + gathered) / 2 +
                       256 * blocks * outer_blocks);
  }

  /*! \brief Both sides with positions last, for each part of the batch; its sum in float32. */
  int64_t CopyElements() const {
    const int64_t most = std::min(threads_ / s_.groups, s_.batch * s_.outer[0]);
    const int64_t parts = std::max<int64_t>(1, most);
    const int64_t blocks = s_.groups * (RoundUp(inner_, 16) / 16);
    const int64_t outer_blocks = s_.groups * (RoundUp(outer_, 16) / 16);
    const int64_t stride = s_.stride.back();
    const int64_t edge = RoundUp(std::max(s_.padding.back(), reach_.after.back() + 1), 2);
    const int64_t wide = RoundUp((s_.inner.back() + stride - 1) / stride + edge, 2) * stride;
    const int64_t x = std::max(parts * blocks, threads_) * 16 * wide * Lines(s_.inner) + edge;
    const int64_t results = RoundUp(s_.outer.back(), 2) * Lines(s_.outer);
    const int64_t grad = std::max(parts * outer_blocks, threads_) * 16 * results;
    return (x + grad) / 2 + parts * 256 * blocks * (outer_blocks / s_.groups) * Volume(s_.kernel);
  }

  const ConvolutionSizes& s_;
  const int64_t threads_, inner_, outer_;  // channels of a group
  const size_t last_;
  const Reach reach_;
};

/*!
 * \brief What oneDNN's kernels for matrix tiles take, in bfloat16.
 *
 * From the sources of oneDNN 3.12, where they book their scratchpads:
 * `src/cpu/x64/jit_brgemm_conv{,_bwd}_utils.cpp`.
 */
class TileKernels {
 public:
  explicit TileKernels(const ConvolutionSizes& s)
      : s_(s), last_(s.inner.size() - 1), reach_(s), span_(reach_.span), after_(reach_.after) {}

  /*! \brief Whether they compute it at all. */
  bool Compute(int64_t which) const {
    if (s_.IsDeep() || !reach_.is_narrow) return false;
    for (size_t axis = 0; axis <= last_; ++axis) {
      const bool is_dilated = s_.dilation[axis] > 1;
      if (which == 2 && is_dilated && (s_.stride[axis] > 1 || span_[axis] > s_.inner[axis])) {
        return false;
      }
    }
    if (which == 2 && s_.inner.size() > 2 && s_.dilation[0] > 1) return false;
    return which != 1 || Most(s_.stride) == 1 || Most(s_.dilation) == 1;
  }

  /*! \brief Elements of four bytes that a thread takes. */
  int64_t Elements(int64_t which) const {
    const int64_t inner = s_.inner_channels / s_.groups, outer = s_.outer_channels / s_.groups;
    const int64_t read = which == 1 ? outer : inner;
    const int64_t batches = 8 * Volume(s_.kernel) * (RoundUp(read, 16) / 16) +
                            8 * Lines(s_.outer);
    return kLeast + batches + (which == 2       ? WeightElements(inner, outer)
                               : which == 0     ? ForwardElements(inner, outer)
                               : IsStrided()    ? StridedElements(outer)
                                                : BackwardElements(inner, outer));
  }

 private:
  static constexpr int64_t kLeast = 32768;

  bool IsStrided() const { return Most(s_.stride) > 1; }

  /*!
   * \brief Rows in which windows are read, of positions and of what lies around them.
   *
   * `results` are the extents of what is computed; blocks of its rows round those that are read up.
   */
  int64_t Copies(int64_t channels, const std::vector<int64_t>& extents,
                 const std::vector<int64_t>& edges, const std::vector<int64_t>& results,
                 const std::vector<int64_t>& strides) const {
    const size_t high = last_ - 1;
    const int64_t wide = extents[last_], stride = strides[last_], span = span_[last_];
    const int64_t skipped =
        (span - 1) / stride * strides[high] + (strides[high] - 1) * results[last_];
    const int64_t block = results[high] * results[last_] + (results[high] - 1) * skipped;
    int64_t rows = block / wide + 1 + s_.kernel[high] * s_.dilation[high];
    rows += extents[high] + edges[high];
    for (size_t axis = 0; axis < high; ++axis) rows *= extents[axis] + edges[axis];
    const int64_t padded = RoundUp(channels, channels <= 32 ? 2 : 32);
    return rows * wide * s_.groups * padded * stride * (results[last_] == 1 ? span : 1);
  }

  int64_t ForwardElements(int64_t inner, int64_t outer) const {
    std::vector<int64_t> extents, edges;
    for (size_t axis = 0; axis <= last_; ++axis) {
      edges.push_back(s_.padding[axis] + after_[axis]);
      extents.push_back(s_.inner[axis] + edges[axis]);
    }
    // Channels that fill tiles are read where they are, but in narrow or padded rows.
    const bool in_place = inner % 32 == 0 && edges[last_] == 0 && s_.outer[last_] > 50;
    int64_t copies = in_place ? 0 : Copies(inner, extents, edges, s_.outer, s_.stride);
    const bool fills_tiles = s_.outer[last_] > 48 || s_.outer[last_] % 16 == 0;
    if (last_ == 1 && inner <= 16 && Most(s_.dilation) == 1 && fills_tiles) {
      // Few channels: the rows of a window become one, for each position.
      const int64_t row = s_.kernel[0] * s_.stride[1] * inner;
      const int64_t high = 2 * span_[0] + edges[0] + 1;
      copies = std::max(copies, s_.kernel[0] * high * extents[1] * s_.groups * row +
                                    (s_.outer[0] - 1) * s_.stride[0] * row + row);
    }
    return copies / 2 + Volume(s_.outer) * std::min<int64_t>(RoundUp(outer, 16), 64);
  }

  /*! \brief Of the input's gradient without strides: a convolution of the result's. */
  int64_t BackwardElements(int64_t inner, int64_t outer) const {
    std::vector<int64_t> extents, edges;
    for (size_t axis = 0; axis <= last_; ++axis) {
      edges.push_back(span_[axis] - 1);
      extents.push_back(s_.inner[axis] + edges[axis]);
    }
    return Copies(outer, extents, edges, s_.inner, s_.stride) / 2 +
           Volume(s_.inner) * std::min<int64_t>(RoundUp(inner, 16), 64);
  }

  int64_t StridedElements(int64_t outer) const {
    int64_t positions = 1;
    for (size_t axis = 0; axis <= last_; ++axis) {
      positions *= s_.outer[axis] + 2 * ((span_[axis] - 1) / s_.stride[axis]);
    }
    const int64_t wide = RoundUp(s_.inner[last_], s_.stride[last_]);
    return s_.groups * RoundUp(outer, 64) * positions / 2 + 64 * wide +
           s_.inner_channels * wide * (s_.stride[last_] - 1) / 2;
  }

  /*! \brief Both sides with positions last, and the weight's gradient in float32. */
  int64_t WeightElements(int64_t inner, int64_t outer) const {
    const int64_t edge = s_.padding[last_] + after_[last_], stride = s_.stride[last_];
    const int64_t wide = RoundUp((s_.inner[last_] + edge + stride - 1) / stride, 32) * stride;
    const int64_t blocks = RoundUp(inner, 16), outer_blocks = RoundUp(outer, 16);
    const int64_t x = s_.groups * blocks * wide * Lines(s_.inner) + edge + 32;
    const int64_t grad = s_.groups * outer_blocks * RoundUp(s_.outer[last_], 32) * Lines(s_.outer) +
                         16 * wide;
    return (x + grad) / 2 + s_.groups * blocks * outer_blocks * Volume(s_.kernel);
  }

  const ConvolutionSizes& s_;
  const size_t last_;
  const Reach reach_;
  const std::vector<int64_t>&span_, &after_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_SCRATCH_H_
