// One thread pool for everything: TVM's, through its C interface.
#ifndef RELAX_DISC_PARALLEL_H_
#define RELAX_DISC_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

extern "C" {
typedef struct {
  void* sync_handle;
  int32_t num_task;
} RelaxDiscParallelEnv;
// Declared here as in tvm/runtime/c_backend_api.h: that header pulls in the whole runtime.
int TVMBackendParallelLaunch(int (*task)(int, RelaxDiscParallelEnv*, void*), void* data,
                             int num_task);
}

namespace relax_disc {

/*! \brief Threads of TVM's pool. */
int PoolThreads();

/*! \brief Threads that a parallel region uses: all of TVM's pool unless set otherwise. */
int NumThreads();

namespace detail {
template <typename F>
struct Region {
  const F* body;
  std::exception_ptr error;
  std::mutex guard;

  static int Task(int index, RelaxDiscParallelEnv* env, void* data) {
    Region* self = static_cast<Region*>(data);
    try {
      (*self->body)(index, static_cast<int>(env->num_task));
    } catch (...) {
      std::lock_guard<std::mutex> lock(self->guard);
      self->error = std::current_exception();
    }
    return 0;
  }
};
}  // namespace detail

/*! \brief Run body(thread index, number of threads) on `tasks` threads; exceptions come back. */
template <typename F>
void ParallelRegion(int tasks, const F& body) {
  tasks = std::min(tasks, NumThreads());
  if (tasks <= 1) {
    body(0, 1);
    return;
  }
  detail::Region<F> region{&body, nullptr, {}};
  TVMBackendParallelLaunch(&detail::Region<F>::Task, &region, tasks);
  if (region.error) std::rethrow_exception(region.error);
}

/*!
 * \brief Run body(i, thread index) for i in [0, count): threads take the next i as they are free.
 *
 * Which thread runs an index varies, so body must compute the same whoever runs it; at most
 * `threads` have an index, from 0 on.
 */
template <typename F>
void ParallelFor(int64_t count, int threads, const F& body) {
  int tasks = static_cast<int>(std::min<int64_t>(count, std::min(threads, NumThreads())));
  if (tasks <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  ParallelRegion(tasks, [&](int thread, int) {
    for (int64_t i = next++; i < count; i = next++) body(i, thread);
  });
}

/*! \brief Run body(i) for i in [0, count) on all threads. */
template <typename F>
void ParallelFor(int64_t count, const F& body) {
  ParallelFor(count, NumThreads(), [&](int64_t i, int) { body(i); });
}

}  // namespace relax_disc

#endif  // RELAX_DISC_PARALLEL_H_
