#include "runtime/state_windows.h"

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "runtime/memory.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

using Givens = std::set<int32_t>;

std::vector<int32_t> Without(const Givens& all, const Givens& some) {
  std::vector<int32_t> rest;
  std::set_difference(all.begin(), all.end(), some.begin(), some.end(), std::back_inserter(rest));
  return rest;
}

}  // namespace

StateWindows PlanStateWindows(const Metadata& metadata, const std::vector<int64_t>& values,
                              const std::vector<int32_t>& sequence, const PlannerGraph& graph,
                              const StateModel& model) {
  StateWindows plan;
  std::vector<int64_t> bytes(metadata.given_count, 0);
  for (const TensorEntry& tensor : metadata.tensors) {
    if (tensor.storage != Storage::kGiven || tensor.is_part()) continue;
    if (!model.in_file[tensor.given]) continue;
    bytes[tensor.given] = RoundUp(values[tensor.bytes], StateFile::kPage);
    plan.file_bytes += values[tensor.bytes];
  }
  const auto sum = [&](const auto& givens) {
    int64_t total = 0;
    for (int32_t given : givens) total += bytes[given];
    return total;
  };

  std::vector<Givens> needed;
  for (size_t position = 0; position < sequence.size(); ++position) {
    const KernelEntry& kernel = metadata.kernels[sequence[position]];
    Givens givens;
    for (const auto* tensors : {&kernel.inputs, &kernel.outputs}) {
      for (int32_t tensor : *tensors) {
        const int32_t given = metadata.tensors[tensor].given;
        if (given >= 0 && bytes[given] > 0) givens.insert(given);
      }
    }
    if (givens.empty()) continue;
    plan.peak_bytes = std::max(plan.peak_bytes, sum(givens));
    plan.windows.push_back({static_cast<int32_t>(position), {}, {}});
    needed.push_back(std::move(givens));
  }
  for (size_t i = 0; i < needed.size(); ++i) {
    StateWindow& window = plan.windows[i];
    window.arrive = Without(needed[i], i > 0 ? needed[i - 1] : Givens());
    window.depart = Without(needed[i], i + 1 < needed.size() ? needed[i + 1] : Givens());
    window.early = i == 0 || sum(needed[i - 1]) + sum(window.arrive) <= plan.peak_bytes;
  }

  // As a StateMover does it: one transfer after the other, beside the kernels.
  std::vector<int64_t> arrived;
  int64_t clock = 0, channel = 0, busy = 0;
  const auto move = [&](const std::vector<int32_t>& givens, bool is_read) {
    for (int32_t given : givens) {
      channel = std::max(channel, clock) + model.speeds.Time(bytes[given], is_read);
    }
  };
  const auto arrive = [&](size_t window) {
    if (window < arrived.size() || window >= plan.windows.size()) return;
    move(plan.windows[window].arrive, true);
    arrived.push_back(channel);
  };
  arrive(0);
  size_t next = 0;
  for (size_t position = 0; position < sequence.size(); ++position) {
    const int64_t time = graph.ops[sequence[position]].time_ns;
    busy += time;
    const bool is_window =
        next < needed.size() && plan.windows[next].position == static_cast<int32_t>(position);
    if (is_window) {
      if (next + 1 < needed.size() && plan.windows[next + 1].early) arrive(next + 1);
      clock = std::max(clock, arrived[next]);
    }
    clock += time;
    if (is_window) {
      move(plan.windows[next].depart, false);
      arrive(++next);
    }
  }
  plan.stall_ns = std::max(clock, channel) - busy;
  return plan;
}

StateMover::StateMover(StateFilePtr file, const StateWindows& windows,
                       const std::vector<ffi::Tensor>& given)
    : file_(std::move(file)), windows_(windows), given_(given) {
  Arrive(0);
}

StateMover::~StateMover() {
  // After a kernel that raised, what was brought for it, and for the next, is still there.
  for (const auto& [memory, bytes] : there_) file_->PutAway(&call_, memory, bytes);
  file_->Finish(&call_);
}

void StateMover::Arrive(size_t window) {
  if (window < arrivals_.size() || window >= windows_.windows.size()) return;
  for (int32_t given : windows_.windows[window].arrive) {
    char* memory = static_cast<char*>(given_[given].data_ptr());
    there_[memory] = BytesOf(given_[given]);
    file_->Bring(&call_, memory, there_[memory]);
  }
  arrivals_.push_back(call_.last_request);
}

void StateMover::Before(int32_t position) {
  if (next_ == windows_.windows.size() || windows_.windows[next_].position != position) return;
  const bool has_next = next_ + 1 < windows_.windows.size();
  if (has_next && windows_.windows[next_ + 1].early) Arrive(next_ + 1);
  file_->Wait(&call_, arrivals_[next_]);
}

void StateMover::After(int32_t position) {
  if (next_ == windows_.windows.size() || windows_.windows[next_].position != position) return;
  for (int32_t given : windows_.windows[next_].depart) {
    char* memory = static_cast<char*>(given_[given].data_ptr());
    file_->PutAway(&call_, memory, there_[memory]);
    there_.erase(memory);
  }
  Arrive(++next_);
}

void StateMover::Finish() { file_->Wait(&call_, call_.last_request); }

}  // namespace relax_disc
