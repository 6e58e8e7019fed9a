// What a convolution takes beside its arguments.
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_CONVOLUTION_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_CONVOLUTION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace relax_disc {

/*! \brief Product of extents. */
inline int64_t Volume(const std::vector<int64_t>& extents) {
  int64_t volume = 1;
  for (int64_t extent : extents) volume *= extent;
  return volume;
}

/*! \brief Sizes of a convolution from its inner side (the input) to its outer side. */
struct ConvolutionSizes {
  int64_t batch, inner_channels, outer_channels, groups;
  // One entry for each spatial axis.
  std::vector<int64_t> inner, outer, kernel, stride, padding, dilation;

  /*! \brief Whether each channel has a window of its own. */
  bool IsDeep() const { return groups == inner_channels && groups == outer_channels; }

  /*! \brief The numbers in the order of the fields, after which axes there are. */
  static ConvolutionSizes Read(const std::vector<int64_t>& numbers, std::size_t first);
};

/*! \brief Whether `DepthwiseWeight` computes in float32 what is left to that type. */
inline bool IsOwnDepthwise(const ConvolutionSizes& sizes, int64_t which) {
  return which == 2 && sizes.groups > 1 && sizes.inner.size() == 2 && sizes.IsDeep();
}

/*!
 * \brief Elements that oneDNN has for each thread, from AVX-512 on, where it writes out the windows
 * of one channel row by row; 0 where it does not.
 */
int64_t LoweredElements(const ConvolutionSizes& sizes);

/*!
 * \brief Workspace of a convolution (`which` 0), its input's (1) or its weight's gradient (2).
 *
 * oneDNN tells nobody what it will take: these are bounds fitted to some thousands of geometries
 * (`tests/vm_builtins/test_aten_convolution.py` draws others).  They are close for the layers of the
 * usual networks and generous for rare ones: three axes, dilation, strides beyond two, wide windows.
 * \param element Bytes of an element: 8 is computed by ATen's own kernels, others by oneDNN.
 * \param is_half Elements of two bytes are float16, which few processors have kernels for; others
 *   are bfloat16, which those without AVX-512 have none for.
 */
int64_t ConvolutionBytes(const ConvolutionSizes& sizes, int64_t which, int64_t element,
                         bool is_half, int64_t threads);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_CONVOLUTION_H_
