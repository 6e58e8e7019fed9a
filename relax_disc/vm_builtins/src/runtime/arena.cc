#include "runtime/arena.h"

#include <algorithm>
#include <cstring>

namespace relax_disc {

namespace {

// Calls in a row that leave half of the arena unused before the rest is given back: one long batch
// in 64 keeps it, a phase of short ones does not.
constexpr int64_t kIdleCalls = 64;
constexpr DLDevice kHost{kDLCPU, 0};  // library kernels of other devices need no workspace

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

int64_t BytesOf(const BlockPtr& block) { return block == nullptr ? 0 : block->bytes(); }

}  // namespace

ArenaMemory SharedArena::Own(const ArenaNeed& need, Backing backing) {
  return {MemoryBlock::Allocate(need.device, need.arena_bytes, backing),
          MemoryBlock::Allocate(kHost, need.workspace_bytes, backing)};
}

bool SharedArena::Take(const ArenaNeed& need, ArenaMemory* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (taken_) return false;
  // What is held may be larger than this call needs, unless that breaks its budget.
  int64_t least_arena = std::max(need.arena_bytes, BytesOf(memory_.arena));
  int64_t least_workspace = std::max(need.workspace_bytes, BytesOf(memory_.workspace));
  if (IsIdle(need.arena_bytes)) least_arena = idle_need_;
  if (need.room_bytes >= 0 && least_arena + least_workspace > need.room_bytes) {
    least_arena = need.arena_bytes;
    least_workspace = need.workspace_bytes;
  }
  // Shrink before the other grows: never more than either state.
  const bool arena_first = least_arena < BytesOf(memory_.arena);
  if (arena_first) Fit(&memory_.arena, need.device, least_arena);
  Fit(&memory_.workspace, kHost, least_workspace);
  if (!arena_first) Fit(&memory_.arena, need.device, least_arena);
  *memory = memory_;
  taken_ = true;
  return true;
}

void SharedArena::Return() {
  std::lock_guard<std::mutex> lock(mutex_);
  taken_ = false;
}

bool SharedArena::IsIdle(int64_t needed_bytes) {
  const bool is_small = memory_.arena != nullptr && needed_bytes <= memory_.arena->bytes() / 2;
  idle_calls_ = is_small ? idle_calls_ + 1 : 0;
  idle_need_ = is_small ? std::max(idle_need_, needed_bytes) : 0;
  if (idle_calls_ < kIdleCalls) return false;
  idle_calls_ = 0;
  return true;
}

int64_t SharedArena::Held() const { return BytesOf(memory_.arena) + BytesOf(memory_.workspace); }

int64_t SharedArena::held_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Held();
}

void SharedArena::Fill(uint8_t byte) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const BlockPtr& block : {memory_.arena, memory_.workspace}) {
    if (block == nullptr || taken_ || block->device().device_type != kDLCPU) continue;
    std::memset(block->base(), byte, block->bytes());
  }
}

void SharedArena::GiveBackAbove(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!taken_ && Held() > bytes) memory_ = {};
}

}  // namespace relax_disc
