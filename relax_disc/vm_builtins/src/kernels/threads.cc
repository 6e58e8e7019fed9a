// The number of threads of parallel regions.
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>

#include "kernels/parallel.h"

namespace relax_disc {

static std::atomic<int> num_threads{0};

int PoolThreads() {
  // The pool never changes its size, and plans ask often.
  static const int count = std::max(
      tvm::ffi::Function::GetGlobalRequired("runtime.NumThreads")().cast<int>(), 1);
  return count;
}

int NumThreads() {
  int count = num_threads.load(std::memory_order_relaxed);
  if (count == 0) num_threads = count = PoolThreads();
  return count;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("relax_disc.cpu.thread_count", []() -> int64_t { return NumThreads(); })
      .def("relax_disc.cpu.set_thread_count",  // at most TVM's pool; 0: all of it
           [](int64_t count) {
             num_threads = static_cast<int>(std::clamp<int64_t>(count, 0, PoolThreads()));
           });
}

}  // namespace relax_disc
