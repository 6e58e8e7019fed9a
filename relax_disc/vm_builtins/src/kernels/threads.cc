// The one thread pool of the process: the OpenMP runtime that PyTorch has loaded.
//
// Kernels of TVM's code generator and the library's own run on it.  Two pools would take turns at
// waiting in a loop for work while the other one computes, and TVM's binds the thread that starts it
// to cores, whatever the process was bound to.  libgomp's own interface is called: compiling with
// -fopenmp would link the compiler's runtime beside PyTorch's.
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/parallel.h"

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_dynamic(void);
int omp_get_initial_device(void);
int omp_get_max_active_levels(void);
int omp_get_num_threads(void);
int omp_get_thread_limit(void);
int omp_get_thread_num(void);
int omp_in_parallel(void);
int omp_pause_resource(int kind, int device);
void omp_set_dynamic(int is_dynamic);
}

namespace at {
int get_num_threads();  // as in ATen/Parallel.h, which needs C++20
}

namespace relax_disc {
namespace {

/*! \brief As in tvm/runtime/c_backend_api.h, which pulls in the whole runtime. */
struct TVMParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};
using Task = int (*)(int index, TVMParallelGroupEnv* env, void* data);

constexpr int kPauseHard = 2;  // omp_pause_hard
thread_local bool has_team = false;
thread_local bool is_serial = false;

/*! \brief A region whose body returns a status, as TVM's kernels do. */
struct KernelRegion {
  Task task;
  void* data;
  Barrier barrier;
  std::atomic<bool> failed{false};
  std::atomic<TVMFFIObjectHandle> error{nullptr};

  static void Run(void* self, int index, int tasks) {
    auto* region = static_cast<KernelRegion*>(self);
    TVMParallelGroupEnv env{&region->barrier, tasks};
    if (region->task(index, &env, region->data) == 0) return;
    region->failed = true;
    // An error is kept by the thread that raised it: hand it to the one that launched.
    TVMFFIObjectHandle raised = nullptr, none = nullptr;
    TVMFFIErrorMoveFromRaised(&raised);
    if (raised != nullptr && !region->error.compare_exchange_strong(none, raised)) {
      TVMFFIObjectDecRef(raised);
    }
  }
  bool Failed() {
    if (TVMFFIObjectHandle raised = error) {
      TVMFFIErrorSetRaised(raised);
      TVMFFIObjectDecRef(raised);
    }
    return failed;
  }
};

/*! \brief In place of TVM's function of that name; `count` 0 asks for every thread. */
int BackendParallelLaunch(Task task, void* data, int count) {
  TVM_FFI_SAFE_CALL_BEGIN();
  const int threads = LoopThreads();
  const int tasks = count <= 0 ? threads : std::min(count, threads);
  KernelRegion region{task, data, Barrier(tasks)};
  LaunchTasks(&KernelRegion::Run, &region, tasks);
  if (region.Failed()) return -1;
  TVM_FFI_SAFE_CALL_END();
}

int BackendParallelBarrier(int, TVMParallelGroupEnv* env) {
  static_cast<Barrier*>(env->sync_handle)->Wait();
  return 0;
}

/*!
 * \brief Before a fork: end the team of threads that the forking thread has used.
 *
 * Threads do not go along into the child, where the runtime would wait for them for ever.  The next
 * region, here or there, starts a new team.
 */
void ReleaseTeam() {
  if (has_team && !omp_in_parallel()) omp_pause_resource(kPauseHard, omp_get_initial_device());
  has_team = false;
}

const bool is_installed = [] {
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelLaunch",
                                    reinterpret_cast<void*>(&BackendParallelLaunch));
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelBarrier",
                                    reinterpret_cast<void*>(&BackendParallelBarrier));
  pthread_atfork(&ReleaseTeam, nullptr, nullptr);
  return true;
}();

}  // namespace

int NumThreads() {
  if (omp_in_parallel() || omp_get_max_active_levels() < 1) return 1;
  return std::max(1, std::min(at::get_num_threads(), omp_get_thread_limit()));
}

SerialScope::SerialScope(bool serial) : was_serial_(std::exchange(is_serial, serial)) {}
SerialScope::~SerialScope() { is_serial = was_serial_; }

int LoopThreads() { return is_serial ? 1 : NumThreads(); }

void LaunchTasks(void (*body)(void*, int, int), void* data, int tasks) {
  if (tasks == 1) {
    body(data, 0, 1);
    return;
  }
  struct Region {
    void (*body)(void*, int, int);
    void* data;
    int tasks;
    std::atomic<bool> is_short;  // fewer threads than tasks, which may wait for each other
    static void Run(void* self) {
      auto* region = static_cast<Region*>(self);
      if (omp_get_num_threads() != region->tasks) {
        region->is_short = true;
      } else {
        region->body(region->data, omp_get_thread_num(), region->tasks);
      }
    }
  } region{body, data, tasks, false};
  const int is_dynamic = omp_get_dynamic();  // then the runtime may start fewer threads
  if (is_dynamic) omp_set_dynamic(0);
  has_team = true;
  GOMP_parallel(&Region::Run, &region, static_cast<unsigned>(tasks), 0);
  if (is_dynamic) omp_set_dynamic(is_dynamic);
  if (region.is_short) {
    TVM_FFI_THROW(InternalError) << "the OpenMP runtime starts fewer than " << tasks << " threads";
  }
}

}  // namespace relax_disc
