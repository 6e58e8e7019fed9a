// What PyTorch asks a CUDA device about streams and events, answered by Python (streams.py).
// Stream 0 is the virtual machine's, stream 1 the one that is made.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Answers {
  int64_t (*record)(int64_t stream);  // returns the event
  void (*block)(int64_t event, int64_t stream);
  int (*query)(int64_t event);
  void (*synchronize)(int64_t event);
} answers;

thread_local int64_t current_stream = 0;

int64_t Number(void* event) { return reinterpret_cast<int64_t>(event); }

struct Device final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }  // no threads of autograd's
  c10::Stream getStream(c10::Device device) const override { return Make(device, current_stream); }
  c10::Stream getNewStream(c10::Device device, int) const override { return Make(device, 1); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(answers.record(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    answers.block(Number(event), stream.id());
  }
  bool queryEvent(void* event) const override { return answers.query(Number(event)) != 0; }
  void synchronizeEvent(void* event) const override { answers.synchronize(Number(event)); }

 private:
  static c10::Stream Make(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
} device;

}  // namespace

extern "C" {
void emu_install(const Answers* given) {
  if (given != nullptr) answers = *given;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(
      given != nullptr ? &device : nullptr);
}
int64_t emu_current_stream() { return current_stream; }
}
