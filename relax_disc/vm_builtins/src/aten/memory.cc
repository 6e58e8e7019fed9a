#include "aten/memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace relax_disc {
namespace {

constexpr uint8_t kAllocatorPriority = 100;  // above PyTorch's own allocators

std::atomic<int64_t> last_peak{0}, last_pieces{0};
thread_local AtenScope* scope = nullptr;
c10::Allocator* own = nullptr;  // PyTorch's, which we stand before

void Delete(void* block) {
  if (scope == nullptr || !scope->Free(block)) own->raw_deallocate(block);
}

/*! \brief Stands before PyTorch's allocator: threads without a scope get what they always got. */
struct ScopedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (scope == nullptr) return own->allocate(bytes);
    void* block = scope->Allocate(static_cast<int64_t>(bytes));
    return {block, block, &Delete, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

void Install() {
  static std::once_flag once;
  std::call_once(once, [] {
    static ScopedAllocator allocator;
    own = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator, kAllocatorPriority);
  });
}

c10::ScalarType ElementOf(DLDataType dtype) {
  const int code = dtype.code, bits = dtype.bits;
  if (code == kDLFloat && bits == 32) return c10::kFloat;
  if (code == kDLFloat && bits == 64) return c10::kDouble;
  if (code == kDLFloat && bits == 16) return c10::kHalf;
  if (code == kDLBfloat && bits == 16) return c10::kBFloat16;
  if (code == kDLInt && bits == 64) return c10::kLong;
  if (code == kDLInt && bits == 32) return c10::kInt;
  if (code == kDLInt && bits == 16) return c10::kShort;
  if (code == kDLInt && bits == 8) return c10::kChar;
  if (code == kDLBool || (code == kDLUInt && bits == 1)) return c10::kBool;
  if (code == kDLUInt && bits == 8) return c10::kByte;
  TVM_FFI_THROW(TypeError) << "PyTorch has no elements of code " << code << " with " << bits
                           << " bits";
  throw;  // not reached
}

}  // namespace

AtenScope::AtenScope(int64_t bytes, const at::Tensor& result, bool at_once)
    : base_(bytes > 0 ? workspace_.Take<char>(bytes) : nullptr),
      bytes_(PieceBytes(bytes)),
      result_(result.data_ptr()),
      result_bytes_(static_cast<int64_t>(result.nbytes())),
      result_taken_(!at_once),
      outer_(scope) {
  Install();
  scope = this;
}

AtenScope::~AtenScope() {
  scope = outer_;
  last_peak = peak_;
  last_pieces = most_pieces_;
}

void* AtenScope::Allocate(int64_t bytes) {
  if (bytes == 0) return nullptr;
  if (bytes == result_bytes_ && !result_taken_) {
    result_taken_ = true;
    return result_;
  }
  bytes = PieceBytes(bytes);
  int64_t offset = 0;  // the first gap that is large enough
  size_t place = 0;
  while (place < pieces_.size() && pieces_[place].offset - offset < bytes) {
    offset = pieces_[place].offset + pieces_[place].bytes;
    ++place;
  }
  if (offset + bytes > bytes_) {
    CountOverflow(offset + bytes - bytes_);
    peak_ = std::max(peak_, offset + bytes);
    return own->raw_allocate(bytes);
  }
  pieces_.insert(pieces_.begin() + place, {offset, bytes});
  peak_ = std::max(peak_, offset + bytes);
  most_pieces_ = std::max(most_pieces_, static_cast<int64_t>(pieces_.size()));
  return base_ + offset;
}

bool AtenScope::Free(void* block) {
  if (block == nullptr) return true;
  if (block == result_) {
    result_taken_ = false;
    return true;
  }
  const int64_t offset = static_cast<char*>(block) - base_;
  for (auto piece = pieces_.begin(); base_ != nullptr && piece != pieces_.end(); ++piece) {
    if (piece->offset != offset) continue;
    pieces_.erase(piece);
    return true;
  }
  return false;
}

at::Tensor AtenView(TensorView view) {
  char* data = static_cast<char*>(view.data_ptr()) + view.byte_offset();
  const c10::DeviceType type = view.device().device_type == kDLCPU ? c10::kCPU : c10::kCUDA;
  const c10::Device device(type, type == c10::kCPU ? -1 : view.device().device_id);
  return at::for_blob(data, {view.shape().data(), static_cast<size_t>(view.ndim())})
      .options(at::TensorOptions().dtype(ElementOf(view.dtype())).device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor ChannelsFirst(TensorView view) {
  at::Tensor stored = AtenView(view);
  if (view.ndim() == 3) stored = stored.unsqueeze(1);
  std::vector<int64_t> axes{0, stored.dim() - 1};
  for (int64_t axis = 1; axis + 1 < stored.dim(); ++axis) axes.push_back(axis);
  return stored.permute(axes);
}

void Deliver(const at::Tensor& value, const at::Tensor& result) {
  const bool there = value.const_data_ptr() == result.const_data_ptr();
  // An extent of one may have any stride.
  bool same = there && value.sizes() == result.sizes();
  for (int64_t axis = 0; same && axis < value.dim(); ++axis) {
    same = value.size(axis) == 1 || value.stride(axis) == result.stride(axis);
  }
  if (same) return;
  if (there) {  // the right memory, another order of axes
    result.copy_(value.clone());
  } else {
    result.copy_(value);
  }
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.aten_last_bytes",  // what the call before took, of any thread; for tests
           []() -> int64_t { return last_peak; })
      .def("relax_disc.cpu.aten_last_pieces",  // how many allocations it had at one time
           []() -> int64_t { return last_pieces; });
}

}  // namespace relax_disc
