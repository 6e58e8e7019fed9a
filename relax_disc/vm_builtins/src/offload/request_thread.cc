#include "offload/request_thread.h"

#include <unistd.h>

#include <utility>

namespace relax_disc {

RequestThread::RequestThread() : process_(static_cast<int>(getpid())) {}

RequestThread::~RequestThread() {
  if (forked()) {
    if (thread_.joinable()) thread_.detach();
    static_cast<void>(shared_.release());
  } else if (thread_.joinable()) {
    {
      std::lock_guard<std::mutex> lock(shared_->mutex);
      ending_ = true;
    }
    shared_->changed.notify_all();
    thread_.join();
  }
}

bool RequestThread::forked() const { return process_ != static_cast<int>(getpid()); }

int64_t RequestThread::Submit(std::function<void()> run) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
  shared_->changed.wait(lock, [&] { return asked_ - done_ < kQueue; });
  queue_.push_back(std::move(run));
  const int64_t request = ++asked_;
  lock.unlock();
  shared_->changed.notify_all();
  return request;
}

void RequestThread::WaitFor(int64_t request) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return done_ >= request; });
}

// Body of the thread.
void RequestThread::Serve() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    shared_->changed.wait(lock, [&] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> run = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run();
    lock.lock();
    ++done_;
    shared_->changed.notify_all();
  }
}

}  // namespace relax_disc
