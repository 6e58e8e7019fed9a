#include "offload/state_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "offload/file_calls.h"
#include "runtime/memory.h"

namespace relax_disc {

StateFile::StateFile(std::string folder) : folder_(std::move(folder)) {
  CheckFolder(folder_);
  NamelessFile file = OpenNameless(folder_, false);
  if (file.descriptor < 0) {
    FailOffload("no file can be made in the offload folder " + folder_ + ": " + std::strerror(errno) +
         ". Nothing was changed.");
  }
  file_ = file.descriptor;
  name_ = file.name;
}

StateFile::~StateFile() {
  for (const auto& [memory, part] : parts_) {
    if (!thread_.forked()) munmap(memory, part.bytes);
  }
  if (file_ >= 0) close(file_);
  if (!name_.empty() && !thread_.forked()) unlink(name_.c_str());
}

int64_t StateFile::TakePart(int64_t bytes) {
  auto found = free_.find(bytes);
  if (found != free_.end()) {
    const int64_t offset = found->second;
    free_.erase(found);
    return offset;
  }
  const int error = ReserveFile(file_, file_bytes_ + bytes);
  if (error != 0) {
    FailOffload("the offload folder " + folder_ + " has no " + std::to_string(file_bytes_ + bytes) +
         " bytes for the optimizer's state: " + std::strerror(error) +
         ". Nothing was changed. Free space there, or name another folder.");
  }
  file_bytes_ += bytes;
  return file_bytes_ - bytes;
}

char* StateFile::Allocate(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (thread_.forked()) {
    FailOffload("a process that was forked uses the offload folder of its parent; compile there again.");
  }
  const int64_t size = RoundUp(std::max<int64_t>(bytes, 1), kPage);
  const int64_t offset = TakePart(size);
  char* memory = MapFile(file_, size, offset);
  if (memory == nullptr) {
    free_.emplace(size, offset);
    FailOffload("the file of the offload folder " + folder_ + " cannot be mapped: " +
         std::strerror(errno) + ". Nothing was changed.");
  }
  parts_[memory] = Part{offset, size};
  return memory;
}

void StateFile::Free(char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = parts_.find(memory);
  if (found == parts_.end() || thread_.forked()) return;
  munmap(memory, found->second.bytes);
  free_.emplace(found->second.bytes, found->second.offset);
  parts_.erase(found);
}

bool StateFile::Holds(const void* memory, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = parts_.find(static_cast<char*>(const_cast<void*>(memory)));
  return found != parts_.end() && bytes <= found->second.bytes;
}

void StateFile::Forget(char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = parts_.find(memory);
  if (found != parts_.end()) found->second.is_known = found->second.is_changed = false;
}

int64_t StateFile::Bring(StateCall* call, char* memory, int64_t bytes) {
  return Submit(call, memory, bytes, true);
}

int64_t StateFile::PutAway(StateCall* call, char* memory, int64_t bytes) {
  return Submit(call, memory, bytes, false);
}

int64_t StateFile::Submit(StateCall* call, char* memory, int64_t bytes, bool is_in) {
  const int64_t size = RoundUp(bytes, kPage);
  call->last_request = thread_.Submit([this, call, memory, bytes, size, is_in] {
    const std::string failure = is_in ? BringNow(memory, bytes) : PutAwayNow(memory, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    call->bytes += is_in ? size : -size;
    call->peak_bytes = std::max(call->peak_bytes, call->bytes);
    if (call->failure.empty()) call->failure = failure;
  });
  return call->last_request;
}

std::string StateFile::BringNow(char* memory, int64_t bytes) {
  const int64_t size = RoundUp(bytes, kPage);
  const bool was_used = HasPages(memory, size);
  const int error = BringPages(memory, size);
  const uint64_t checksum = error == 0 ? Checksum(memory, bytes, 0) : 0;
  std::lock_guard<std::mutex> lock(mutex_);
  Part& part = parts_.at(memory);
  part.is_there = error == 0;
  if (error != 0) return Failure(bytes, std::string("could not be read: ") + std::strerror(error));
  if (part.is_known && checksum != part.checksum && (part.is_changed || !was_used)) {
    part.is_changed = true;
    return Failure(bytes, "are not what was written: the file was changed, or the disk is damaged; "
                          "load the optimizer's state again");
  }
  return "";
}

std::string StateFile::PutAwayNow(char* memory, int64_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  Part& part = parts_.at(memory);  // nobody frees it during a request
  const bool is_right = part.is_there && !part.is_changed;
  lock.unlock();
  const uint64_t checksum = is_right ? Checksum(memory, bytes, 0) : 0;
  const int error = PutPagesAway(memory, RoundUp(bytes, kPage));
  lock.lock();
  if (is_right) {
    part.checksum = checksum;
    part.is_known = error == 0;
  }
  if (error != 0) return Failure(bytes, std::string("could not be written: ") + std::strerror(error));
  return "";
}

std::string StateFile::Failure(int64_t bytes, const std::string& what) const {
  return std::to_string(bytes) + " bytes of the optimizer's state in the offload folder " + folder_ +
         " " + what + ".";
}

void StateFile::Wait(StateCall* call, int64_t request) {
  thread_.WaitFor(request);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!call->failure.empty()) FailOffload(call->failure);
}

void StateFile::Finish(StateCall* call) { thread_.WaitFor(call->last_request); }

}  // namespace relax_disc
