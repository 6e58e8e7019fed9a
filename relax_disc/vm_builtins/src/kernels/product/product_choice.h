/*!
 * \file product_choice.h
 * \brief Which kernels multiply float32: the library's own, or PyTorch's where those are faster.
 *
 * What is faster depends on the processor: products fall into classes of similar sizes, and one
 * measurement on the machine at hand says for each number of threads in which of them PyTorch's
 * kernels win (`product_choice.py`).  A table never changes once it was asked for, so that a
 * product of the same sizes gives the same bits throughout a process.
 */
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_PRODUCT_CHOICE_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_PRODUCT_CHOICE_H_

#include <cstdint>

#include "kernels/tensor_view.h"

namespace relax_disc {

/*! \brief How operands lie: rows of A and of B are contiguous, or columns of one of them. */
enum class Operands { kPlain = 0, kTransposedB = 1, kTransposedA = 2 };

/*! \brief `count` products of `[m, k]` by `[k, n]`. */
struct ProductSizes {
  int64_t count, m, n, k;
};

constexpr int kProductClasses = 3 * 3 * 7 * 13;

/*! \brief Class of a product, in [0, kProductClasses). */
int ProductClass(const ProductSizes& sizes, Operands operands);

/*! \brief PyTorch's kernels, where they are linked; each may refuse, having done nothing. */
struct OtherProducts {
  bool (*matmul)(TensorView a, TensorView b, const TensorView* addend, int64_t a_split,
                 int64_t b_split, int64_t transpose_a, int64_t transpose_b, TensorView c);
  bool (*batch_matmul)(TensorView a, TensorView b, int64_t a_axes, int64_t b_axes, int64_t c_axes,
                       TensorView c);
  /*! \brief Most that they take from malloc beside their arguments. */
  int64_t (*bytes)(const ProductSizes& sizes, int64_t threads);
};
void OfferProducts(const OtherProducts& others);

/*! \brief The others if they multiply such a product of float32 on this many threads, else null. */
const OtherProducts* ChosenProducts(const ProductSizes& sizes, Operands operands, int64_t threads);

/*!
 * \brief Bytes from malloc of a product of float32 if others multiply it in any layout, else 0.
 * \param or_smaller The sizes are bounds: it may be a product of another class.
 */
int64_t ChosenProductBytes(const ProductSizes& sizes, bool or_smaller, int64_t threads);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_PRODUCT_CHOICE_H_
