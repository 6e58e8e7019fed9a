// The guard of a step on the CPU, where nothing forbids the step: relax_disc.guard; and the check of
// a batch's indices before it, relax_disc.indices_are_inside.
//
// All else is guard.py's: what lies on another device, losses that must be finite, and the error.
// A call of Python costs ten times what there is to do here, more in a step that fills the caches.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>

#include "kernels/tensor_view.h"

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;

constexpr int kFlagParts = 4;  // the flag, the least and greatest value allowed, where

bool IsOnHost(TensorView view) { return view.device().device_type == kDLCPU; }

template <typename T>
T Last(TensorView view) {
  return Tensor<T>(view).data[view.numel() - 1];
}

/*! \brief Whether a scalar is above zero, or of a type that is not read here. */
bool MayBeSet(TensorView flag) {
  if (!IsOnHost(flag) || flag.dtype().code != kDLInt || flag.numel() != 1) return true;
  if (flag.dtype().bits == 64) return Last<int64_t>(flag) > 0;
  return flag.dtype().bits != 32 || Last<int32_t>(flag) > 0;
}

/*! \brief Whether the last entry of the hyper-parameters asks for finite losses. */
bool MayAsk(TensorView hyper) {
  if (!IsOnHost(hyper) || hyper.dtype().code != kDLFloat || hyper.numel() == 0) return true;
  if (hyper.dtype().bits == 64) return Last<double>(hyper) != 0;
  return hyper.dtype().bits != 32 || Last<float>(hyper) != 0;
}

void Guard(ffi::PackedArgs args, ffi::Any* result) {
  const int last = args.size() - 1;
  const auto hyper = args[0].cast<TensorView>(), passed = args[last].cast<TensorView>();
  bool is_plain = IsOnHost(passed) && !MayAsk(hyper);
  const int first_flag = 3 + 2 * args[2].cast<int>();
  for (int i = first_flag; is_plain && i < last; i += kFlagParts) {
    is_plain = !MayBeSet(args[i].cast<TensorView>());
  }
  if (!is_plain) {
    ffi::Function::GetGlobalRequired("relax_disc.guard_by_torch").CallPacked(args, result);
    return;
  }
  std::memcpy(static_cast<char*>(passed.data_ptr()) + passed.byte_offset(),
              static_cast<const char*>(hyper.data_ptr()) + hyper.byte_offset(),
              ffi::GetDataSize(hyper));
}

template <typename T>
bool AreInside(TensorView view, int64_t least, int64_t greatest, int64_t other) {
  const Tensor<T> x(view);
  int is_outside = 0;
  for (int64_t i = 0, count = view.numel(); i < count; ++i) {
    const int64_t value = x.data[i];
    is_outside |= ((value < least) | (value > greatest)) & (value != other);
  }
  return is_outside == 0;
}

/*!
 * \brief Whether all indices of a compact tensor are in a range or one other value.
 *
 * False for types that are not read here.
 */
bool IndicesAreInside(TensorView view, int64_t least, int64_t greatest, int64_t other) {
  if (!IsOnHost(view) || view.dtype().code != kDLInt) return false;
  if (view.dtype().bits == 64) return AreInside<int64_t>(view, least, greatest, other);
  if (view.dtype().bits == 32) return AreInside<int32_t>(view, least, greatest, other);
  return false;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("relax_disc.guard", Guard)
      .def("relax_disc.indices_are_inside", IndicesAreInside);
}

}  // namespace relax_disc
