#include "kernels/window_product.h"

#include <algorithm>

#include "kernels/gemm.h"
#include "kernels/parallel.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

int64_t Volume(const std::vector<int64_t>& extents) {
  int64_t volume = 1;
  for (int64_t extent : extents) volume *= extent;
  return volume;
}

/*! \brief The matrix of windows: a row for each outer position, as many columns as a weight has. */
class Windows {
 public:
  Windows(const ConvolutionSizes& s, const std::vector<int64_t>& padding)
      : s_(s),
        padding_(padding),
        taps_(Volume(s.kernel)),
        inner_(Volume(s.inner)),
        outer_(Volume(s.outer)) {}

  int64_t Rows() const { return s_.batch * outer_; }
  int64_t Columns() const { return s_.inner_channels * taps_; }

  /*! \brief Whether it is the input. */
  bool IsInput() const {
    const auto all = [](const std::vector<int64_t>& values, int64_t value) {
      return std::all_of(values.begin(), values.end(), [=](int64_t x) { return x == value; });
    };
    return taps_ == 1 && all(s_.stride, 1) && all(padding_, 0);
  }

  void Write(const float* x, float* windows) const {
    const int64_t channels = s_.inner_channels;
    ParallelFor(Rows(), [&](int64_t row) {
      const float* sample = x + row / outer_ * inner_ * channels;
      float* target = windows + row * Columns();
      for (int64_t tap = 0; tap < taps_; ++tap) {
        const int64_t from = InnerPosition(row % outer_, tap);
        const float* source = sample + from * channels;
        for (int64_t c = 0; c < channels; ++c) target[c * taps_ + tap] = from < 0 ? 0 : source[c];
      }
    });
  }

  /*! \brief Add up what the windows hold of each inner position, tap by tap. */
  void Sum(const float* windows, float* x) const {
    const int64_t channels = s_.inner_channels;
    ParallelFor(s_.batch * inner_, [&](int64_t position) {
      const float* sample = windows + position / inner_ * outer_ * Columns();
      float* target = x + position * channels;
      std::fill(target, target + channels, 0.0f);
      for (int64_t tap = 0; tap < taps_; ++tap) {
        const int64_t row = OuterPosition(position % inner_, tap);
        if (row < 0) continue;
        const float* source = sample + row * Columns() + tap;
        for (int64_t c = 0; c < channels; ++c) target[c] += source[c * taps_];
      }
    });
  }

 private:
  /*! \brief Where a tap of an outer position reads; -1 outside. */
  int64_t InnerPosition(int64_t outer, int64_t tap) const {
    int64_t position = 0, step = 1;
    for (size_t i = s_.outer.size(); i-- > 0;) {
      const int64_t at = outer % s_.outer[i] * s_.stride[i] - padding_[i] +
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
      const int64_t at = inner % s_.inner[i] + padding_[i] - tap % s_.kernel[i] * s_.dilation[i];
      if (at < 0 || at % s_.stride[i] != 0 || at / s_.stride[i] >= s_.outer[i]) return -1;
      position += at / s_.stride[i] * step;
      step *= s_.outer[i];
      inner /= s_.inner[i];
      tap /= s_.kernel[i];
    }
    return position;
  }

  const ConvolutionSizes& s_;
  const std::vector<int64_t>& padding_;
  int64_t taps_, inner_, outer_;
};

}  // namespace

bool IsWindowProduct(const ConvolutionSizes& s, int64_t which, int64_t element) {
  // Measured with 256 and 512 channels, 3 by 3, on one and two threads: of the weight's gradient
  // oneDNN reorders the result too.
  const int64_t positions = s.batch * Volume(s.outer), taps = Volume(s.kernel);
  if (element != 4 || s.groups != 1 || positions == 0) return false;
  // Patches: windows apart from each other are no more than the input.
  if (which != 1 && taps > 1 && Volume(s.outer) * taps <= Volume(s.inner)) return true;
  return positions * (which == 2 ? 1 : 3) <= s.outer_channels;
}

int64_t WindowProductBytes(const ConvolutionSizes& s, int64_t which, int64_t threads) {
  const int64_t rows = s.batch * Volume(s.outer), outer = s.outer_channels;
  const int64_t columns = s.inner_channels * Volume(s.kernel);
  const int64_t product = which == 0   ? GemmBytes<float>(rows, outer, columns, threads)
                          : which == 1 ? GemmBytes<float>(rows, columns, outer, threads)
                                       : GemmBytes<float>(outer, columns, rows, threads);
  return PieceBytes(4 * rows * columns) + product;
}

void WindowProduct(const ConvolutionSizes& s, const std::vector<int64_t>& padding, int64_t which,
                   float* inner, float* outer, float* weight, const float* bias) {
  const Windows windows(s, padding);
  const int64_t rows = windows.Rows(), columns = windows.Columns(), channels = s.outer_channels;
  WorkspaceScope workspace;
  float* written = windows.IsInput() ? inner : workspace.Take<float>(rows * columns);
  if (written != inner && which != 1) windows.Write(inner, written);
  const Matrix<float> of_windows{written, columns, 1}, of_outer{outer, channels, 1};
  const Matrix<float> of_weight{weight, columns, 1};
  if (which == 0) {
    const Matrix<float> transposed{weight, 1, columns};
    Multiply<float>({rows, channels, columns, of_windows, transposed, bias, 0, outer, channels});
  } else if (which == 1) {
    Multiply<float>({rows, columns, channels, of_outer, of_weight, nullptr, 0, written, columns});
    if (written != inner) windows.Sum(written, inner);
  } else {
    const Matrix<float> transposed{outer, 1, channels};
    Multiply<float>({channels, columns, rows, transposed, of_windows, nullptr, 0, weight, columns});
  }
}

}  // namespace relax_disc
