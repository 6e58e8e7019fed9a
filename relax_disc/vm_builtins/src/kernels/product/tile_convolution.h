/*!
 * \file tile_convolution.h
 * \brief Convolutions of float32 by matrix tiles: products with windows that nobody writes.
 *
 * Packing reads the windows from the image, tap by tap, as it reads any left or right operand.  Of
 * the weight there is a copy whose rows or columns are channels of taps.
 */
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_TILE_CONVOLUTION_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_TILE_CONVOLUTION_H_

#include <cstdint>

#include "aten/convolution.h"

namespace relax_disc {

/*! \brief Whether the tiles compute it: where the processor has them, by the sizes. */
bool IsTileConvolution(const ConvolutionSizes& sizes, int64_t which, int64_t element);

/*! \brief Workspace. */
int64_t TileConvolutionBytes(const ConvolutionSizes& sizes, int64_t which, int64_t threads);

/*! \brief See `WindowProduct`. */
void TileConvolution(const ConvolutionSizes& sizes, int64_t which, float* inner, float* outer,
                     float* weight, const float* bias);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_TILE_CONVOLUTION_H_
