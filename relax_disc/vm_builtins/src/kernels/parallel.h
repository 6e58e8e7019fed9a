// Parallel regions on the one thread pool of the process: PyTorch's.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PARALLEL_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace relax_disc {

/*! \brief Threads of a parallel region: `torch.get_num_threads()` of the caller; 1 inside a region. */
int NumThreads();

/*!
 * \brief While it lives, loops of small work run on the calling thread alone.
 *
 * Waking another thread takes some microseconds, and until that has a core, if others keep it busy.
 * What is computed does not depend on it.  Teams that wait for each other are not affected.
 */
class SerialScope {
 public:
  explicit SerialScope(bool is_serial);
  ~SerialScope();
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;

 private:
  bool was_serial_;
};

/*! \brief Threads of a loop: `NumThreads()`, or 1 inside a `SerialScope`. */
int LoopThreads();

/*!
 * \brief Run body(data, index, tasks) for every index at the same time; it must not throw.
 * \param tasks At most `NumThreads()`.
 */
void LaunchTasks(void (*body)(void* data, int index, int tasks), void* data, int tasks);

/*! \brief Barrier of the threads of one parallel region. */
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void Wait() {
    if (count_ == 1) return;
    int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
      if (spins > 4096) std::this_thread::yield();
    }
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<int> generation_{0};
};

namespace detail {
template <typename F>
struct Region {
  const F* body;
  std::exception_ptr error;
  std::mutex guard;

  static void Task(void* data, int index, int tasks) {
    Region* self = static_cast<Region*>(data);
    try {
      (*self->body)(index, tasks);
    } catch (...) {
      std::lock_guard<std::mutex> lock(self->guard);
      self->error = std::current_exception();
    }
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
  LaunchTasks(&detail::Region<F>::Task, &region, tasks);
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
  int tasks = static_cast<int>(std::min<int64_t>(count, std::min(threads, LoopThreads())));
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

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PARALLEL_H_
