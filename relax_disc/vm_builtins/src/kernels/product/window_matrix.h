// The windows of a convolution as a matrix that nobody writes.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_WINDOW_MATRIX_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_WINDOW_MATRIX_H_

#include <cstdint>

namespace relax_disc {

/*! \brief What windows go over: `[samples, high, wide, channels]`, one or two axes of positions. */
struct WindowGeometry {
  const float* data;
  int64_t high, wide, channels;  // channels are a multiple of 32
  int64_t outer_high, outer_wide;
  int64_t taps_wide;
  int64_t stride[2], padding[2], dilation[2];  // a negative padding leaves out what is at the edge
};

/*! \brief A row for each outer position of each sample, a column for each channel of each tap. */
struct WindowMatrix {
  const WindowGeometry* geometry;
  int64_t row, column;

  WindowMatrix At(int64_t i, int64_t j) const { return {geometry, row + i, column + j}; }
};

/*! \brief Where the taps of rows read, one row after the other. */
class WindowRows {
 public:
  WindowRows(const WindowGeometry& geometry, int64_t row) : g_(geometry) {
    x_ = row % g_.outer_wide;
    y_ = row / g_.outer_wide % g_.outer_high;
    sample_ = g_.data + row / g_.outer_wide / g_.outer_high * Sample();
  }

  /*! \brief The channels that a tap of this row reads, or null outside; then comes the next row. */
  const float* Next(int64_t tap) {
    const int64_t y = At(0, y_, tap / g_.taps_wide), x = At(1, x_, tap % g_.taps_wide);
    const bool is_inside = y >= 0 && y < g_.high && x >= 0 && x < g_.wide;
    const float* found = is_inside ? sample_ + (y * g_.wide + x) * g_.channels : nullptr;
    if (++x_ == g_.outer_wide) {
      x_ = 0;
      if (++y_ == g_.outer_high) {
        y_ = 0;
        sample_ += Sample();
      }
    }
    return found;
  }

 private:
  int64_t Sample() const { return g_.high * g_.wide * g_.channels; }
  int64_t At(int axis, int64_t outer, int64_t tap) const {
    return outer * g_.stride[axis] - g_.padding[axis] + tap * g_.dilation[axis];
  }

  const WindowGeometry& g_;
  int64_t y_, x_;
  const float* sample_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_WINDOW_MATRIX_H_
