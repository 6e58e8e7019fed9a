// What a product by PyTorch's kernels takes beside its arguments.
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_PRODUCT_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_PRODUCT_H_

#include <cstdint>

namespace relax_disc {

/*! \brief Workspace of `[m, k]` by `[k, n]`, once or many times, of elements of so many bytes. */
int64_t AtenProductBytes(int64_t m, int64_t n, int64_t k, int64_t element, int64_t threads);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_PRODUCT_H_
