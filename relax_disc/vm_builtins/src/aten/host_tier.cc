// Pinned memory of the host as a tier: copies on a stream of their own, ordered by events.
//
// A copy waits for what the virtual machine's stream was asked for before it, and that stream waits
// for a copy where the plan says; the caller never does.
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "aten/stream.h"
#include "offload/tier.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief Pinned memory, and what tells that the copies of its last call are done. */
struct HostBuffer {
  BlockPtr block;
  c10::Device device;
  std::optional<c10::Event> last;
};

class HostTier : public Tier {
 public:
  explicit HostTier(const TierModel& figures) : figures_(figures) {}
  ~HostTier();

  TierModel Figures() final { return figures_; }
  std::unique_ptr<TierCall> Begin(const MemoryBlock& arena, int64_t bytes) final;
  /*! \brief A call has ended; copies may still be under way. */
  void TakeBack(HostBuffer buffer);

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("relax_disc.HostTier", HostTier, Tier);

 private:
  HostBuffer TakeBuffer(const c10::Device& device, int64_t bytes);  // mutex held

  const TierModel figures_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::list<HostBuffer> idle_;
};

class HostCall : public TierCall {
 public:
  HostCall(HostTier* tier, HostBuffer buffer, const c10::Stream& copies)
      : tier_(tier), buffer_(std::move(buffer)), copies_(copies) {}
  ~HostCall();

  int64_t Write(char* from, int64_t bytes, int64_t slot) final {
    return Copy(Bytes(buffer_.block->base() + slot, bytes, c10::kCPU),
                Bytes(from, bytes, buffer_.device));
  }
  int64_t Read(char* to, int64_t bytes, int64_t slot) final {
    return Copy(Bytes(to, bytes, buffer_.device),
                Bytes(buffer_.block->base() + slot, bytes, c10::kCPU));
  }
  void Wait(int64_t request) final;

 private:
  static at::Tensor Bytes(char* data, int64_t bytes, const c10::Device& device) {
    c10::InferenceMode without_gradients;
    return at::for_blob(data, {bytes})
        .options(at::TensorOptions().dtype(c10::kByte).device(device))
        .target_device(device)
        .make_tensor();
  }
  int64_t Copy(const at::Tensor& to, const at::Tensor& from);

  HostTier* tier_;
  HostBuffer buffer_;
  const c10::Stream copies_;
  std::vector<c10::Event> done_;  // of each request
  int64_t awaited_ = -1;          // the last request that the machine's stream waits for
};

HostTier::~HostTier() {
  try {
    for (HostBuffer& buffer : idle_) {
      if (buffer.last) buffer.last->synchronize();
    }
  } catch (const c10::Error&) {  // the device has gone, at the end of the process
  }
}

std::unique_ptr<TierCall> HostTier::Begin(const MemoryBlock& arena, int64_t bytes) {
  if (arena.device().device_type != kDLCUDA) {
    TVM_FFI_THROW(OffloadError) << "tensors of the host are offloaded to a folder, not to \"host\".";
  }
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(arena.device().device_id));
  std::lock_guard<std::mutex> lock(mutex_);
  auto stream = streams_.find(device.index());
  if (stream == streams_.end()) {
    const c10::Stream made = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
    stream = streams_.emplace(device.index(), made).first;
  }
  return std::make_unique<HostCall>(this, TakeBuffer(device, bytes), stream->second);
}

// A slot is used again by copies of the same stream, after those that used it before.
HostBuffer HostTier::TakeBuffer(const c10::Device& device, int64_t bytes) {
  const auto serves = [&](const HostBuffer& buffer) {
    return buffer.device == device && buffer.block->bytes() >= bytes;
  };
  const auto found = std::find_if(idle_.begin(), idle_.end(), serves);
  if (found != idle_.end()) {
    HostBuffer buffer = std::move(*found);
    idle_.erase(found);
    return buffer;
  }
  // One that became too small goes as soon as no copy uses it.
  idle_.remove_if([](const HostBuffer& buffer) { return !buffer.last || buffer.last->query(); });
  const DLDevice pinned{kDLCUDAHost, 0};
  return {MemoryBlock::Allocate(pinned, bytes, Backing::kReal), device, std::nullopt};
}

void HostTier::TakeBack(HostBuffer buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(buffer));
}

// What comes later may use the arena's memory at once.
HostCall::~HostCall() {
  try {
    Wait(static_cast<int64_t>(done_.size()) - 1);
  } catch (const ffi::Error&) {  // the device has failed, and with it whatever comes later
  }
  if (!done_.empty()) buffer_.last = std::move(done_.back());
  tier_->TakeBack(std::move(buffer_));
}

int64_t HostCall::Copy(const at::Tensor& to, const at::Tensor& from) {
  try {
    c10::InferenceMode without_gradients;
    c10::Event ready(copies_.device_type()), done(copies_.device_type());
    ready.record(MachineStream(buffer_.device));
    ready.block(copies_);
    {
      OnStream stream(copies_);
      to.copy_(from, /*non_blocking=*/true);
    }
    done.record(copies_);
    done_.push_back(std::move(done));
  } catch (const c10::Error& error) {
    TVM_FFI_THROW(OffloadError) << "a copy between the device and pinned memory failed: "
                                << error.what_without_backtrace();
  }
  return static_cast<int64_t>(done_.size()) - 1;
}

void HostCall::Wait(int64_t request) {
  if (request <= awaited_) return;
  try {
    done_[request].block(MachineStream(buffer_.device));
  } catch (const c10::Error& error) {
    TVM_FFI_THROW(OffloadError) << "the device cannot wait for a copy: "
                                << error.what_without_backtrace();
  }
  awaited_ = request;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::ObjectDef<HostTier>(refl::init(false));
  refl::GlobalDef().def(
      "relax_disc.host_tier",
      [](double write_bytes_per_ns, double read_bytes_per_ns, int64_t latency_ns, bool recompute) {
        TierModel figures{write_bytes_per_ns, read_bytes_per_ns, latency_ns, Tier::kLeastBytes};
        figures.queue = INT64_MAX;  // the caller does not wait for a place in it
        figures.recompute = recompute;
        return ffi::ObjectRef(ffi::make_object<HostTier>(figures));
      });
}

}  // namespace relax_disc
