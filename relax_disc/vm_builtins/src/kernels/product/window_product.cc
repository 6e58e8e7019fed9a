#include "kernels/product/window_product.h"

#include <algorithm>

#include "aten/onednn_faults.h"
#include "aten/onednn_scratch.h"
#include "kernels/product/gemm.h"
#include "kernels/parallel.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

/*! \brief Bytes of windows that are written out at a time where nothing but room asks for parts. */
constexpr int64_t kWindowBytes = 1 << 19;
/*! \brief Elements of one channel's windows, of a thread, above which oneDNN's memory is too much. */
constexpr int64_t kMostLowered = 1 << 20;

/*!
 * \brief Whether oneDNN would take several times the weight, or the windows of whole samples.
 *
 * Along a line, windows that are wide, dilated or far apart.  Measured with 64 to 768 channels on
 * an AMD EPYC: of the weight's gradient the product is as fast, or faster by up to half; the others
 * are up to a third slower, with wide windows no more than the weight's gradient gains.
 */
bool IsUnusualLine(const ConvolutionSizes& s, int64_t which) {
  const bool is_line = s.inner[0] == 1 && s.kernel[0] == 1 && Volume(s.kernel) > 1;
  const bool is_unusual = Most(s.dilation) > 1 || Most(s.stride) > 2 || Most(s.kernel) > 7;
  return is_line && (which == 2 ? is_unusual : Most(s.kernel) > 16) &&
         std::min(s.inner_channels, s.outer_channels) >= 32 * s.groups;
}

/*! \brief Whether windows apart from each other are no more than the input. */
bool IsPatches(const ConvolutionSizes& s, int64_t which) {
  const int64_t taps = Volume(s.kernel);
  return which != 1 && taps > 1 && s.groups == 1 && Volume(s.outer) * taps <= Volume(s.inner);
}

/*!
 * \brief Whether windows lie wholly in the padding: of gradients oneDNN copies samples then.
 *
 * A window of 1 that is padded at all is one.  So does the weight's gradient with padding of more
 * than half a window.
 */
bool IsPaddedBeyond(const ConvolutionSizes& s, int64_t which) {
  for (size_t axis = 0; which != 0 && axis < s.inner.size(); ++axis) {
    const int64_t reach = s.dilation[axis] * (s.kernel[axis] - 1);
    if (s.outer[axis] > (s.inner[axis] + reach - 1) / s.stride[axis] + 1) return true;
    if (which == 2 && s.padding[axis] > (reach + 1) / 2) return true;
  }
  return false;
}

/*!
 * \brief Whether oneDNN 3.12 sums the weight's gradient wrongly, from AVX-512 on.
 *
 * `jit:avx512_core` with strides, dilation and far padding: 35 of 981 random kernels of one axis,
 * all padded by 15 or more, had an error as large as the gradient.
 */
bool IsFarPadded(const ConvolutionSizes& s, int64_t which) {
  const size_t last = s.inner.size() - 1;
  return which == 2 && s.dilation[last] > 1 && s.stride[last] > 1 && s.padding[last] > 8;
}

bool HasFewPositions(const ConvolutionSizes& s, int64_t which) {
  // Measured with 256 and 512 channels, 3 by 3, on one and two threads: of the weight's gradient
  // oneDNN reorders the result too.
  return s.groups == 1 && s.batch * Volume(s.outer) * (which == 2 ? 1 : 3) <= s.outer_channels;
}

/*! \brief How the windows are multiplied; by the sizes alone, on which alone results may depend. */
struct Form {
  int64_t samples;  // whose windows are written out at a time
  // Columns are channels of taps, as in a copy of the weight, not taps of channels: windows are
  // then runs of the input.
  bool by_taps;

  Form(const ConvolutionSizes& s, int64_t which) : samples(s.batch), by_taps(false) {
    if (IsPatches(s, which) || HasFewPositions(s, which)) return;
    const int64_t columns = s.inner_channels / s.groups * Volume(s.kernel);
    const int64_t sample = 4 * Volume(s.outer) * columns;
    samples = std::min(s.batch, std::max<int64_t>(1, kWindowBytes / sample));
    by_taps = true;
  }
};

/*! \brief The matrix of a group's windows: a row for each outer position, columns as a weight. */
class Windows {
 public:
  Windows(const ConvolutionSizes& s, bool by_taps)
      : s_(s),
        taps_(Volume(s.kernel)),
        inner_(Volume(s.inner)),
        outer_(Volume(s.outer)),
        channels_(s.inner_channels / s.groups),
        tap_(by_taps ? channels_ : 1),
        channel_(by_taps ? 1 : taps_) {}

  int64_t Columns() const { return channels_ * taps_; }

  /*! \brief Whether it is the input. */
  bool IsInput() const {
    const auto all = [](const std::vector<int64_t>& values, int64_t value) {
      return std::all_of(values.begin(), values.end(), [=](int64_t x) { return x == value; });
    };
    return s_.groups == 1 && taps_ == 1 && all(s_.stride, 1) && all(s_.padding, 0);
  }

  /*! \brief Write the windows of so many samples; `x` is the group's first channel of the first. */
  void Write(const float* x, int64_t samples, float* windows) const {
    ParallelFor(samples * outer_, [&](int64_t row) {
      const float* sample = x + row / outer_ * inner_ * s_.inner_channels;
      float* target = windows + row * Columns();
      for (int64_t tap = 0; tap < taps_; ++tap) {
        const int64_t from = InnerPosition(row % outer_, tap);
        const float* source = sample + from * s_.inner_channels;
        float* to = target + tap * tap_;
        if (channel_ == 1) {
          for (int64_t c = 0; c < channels_; ++c) to[c] = from < 0 ? 0 : source[c];
        } else {
          for (int64_t c = 0; c < channels_; ++c) to[c * channel_] = from < 0 ? 0 : source[c];
        }
      }
    });
  }

  /*! \brief Add up what the windows hold of each inner position, tap by tap. */
  void Sum(const float* windows, int64_t samples, float* x) const {
    ParallelFor(samples * inner_, [&](int64_t position) {
      const float* sample = windows + position / inner_ * outer_ * Columns();
      float* target = x + position * s_.inner_channels;
      std::fill(target, target + channels_, 0.0f);
      for (int64_t tap = 0; tap < taps_; ++tap) {
        const int64_t row = OuterPosition(position % inner_, tap);
        if (row < 0) continue;
        const float* source = sample + row * Columns() + tap * tap_;
        if (channel_ == 1) {
          for (int64_t c = 0; c < channels_; ++c) target[c] += source[c];
        } else {
          for (int64_t c = 0; c < channels_; ++c) target[c] += source[c * channel_];
        }
      }
    });
  }

 private:
  /*! \brief Where a tap of an outer position reads; -1 outside. */
  int64_t InnerPosition(int64_t outer, int64_t tap) const {
    int64_t position = 0, step = 1;
    for (size_t i = s_.outer.size(); i-- > 0;) {
      const int64_t at = outer % s_.outer[i] * s_.stride[i] - s_.padding[i] +
                         tap % s_.kernel[i] * s_.dilation[i];
      if (at < 0 || at >= s_.inner[i]) return -1;
      position += at * step;
      step *= s_.inner[i];
      outer /= s_.outer[i];
      tap /= s_.kernel[i];
    }
    return position;
  }

  /*! \brief Which outer position reads an inner one at a tap; -1 if none does. */
  int64_t OuterPosition(int64_t inner, int64_t tap) const {
    int64_t position = 0, step = 1;
    for (size_t i = s_.outer.size(); i-- > 0;) {
      const int64_t at = inner % s_.inner[i] + s_.padding[i] - tap % s_.kernel[i] * s_.dilation[i];
      if (at < 0 || at % s_.stride[i] != 0 || at / s_.stride[i] >= s_.outer[i]) return -1;
      position += at / s_.stride[i] * step;
      step *= s_.outer[i];
      inner /= s_.inner[i];
      tap /= s_.kernel[i];
    }
    return position;
  }

  const ConvolutionSizes& s_;
  int64_t taps_, inner_, outer_, channels_;  // channels of a group
  int64_t tap_, channel_;                    // steps of the columns
};

}  // namespace

void OrderByTaps(const float* weight, int64_t rows, int64_t channels, int64_t taps,
                 float* ordered) {
  ParallelFor(rows, [&](int64_t row) {
    const float* source = weight + row * taps * channels;
    float* target = ordered + row * taps * channels;
    for (int64_t tap = 0; tap < taps; ++tap) {
      for (int64_t c = 0; c < channels; ++c) target[tap * channels + c] = source[c * taps + tap];
    }
  });
}

void OrderLikeWeight(const float* ordered, int64_t rows, int64_t channels, int64_t taps,
                     float* weight) {
  ParallelFor(rows, [&](int64_t row) {
    const float* source = ordered + row * taps * channels;
    float* target = weight + row * taps * channels;
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t tap = 0; tap < taps; ++tap) target[c * taps + tap] = source[tap * channels + c];
    }
  });
}

bool IsWindowProduct(const ConvolutionSizes& s, int64_t which, int64_t element) {
  if (element != 4 || s.batch * Volume(s.outer) == 0) return false;
  return IsPatches(s, which) || HasFewPositions(s, which) || IsUnusualLine(s, which) ||
         IsPaddedBeyond(s, which) || IsFarPadded(s, which) ||
         IsMiscomputedInFloat32(s, which) ||
         (which == 0 && LoweredElements(s) > kMostLowered);
}

int64_t WindowProductBytes(const ConvolutionSizes& s, int64_t which, int64_t threads) {
  const Form form(s, which);
  const int64_t rows = form.samples * Volume(s.outer), outer = s.outer_channels / s.groups;
  const int64_t columns = s.inner_channels / s.groups * Volume(s.kernel);
  const int64_t product = which == 0   ? GemmBytes<float>(rows, outer, columns, threads)
                          : which == 1 ? GemmBytes<float>(rows, columns, outer, threads)
                                       : GemmBytes<float>(outer, columns, rows, threads);
  const int64_t weight = form.by_taps ? PieceBytes(4 * outer * columns) : 0;
  return PieceBytes(4 * rows * columns) + weight + product;
}

void WindowProduct(const ConvolutionSizes& s, int64_t which, float* inner, float* outer,
                   float* weight, const float* bias) {
  const Form form(s, which);
  const Windows windows(s, form.by_taps);
  const int64_t columns = windows.Columns(), inner_channels = s.inner_channels / s.groups;
  const int64_t channels = s.outer_channels / s.groups, pitch = s.outer_channels;
  const int64_t taps = Volume(s.kernel);
  WorkspaceScope workspace;
  const bool is_input = windows.IsInput() && !form.by_taps;
  const int64_t most = form.samples * Volume(s.outer);
  float* room = is_input ? nullptr : workspace.Take<float>(most * columns);
  float* copy = form.by_taps ? workspace.Take<float>(channels * columns) : nullptr;
  for (int64_t group = 0; group < s.groups; ++group) {
    float* own = weight + group * channels * columns;
    float* ordered = form.by_taps ? copy : own;
    if (form.by_taps && which != 2) OrderByTaps(own, channels, inner_channels, taps, ordered);
    const float* addend = bias == nullptr ? nullptr : bias + group * channels;
    for (int64_t first = 0; first < s.batch; first += form.samples) {
      const int64_t samples = std::min(form.samples, s.batch - first);
      const int64_t rows = samples * Volume(s.outer);
      float* x = inner + first * Volume(s.inner) * s.inner_channels + group * inner_channels;
      float* y = outer + first * Volume(s.outer) * pitch + group * channels;
      float* written = is_input ? x : room;
      if (!is_input && which != 1) windows.Write(x, samples, written);
      const Matrix<float> of_windows{written, columns, 1};
      if (which == 0) {
        const Matrix<float> transposed{ordered, 1, columns};
        Multiply<float>({rows, channels, columns, of_windows, transposed, addend, 0, y, pitch});
      } else if (which == 1) {
        const Matrix<float> of_outer{y, pitch, 1}, of_weight{ordered, columns, 1};
        Multiply<float>(
            {rows, columns, channels, of_outer, of_weight, nullptr, 0, written, columns});
        if (!is_input) windows.Sum(written, samples, x);
      } else {
        const Matrix<float> transposed{y, 1, pitch};
        const float* sum = first == 0 ? nullptr : ordered;
        Multiply<float>(
            {channels, columns, rows, transposed, of_windows, sum, columns, ordered, columns});
      }
    }
    if (form.by_taps && which == 2) OrderLikeWeight(ordered, channels, inner_channels, taps, own);
  }
}

}  // namespace relax_disc
