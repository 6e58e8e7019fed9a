/*!
 * \file request_thread.h
 * \brief One thread that runs requests in the order in which they were made.
 *
 * A process that was forked has the object, but neither the thread nor what it did.
 */
#ifndef RELAX_DISC_VM_BUILTINS_OFFLOAD_REQUEST_THREAD_H_
#define RELAX_DISC_VM_BUILTINS_OFFLOAD_REQUEST_THREAD_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace relax_disc {

class RequestThread {
 public:
  RequestThread();
  ~RequestThread();

  /*! \brief Requests that may wait. */
  static constexpr int64_t kQueue = 64;

  /*! \brief Whether this is a process that was forked from the one that made the object. */
  bool forked() const;
  /*!
   * \brief Run a function after those asked for so far; waits while the queue is full.
   * \param run Must not throw.
   * \return The request's number.
   */
  int64_t Submit(std::function<void()> run);
  /*! \brief Wait until a request is done. */
  void WaitFor(int64_t request);

 private:
  void Serve();

  // Apart, since a fork must not destroy what a thread that it does not have waits for.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
  };

  const int process_;
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
  std::thread thread_;
  std::deque<std::function<void()>> queue_;
  int64_t asked_ = 0, done_ = 0;
  bool ending_ = false;
};

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_OFFLOAD_REQUEST_THREAD_H_
