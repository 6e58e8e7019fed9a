/*!
 * \file patch_product.h
 * \brief Convolutions of bfloat16 whose windows lie apart, as PyTorch's products with patches.
 *
 * A transformer of pictures begins with one.  In tiles oneDNN copies each row of the picture for
 * each column of a window, up to 97 MB a thread for patches of 16 by 16, and takes 20 times as long
 * for the weight's gradient.  The patches themselves are no more than the picture.
 */
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_PATCH_PRODUCT_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_PATCH_PRODUCT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "aten/convolution.h"

namespace relax_disc {

/*! \brief Whether patches are multiplied: of elements of two bytes, by the sizes. */
bool IsPatchProduct(const ConvolutionSizes& sizes, int64_t which, int64_t element, bool is_half);

/*! \brief Workspace. */
int64_t PatchProductBytes(const ConvolutionSizes& sizes, int64_t which, int64_t threads);

/*!
 * \brief Compute a convolution (`which` 0) or its weight's gradient (2), in an `AtenScope`.
 * \param inner, outer `[batch, channels, *positions]`, channels last in memory; `weight` as PyTorch
 *   keeps it.
 */
void PatchProduct(const ConvolutionSizes& sizes, int64_t which, const at::Tensor& inner,
                  const at::Tensor& outer, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_PATCH_PRODUCT_H_
