// What oneDNN has kernels for on this processor.
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_H_

#include <c10/core/ScalarType.h>

namespace relax_disc {

/*! \brief Whether oneDNN has kernels for the type, as PyTorch asks. */
bool OneDnnComputes(c10::ScalarType type);

/*! \brief Whether oneDNN multiplies bfloat16 in tiles, for which it copies operands into others. */
bool OneDnnHasTiles();

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_ONEDNN_H_
