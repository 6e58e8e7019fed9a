// The number of threads of parallel regions.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>

#include "parallel.h"

namespace relax_disc {

static std::atomic<int> num_threads{1};

int NumThreads() { return num_threads.load(std::memory_order_relaxed); }

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("relax_disc.cpu.thread_count", []() -> int64_t { return NumThreads(); })
      .def("relax_disc.cpu.set_thread_count",
           [](int64_t count) { num_threads = static_cast<int>(std::max<int64_t>(count, 1)); });
}

}  // namespace relax_disc
