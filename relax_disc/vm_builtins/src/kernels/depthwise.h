/*!
 * \file depthwise.h
 * \brief Gradient of a convolution by its weight where each channel has a window of its own.
 */
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_DEPTHWISE_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_DEPTHWISE_H_

#include "aten/convolution.h"

namespace relax_disc {

/*!
 * \brief Write `weight`, `[channels, 1, *kernel]`; takes no memory.
 * \param sizes Of two axes, with as many groups as channels.
 * \param outer, inner `[batch, *positions, channels]`.
 */
void DepthwiseWeight(const ConvolutionSizes& sizes, const float* outer, const float* inner,
                     float* weight);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_DEPTHWISE_H_
