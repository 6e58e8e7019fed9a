// Typed views of the tensors that library functions get from the runtime.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_TENSOR_VIEW_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_TENSOR_VIEW_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <cstdint>

#ifndef TVM_FFI_CHECK
#define TVM_FFI_CHECK(cond, kind) \
  if (!(cond)) TVM_FFI_THROW(kind)
#endif

namespace relax_disc {

using tvm::ffi::TensorView;

template <typename T>
struct ElementType;
template <>
struct ElementType<float> {
  static constexpr int code = kDLFloat, bits = 32;
};
template <>
struct ElementType<double> {
  static constexpr int code = kDLFloat, bits = 64;
};
template <>
struct ElementType<int32_t> {
  static constexpr int code = kDLInt, bits = 32;
};
template <>
struct ElementType<int64_t> {
  static constexpr int code = kDLInt, bits = 64;
};

inline bool IsDouble(TensorView view) {
  return view.dtype().code == kDLFloat && view.dtype().bits == 64;
}

/*! \brief A compact tensor of known element type. */
template <typename T>
struct Tensor {
  T* data;
  int ndim;
  const int64_t* shape;

  explicit Tensor(TensorView view)
      : data(reinterpret_cast<T*>(static_cast<char*>(view.data_ptr()) + view.byte_offset())),
        ndim(view.ndim()),
        shape(view.shape().data()) {
    DLDataType dtype = view.dtype();
    TVM_FFI_CHECK(dtype.code == ElementType<T>::code && dtype.bits == ElementType<T>::bits &&
                      dtype.lanes == 1,
                  TypeError)
        << "expected elements of code " << ElementType<T>::code << " with " << ElementType<T>::bits
        << " bits, got code " << static_cast<int>(dtype.code) << " with "
        << static_cast<int>(dtype.bits);
  }

  /*! \brief Product of the extents of axes [first, last). */
  int64_t Size(int64_t first, int64_t last) const {
    int64_t size = 1;
    for (int64_t i = first; i < last; ++i) size *= shape[i];
    return size;
  }
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_TENSOR_VIEW_H_
