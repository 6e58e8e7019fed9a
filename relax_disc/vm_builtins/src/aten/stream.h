/*!
 * \file stream.h
 * \brief Streams of a device, by PyTorch's interface for all kinds of devices: no CUDA is needed.
 */
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_STREAM_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_STREAM_H_

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <optional>

namespace relax_disc {

/*! \brief The stream that the virtual machine's kernels run on. */
inline c10::Stream MachineStream(const c10::Device& device) {
  void* raw = TVMFFIEnvGetStream(kDLCUDA, device.index());
  // PyTorch's id of a stream that it did not make is its address; 0 is the default stream.
  const c10::StreamId id = reinterpret_cast<c10::StreamId>(raw);
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

/*! \brief Lets PyTorch's kernels use a stream, the virtual machine's or another; the CPU has none. */
class OnStream {
 public:
  explicit OnStream(const c10::Stream& stream)
      : guard_(stream.device_type()), before_(guard_->exchangeStream(stream)) {}
  explicit OnStream(const c10::Device& device) {
    if (device.is_cpu()) return;
    guard_.emplace(device.type());
    before_ = guard_->exchangeStream(MachineStream(device));
  }
  ~OnStream() {
    if (guard_) guard_->exchangeStream(*before_);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::optional<c10::Stream> before_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_STREAM_H_
