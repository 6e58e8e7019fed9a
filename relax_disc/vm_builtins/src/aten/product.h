// What a product by PyTorch's kernels takes beside its arguments.
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_PRODUCT_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_PRODUCT_H_

#include <cstdint>

namespace relax_disc {

/*! \brief `count` times `[m, k]` by `[k, n]`, of elements of so many bytes. */
struct AtenProduct {
  int64_t count, m, n, k, element;
  bool is_bfloat;  // of two bytes; else float16
};

/*! \brief Workspace. */
int64_t AtenProductBytes(const AtenProduct& product, int64_t threads);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_PRODUCT_H_
