// Scratch memory of the library kernels and its account.
#include "scratch.h"

#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace relax_disc {

static std::atomic<int64_t> held_bytes{0};

Scratch::~Scratch() {
  std::free(data_);
  held_bytes -= bytes_;
}

void* Scratch::Reserve(int64_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > bytes_) {
    std::free(data_);
    held_bytes -= bytes_;
    bytes_ = 0;
    data_ = std::aligned_alloc(64, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
    held_bytes += bytes_ = bytes;
  }
  return data_;
}

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("relax_disc.cpu.scratch_bytes",
                                        []() -> int64_t { return held_bytes; });
}

}  // namespace relax_disc
