/*!
 * \file onednn_faults.h
 * \brief Convolutions that oneDNN 3.12, and PyTorch 2.13 with it, computes wrongly or never ends.
 *
 * Each was found by comparing random geometries with float64, and is computed in another way here.
 */
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_FAULTS_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_FAULTS_H_

#include <cstdint>

#include "aten/convolution.h"

namespace relax_disc {

/*!
 * \brief Whether a weight's gradient is summed wrongly, now and then or always.
 *
 * `jit_1x1:avx2` gathers what strides leave of an image whose channels are last.  Where these fill
 * no whole vectors and there are several threads or images, elements of the gradient are wrong (26
 * of 300 runs of PyTorch itself with 3 channels of 16 by 16, 40 of 40 with 4 of 18 by 16).
 */
bool IsStridedTail(const ConvolutionSizes& sizes);

/*!
 * \brief Whether a convolution, or its weight's gradient, of two-byte elements is left to float32.
 *
 * In matrix tiles (`brg_conv_fwd`, `brgconv_bwd_w`; bfloat16) these give other numbers, NaN among
 * them, or write beyond their memory: rows of a window, or windows of one axis, that fill whole
 * tiles where channels do not (8 channels and 16 wide, 24 and 4); results one wide with strides;
 * strides above 4; three axes; strides with dilation; gradients of weights where channels have
 * windows of their own that are dilated or of three axes (wide ones take 30 times a sample).  Of
 * 24,000 other random ones with one and two axes none did.  Without tiles, from AVX-512 on, the
 * same are left to float32, gradients of weights of all groups of channels (with dilation they were
 * wrong, others took more than is known), tall windows of one channel, and its results one wide.
 * Where rows of windows are dilated and results more than 28 wide, `jit_bf16` reads the last
 * channels' gradients of weights from other memory, if these fill no 16 (209 of 1,500 random ones,
 * NaN among them); it serves tiles' processors where a window is longer than an axis.  It sums them
 * wrongly where an image of 128 channels or more is lower than its padding.
 * On all processors from AVX-512 on (`brdgmm_dw`) windows 15 wide or more never return where each
 * channel has its own.
 */
bool IsMiscomputed(const ConvolutionSizes& sizes, int64_t which, int64_t element, bool is_half);

/*!
 * \brief Whether a convolution of float32, or one of its gradients, is wrong from AVX-512 on.
 *
 * Other numbers, or what lay in memory; where no window reads anything along an axis (windows of
 * one element with padding and strides) the process may end.  Of one channel: results one wide with
 * strides, and strides that leave places out on one of three axes.  Gradients of weights with three
 * axes, one wide or with windows 7 deep.  Gradients of the input of groups, by windows 15 wide of
 * results one wide.  Of 36,000 random small ones and 10,000 of full size no others.
 */
bool IsMiscomputedInFloat32(const ConvolutionSizes& sizes, int64_t which);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_FAULTS_H_
