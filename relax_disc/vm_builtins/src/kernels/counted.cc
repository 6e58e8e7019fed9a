// Operators whose result has as many rows as their data say.  Each returns that number, which is at
// most the extent of the memory that it is given; the run time makes it the dim's size from then on.
//
// relax_disc.cpu.nonzero: positions of the true elements, in order.
// relax_disc.cpu.unique: distinct values in order, where each element's value is among them, and
// how often each is there.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <numeric>

#include "kernels/tensor_view.h"

namespace relax_disc {
namespace {

int64_t NonZero(TensorView mask, TensorView positions_view) {
  TVM_FFI_CHECK(mask.dtype().bits == 8 && mask.ndim() == 1, TypeError)
      << "nonzero: expected a flat mask of bytes";
  const auto* bytes = static_cast<const uint8_t*>(mask.data_ptr()) + mask.byte_offset();
  Tensor<int64_t> positions(positions_view);
  const int64_t elements = mask.shape()[0], room = positions.shape[0];
  int64_t count = 0, beyond = 0;
  for (int64_t i = 0; i < elements; ++i) {
    // Without a branch: masks of a training step are hard to predict.
    *(count < room ? positions.data + count : &beyond) = i;
    count += bytes[i] != 0;
  }
  return count;
}

/*! \brief Whether a value comes first; what is not a number comes last. */
template <typename T>
bool Less(T a, T b) {
  return a < b || (a == a && b != b);
}

template <typename T>
int64_t Unique(TensorView x_view, TensorView values_view, TensorView inverse_view,
               TensorView counts_view, TensorView order_view) {
  Tensor<T> x(x_view), values(values_view);
  Tensor<int64_t> inverse(inverse_view), counts(counts_view), order(order_view);
  const int64_t elements = x.Size(0, x.ndim), room = values.shape[0];
  std::iota(order.data, order.data + elements, 0);
  std::sort(order.data, order.data + elements, [&](int64_t a, int64_t b) {
    if (Less(x.data[a], x.data[b])) return true;
    return !Less(x.data[b], x.data[a]) && a < b;
  });
  int64_t count = 0;
  for (int64_t i = 0; i < elements; ++i) {
    const T value = x.data[order.data[i]];
    const bool is_new = i == 0 || !(value == x.data[order.data[i - 1]]);
    count += is_new;
    inverse.data[order.data[i]] = count - 1;
    if (count > room) continue;
    if (is_new) counts.data[count - 1] = 0;
    values.data[count - 1] = value;
    ++counts.data[count - 1];
  }
  return count;
}

int64_t UniqueOf(TensorView x, TensorView values, TensorView inverse, TensorView counts,
                 TensorView order) {
  const bool is_float = x.dtype().code == kDLFloat;
  const bool is_wide = x.dtype().bits == 64;
  auto* run = is_float ? (is_wide ? &Unique<double> : &Unique<float>)
                       : (is_wide ? &Unique<int64_t> : &Unique<int32_t>);
  return run(x, values, inverse, counts, order);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.nonzero", NonZero)
      .def("relax_disc.cpu.unique", UniqueOf);
}

}  // namespace relax_disc
