/*!
 * \file window_product.h
 * \brief Convolutions as products of matrices whose rows are windows, written out.
 *
 * The deep layers of a network have few positions and many channels.  oneDNN reorders their weights
 * at every call, which then takes as long as the convolution; here the windows are written out, and
 * the weight is read, or its gradient written, where PyTorch keeps it.  Along a line oneDNN takes
 * several times the weight, and whole samples' windows, where these are wide, dilated or far apart:
 * here the windows of a few samples of one group, and a copy of that group's weight.
 */
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_WINDOW_PRODUCT_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_WINDOW_PRODUCT_H_

#include <cstdint>

#include "aten/convolution.h"

namespace relax_disc {

/*! \brief Copy rows of a weight from PyTorch's order, taps of channels, to channels of taps. */
void OrderByTaps(const float* weight, int64_t rows, int64_t channels, int64_t taps,
                 float* ordered);
/*! \brief ...and back. */
void OrderLikeWeight(const float* ordered, int64_t rows, int64_t channels, int64_t taps,
                     float* weight);

/*! \brief Whether windows are written out: in float32, by the sizes. */
bool IsWindowProduct(const ConvolutionSizes& sizes, int64_t which, int64_t element);

/*! \brief Workspace; of 1 by 1 windows more than is used where they are the input itself. */
int64_t WindowProductBytes(const ConvolutionSizes& sizes, int64_t which, int64_t threads);

/*!
 * \brief Compute a convolution (`which` 0), its input's (1) or its weight's gradient (2).
 * \param inner, outer `[batch, *positions, channels]`, `weight` as PyTorch keeps it; that of the
 *   three which is the result is written.
 * \param bias One number for each outer channel, or null; only of a convolution.
 */
void WindowProduct(const ConvolutionSizes& sizes, int64_t which, float* inner, float* outer,
                   float* weight, const float* bias);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_WINDOW_PRODUCT_H_
