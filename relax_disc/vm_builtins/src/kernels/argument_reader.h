// The arguments of a library function that has several forms, one after the other.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_ARGUMENT_READER_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_ARGUMENT_READER_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "kernels/tensor_view.h"

namespace relax_disc {

/*! \brief Reads arguments one after the other. */
class ArgumentReader {
 public:
  explicit ArgumentReader(tvm::ffi::PackedArgs args) : args_(args) {}
  template <typename T>
  T Next() {
    return args_[next_++].cast<T>();
  }
  template <typename T>
  Tensor<T> NextTensor() {
    return Tensor<T>(Next<TensorView>());
  }
  /*! \brief Number of arguments that have been read. */
  int count() const { return next_; }

 private:
  tvm::ffi::PackedArgs args_;
  int next_ = 0;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_ARGUMENT_READER_H_
