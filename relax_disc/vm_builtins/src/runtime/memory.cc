#include "runtime/memory.h"

#include <sys/mman.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

std::atomic<int64_t> allocation_countdown{-1};
std::atomic<int64_t> allocated_bytes{0};

bool FailsNow() {
  if (allocation_countdown.load() < 0) return false;
  return allocation_countdown.fetch_sub(1) == 0;
}

[[noreturn]] void Refuse(int64_t bytes) {
  TVM_FFI_THROW(OutOfMemoryError) << "the system has no " << bytes
                             << " bytes for the memory of this call; nothing was changed. Lower "
                                "the memory budget or the size of the batch.";
  throw;  // not reached: the line above throws
}

// Below this a mapping costs more than it gives back: results such as a loss.
constexpr int64_t kSmallBytes = 1 << 17;

// x86-64 and most of aarch64; elsewhere the alignment is of no use and does no harm.
constexpr int64_t kHugePage = 1 << 21;
constexpr int64_t kPage = 1 << 12;

/*! \brief Address space for `bytes` from a multiple of the huge page on; null if there is none. */
char* ReserveAligned(int64_t bytes) {
  const int64_t wanted = RoundUp(bytes, kPage) + kHugePage;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* found = mmap(nullptr, wanted, PROT_NONE, flags, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(found);
  const int64_t before = -reinterpret_cast<int64_t>(start) & (kHugePage - 1);
  if (before > 0) munmap(start, before);
  if (before < kHugePage) munmap(start + wanted - (kHugePage - before), kHugePage - before);
  return start + before;
}

/*! \brief Ask for huge pages; where the system has none, nothing changes. */
void AdviseHuge(char* base, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(base, RoundUp(bytes, kPage), MADV_HUGEPAGE);
#else
  (void)base;
  (void)bytes;
#endif
}

char* Map(int64_t bytes, Backing backing) {
  if (FailsNow()) Refuse(bytes);
  if (backing == Backing::kReserved) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* result = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
    if (result == MAP_FAILED) Refuse(bytes);
    return static_cast<char*>(result);
  }
  char* place = bytes >= kHugePage ? ReserveAligned(bytes) : nullptr;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (place != nullptr ? MAP_FIXED : 0);
  void* result = mmap(place, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (result == MAP_FAILED) {
    if (place != nullptr) munmap(place, RoundUp(bytes, kPage));
    Refuse(bytes);
  }
  AdviseHuge(static_cast<char*>(result), bytes);
  return static_cast<char*>(result);
}

/*! \brief Change the size of a mapping; pages that were touched stay.  Null if the system refuses. */
char* Remap(char* base, int64_t bytes, int64_t wanted) {
#ifdef MREMAP_MAYMOVE
  if (wanted > bytes && FailsNow()) return nullptr;
  char* place = wanted > bytes && wanted >= kHugePage ? ReserveAligned(wanted) : nullptr;
  void* moved = place != nullptr
                    ? mremap(base, bytes, wanted, MREMAP_MAYMOVE | MREMAP_FIXED, place)
                    : mremap(base, bytes, wanted, MREMAP_MAYMOVE);
  if (moved == MAP_FAILED) {
    if (place != nullptr) munmap(place, RoundUp(wanted, kPage));
    return nullptr;
  }
  AdviseHuge(static_cast<char*>(moved), wanted);
  return static_cast<char*>(moved);
#else
  char* fresh = Map(wanted, Backing::kReal);
  munmap(base, bytes);
  return fresh;
#endif
}

char* AllocateSmall(int64_t bytes) {
  void* result = FailsNow() ? nullptr : std::aligned_alloc(64, RoundUp(bytes, 64));
  if (result == nullptr) Refuse(bytes);
  return static_cast<char*>(result);
}

struct BlockView {
  BlockPtr block;
  void AllocData(DLTensor* tensor, int64_t offset) { tensor->data = block->base() + offset; }
  void FreeData(DLTensor*) {}
};

struct TensorView {
  ffi::Tensor base;
  void AllocData(DLTensor* tensor) {
    tensor->data = static_cast<char*>(base.data_ptr()) + base.byte_offset();
  }
  void FreeData(DLTensor*) {}
};

}  // namespace

BlockPtr MemoryBlock::Allocate(DLDevice device, int64_t bytes, Backing backing) {
  BlockPtr block = ffi::make_object<MemoryBlock>();
  block->device_ = device;
  block->backing_ = backing;
  if (bytes > 0) {
    block->small_ = device.device_type == kDLCPU && backing == Backing::kReal && bytes < kSmallBytes;
    if (block->small_) {
      block->base_ = AllocateSmall(bytes);
    } else if (device.device_type == kDLCPU || backing == Backing::kReserved) {
      block->base_ = Map(bytes, backing);
    } else {
      block->AllocateOnDevice(bytes);
    }
    block->bytes_ = bytes;
    allocated_bytes += bytes;
  }
  return block;
}

MemoryBlock::~MemoryBlock() {
  Free();
  allocated_bytes -= bytes_;
}

void MemoryBlock::Free() {
  if (small_) {
    std::free(base_);
  } else if (bytes_ > 0 && !owner_.defined()) {
    munmap(base_, bytes_);
  }
  base_ = nullptr;
  small_ = false;
}

void MemoryBlock::AllocateOnDevice(int64_t bytes) {
  if (FailsNow()) Refuse(bytes);
  // Not kept in a static: it is Python's, which has ended when statics are destroyed.
  const ffi::Function allocate = ffi::Function::GetGlobalRequired("relax_disc.device_allocate");
  ffi::Tensor owner = allocate(device_, bytes).cast<ffi::Tensor>();
  base_ = static_cast<char*>(owner.data_ptr()) + owner.byte_offset();
  owner_ = owner;
}

void MemoryBlock::Resize(int64_t bytes) {
  if (bytes == bytes_) return;
  if (device_.device_type != kDLCPU && backing_ == Backing::kReal) {
    Free();
    owner_ = ffi::ObjectRef();
    allocated_bytes -= std::exchange(bytes_, 0);
    if (bytes > 0) AllocateOnDevice(bytes);
  } else if (bytes_ == 0 || bytes == 0 || small_ || backing_ == Backing::kReserved) {
    char* fresh = bytes > 0 ? Map(bytes, backing_) : nullptr;
    Free();
    base_ = fresh;
  } else {
    // A longer batch pays only for its new pages.
    char* moved = Remap(base_, bytes_, bytes);
    if (moved == nullptr) Refuse(bytes);
    base_ = moved;
  }
  allocated_bytes += bytes - bytes_;
  bytes_ = bytes;
}

ffi::Tensor ViewOfBlock(const BlockPtr& block, int64_t offset, const std::vector<int64_t>& shape,
                        DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(BlockView{block}, ffi::ShapeView(shape.data(), shape.size()), dtype, block->device(), offset);
}

ffi::Tensor ViewOfTensor(const ffi::Tensor& base, const std::vector<int64_t>& shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(TensorView{base}, ffi::ShapeView(shape.data(), shape.size()), dtype, base.device());
}

void FailAllocation(int64_t countdown) { allocation_countdown = countdown; }

int64_t AllocatedBytes() { return allocated_bytes; }

void CopyBytes(const ffi::Tensor& from, const ffi::Tensor& to) {
  const char* source = static_cast<char*>(from.data_ptr()) + from.byte_offset();
  char* target = static_cast<char*>(to.data_ptr()) + to.byte_offset();
  size_t bytes = ffi::GetDataSize(*from.GetDLTensorPtr());
  if (source == target || bytes == 0) return;
  if (from.device().device_type == kDLCPU) {
    std::memmove(target, source, bytes);
    return;
  }
  // Whole tensors, not views by address: PyTorch takes them over.
  ffi::Function::GetGlobalRequired("relax_disc.device_copy")(from, to);
}

}  // namespace relax_disc
