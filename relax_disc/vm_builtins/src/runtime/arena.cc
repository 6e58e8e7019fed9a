#include "runtime/arena.h"

#include <algorithm>
#include <cstring>

namespace relax_disc {

namespace {

// Calls in a row that leave half of the arena unused before the rest is given back: one long batch
// in 64 keeps it, a phase of short ones does not.
constexpr int64_t kIdleCalls = 64;

void Fit(BlockPtr* block, DLDevice device, int64_t bytes) {
  const bool same_device = *block != nullptr &&
                           (*block)->device().device_type == device.device_type &&
                           (*block)->device().device_id == device.device_id;
  if (same_device) {
    (*block)->Resize(bytes);
  } else {
    *block = nullptr;  // the old one first: never both
    *block = MemoryBlock::Allocate(device, bytes, Backing::kReal);
  }
}

}  // namespace

bool SharedArena::Take(const ArenaNeed& need, BlockPtr* arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (taken_) return false;
  // What is held may be larger than this call needs, unless that breaks its budget.
  int64_t least = std::max(need.arena_bytes, Held());
  if (IsIdle(need.arena_bytes)) least = idle_need_;
  if (need.room_bytes >= 0 && least > need.room_bytes) least = need.arena_bytes;
  Fit(&arena_, need.device, least);
  *arena = arena_;
  taken_ = true;
  return true;
}

void SharedArena::Return() {
  std::lock_guard<std::mutex> lock(mutex_);
  taken_ = false;
}

bool SharedArena::IsIdle(int64_t needed_bytes) {
  const bool is_small = arena_ != nullptr && needed_bytes <= arena_->bytes() / 2;
  idle_calls_ = is_small ? idle_calls_ + 1 : 0;
  idle_need_ = is_small ? std::max(idle_need_, needed_bytes) : 0;
  if (idle_calls_ < kIdleCalls) return false;
  idle_calls_ = 0;
  return true;
}

int64_t SharedArena::Held() const { return arena_ == nullptr ? 0 : arena_->bytes(); }

int64_t SharedArena::held_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Held();
}

std::vector<int64_t> SharedArena::place() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (arena_ == nullptr) return {0, 0};
  return {reinterpret_cast<int64_t>(arena_->base()), arena_->bytes()};
}

void SharedArena::Fill(uint8_t byte) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (arena_ == nullptr || taken_ || arena_->device().device_type != kDLCPU) return;
  std::memset(arena_->base(), byte, arena_->bytes());
}

void SharedArena::GiveBackAbove(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!taken_ && Held() > bytes) arena_ = nullptr;
}

}  // namespace relax_disc
