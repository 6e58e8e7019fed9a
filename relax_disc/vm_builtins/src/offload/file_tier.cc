#include "offload/file_tier.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "offload/file_calls.h"

namespace relax_disc {

namespace {

// Offsets and lengths of transfers past the page cache are multiples of this.
constexpr int64_t kBlock = 4096;
// What is written and read to learn the speeds, and how often a block is, to learn the latency.
constexpr int64_t kMeasuredBytes = 1 << 24;
constexpr int kMeasuredBlocks = 9;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string Reason(int number) { return std::strerror(number); }

// To two digits, so that measuring again mostly gives the same plans.
double Rounded(double value) {
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 1);
  return std::round(value / unit) * unit;
}

}  // namespace

FileTier::FileTier(TierOptions options) : options_(std::move(options)) {
  CheckFolder(options_.folder);
}

FileTier::~FileTier() {
  if (file_ >= 0) close(file_);
  if (!name_.empty() && !thread_.forked()) unlink(name_.c_str());
}

void FileTier::Open() {
  if (thread_.forked()) {
    FailOffload("a process that was forked uses the offload folder of its parent; compile there again.");
  }
  if (buffer_ == nullptr) {
    buffer_ = MemoryBlock::Allocate({kDLCPU, 0}, kBufferBytes, Backing::kReal);
  }
  if (file_ < 0) {
    NamelessFile file = OpenNameless(options_.folder, true);
    if (file.descriptor < 0) {
      FailOffload("no file can be made in the offload folder " + options_.folder + ": " +
           Reason(errno) + ". Nothing was changed.");
    }
    file_ = file.descriptor;
    direct_ = file.direct;
    name_ = file.name;
  }
}

void FileTier::Grow(int64_t bytes) {
  if (bytes <= file_bytes_) return;
  const int error = ReserveFile(file_, bytes);
  if (error != 0) {
    FailOffload("the offload folder " + options_.folder + " has no " + std::to_string(bytes) +
         " bytes for this call: " + Reason(error) +
         ". Nothing was changed. Free space there, name another folder, or raise the budget.");
  }
  file_bytes_ = bytes;
}

TierModel FileTier::Figures() {
  std::lock_guard<std::mutex> once(measuring_);
  if (!known_) {
    figures_.least_bytes = kLeastBytes;
    figures_.queue = RequestThread::kQueue;
    figures_.recompute = options_.recompute;
    figures_.buffer_bytes = kBufferBytes;
    figures_.write_bytes_per_ns = figures_.read_bytes_per_ns = options_.bytes_per_s / 1e9;
    if (options_.bytes_per_s <= 0) Measure();
    known_ = true;
  }
  return figures_;
}

void FileTier::Measure() {
  std::unique_ptr<FileCall> call = Begin(kMeasuredBytes);
  std::vector<char> data(kMeasuredBytes, 1);
  const auto time = [&](bool is_read, int64_t bytes) {
    const int64_t start = Now();
    call->Wait(is_read ? call->Read(data.data(), bytes, 0) : call->Write(data.data(), bytes, 0));
    return Now() - start;
  };
  time(false, kMeasuredBytes);  // the first writing also finds the blocks
  const double bytes = static_cast<double>(kMeasuredBytes);
  figures_.write_bytes_per_ns = Rounded(bytes / static_cast<double>(time(false, kMeasuredBytes)));
  figures_.read_bytes_per_ns = Rounded(bytes / static_cast<double>(time(true, kMeasuredBytes)));
  std::vector<int64_t> latencies;
  for (int i = 0; i < kMeasuredBlocks; ++i) {
    latencies.push_back((time(false, kBlock) + time(true, kBlock)) / 2);
  }
  std::nth_element(latencies.begin(), latencies.begin() + kMeasuredBlocks / 2, latencies.end());
  figures_.latency_ns =
      static_cast<int64_t>(Rounded(static_cast<double>(latencies[kMeasuredBlocks / 2])));
}

std::unique_ptr<TierCall> FileTier::Begin(const MemoryBlock& arena, int64_t bytes) {
  if (arena.device().device_type != kDLCPU) {
    FailOffload("tensors of a GPU cannot be offloaded to a folder; set offload_to to \"host\".");
  }
  return Begin(bytes);
}

std::unique_ptr<FileCall> FileTier::Begin(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Open();
  int64_t start = 0;
  for (const auto& [offset, taken] : parts_) {  // the lowest gap; most often there is one call
    if (start + bytes <= offset) break;
    start = std::max(start, offset + taken);
  }
  Grow(start + bytes);
  parts_[start] = bytes;
  return std::make_unique<FileCall>(this, start);
}

FileCall::~FileCall() {
  tier_->thread_.WaitFor(last_request_);
  std::lock_guard<std::mutex> lock(tier_->mutex_);
  tier_->parts_.erase(offset_);
}

int64_t FileCall::Write(char* from, int64_t bytes, int64_t slot) {
  return tier_->Submit({this, from, bytes, slot, false, Now()});
}

int64_t FileCall::Read(char* to, int64_t bytes, int64_t slot) {
  return tier_->Submit({this, to, bytes, slot, true, Now()});
}

void FileCall::Wait(int64_t request) {
  tier_->thread_.WaitFor(request);
  std::lock_guard<std::mutex> lock(tier_->mutex_);
  if (!failure_.empty()) FailOffload(failure_);
}

int64_t FileTier::Submit(Request request) {
  request.call->last_request_ = thread_.Submit([this, request] { Serve(request); });
  return request.call->last_request_;
}

void FileTier::Serve(const Request& request) {
  std::string failure;
  try {
    if (request.call->failure_.empty()) Move(request);  // only this thread writes it
    if (options_.paced) Pace(request);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (failure.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  request.call->failure_ = failure;
}

void FileTier::Move(const Request& request) {
  uint64_t sum = 0;
  for (int64_t done = 0; done < request.bytes; done += kBufferBytes) {
    const int64_t bytes = std::min(kBufferBytes, request.bytes - done);
    if (!request.is_read) {
      std::memcpy(buffer_->base(), request.memory + done, bytes);
      sum = Checksum(buffer_->base(), bytes, sum);
    }
    MoveChunk(request, done, RoundUp(bytes, kBlock));
    if (request.is_read) {
      sum = Checksum(buffer_->base(), bytes, sum);
      std::memcpy(request.memory + done, buffer_->base(), bytes);
    }
  }
  uint64_t& written = request.call->checksums_[request.slot];
  if (!request.is_read) {
    written = sum;
  } else if (written != sum) {
    throw std::runtime_error("what was read back from the offload folder " + options_.folder +
                             " is not what was written: the file was changed, or the disk is "
                             "damaged.");
  }
}

// Move what the buffer holds, or will hold, whole blocks.
void FileTier::MoveChunk(const Request& request, int64_t done, int64_t bytes) {
  const int64_t offset = request.call->offset_ + request.slot + done;
  const char* verb = request.is_read ? "read from" : "written to";
  for (int64_t moved = 0; moved < bytes;) {
    char* place = buffer_->base() + moved;
    const int64_t now = request.is_read ? ReadAt(file_, place, bytes - moved, offset + moved)
                                        : WriteAt(file_, place, bytes - moved, offset + moved);
    if (now > 0) {
      moved += now;
    } else if (now < 0 && errno == EINTR) {
      continue;
    } else if (now < 0 && errno == EINVAL && direct_) {
      direct_ = false;  // the file system takes such transfers through its cache only
#ifdef O_DIRECT
      fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) & ~O_DIRECT);
#endif
    } else {
      const std::string reason = now < 0 ? Reason(errno) : "the file ends there";
      throw std::runtime_error(std::to_string(bytes - moved) + " bytes could not be " + verb +
                               " the offload folder " + options_.folder + ": " + reason + ".");
    }
  }
}

void FileTier::Pace(const Request& request) {
  const int64_t start = std::max(paced_until_ns_, request.asked_ns);
  paced_until_ns_ = start + figures_.Time(request.bytes, request.is_read);
  const int64_t rest = paced_until_ns_ - Now();
  if (rest > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(rest));
}

}  // namespace relax_disc
