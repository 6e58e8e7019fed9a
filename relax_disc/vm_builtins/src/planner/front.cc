#include "planner/front.h"

#include <algorithm>

namespace relax_disc {

namespace {

// The smallest tensors, up to this part of the peak in all, are kept and not counted.
constexpr int64_t kSmallPart = 500;
// Entries of one set are thinned to one in this part of the peak once there are more of them.
constexpr int kEntries = 512;
// Sets of wanted tensors that are told apart.
constexpr std::size_t kStates = 16;

}  // namespace

Front::Front(const Model& model, const Timeline& base)
    : model_(model),
      block_(base.PeakBlock()),
      later_(model.tensors(), 0),
      keep_(model.tensors(), 0),
      slot_(model.tensors(), -1) {
  const int64_t fixed = Prepare(base);
  bucket_ = base.Peak() / kEntries + 1;
  states_.push_back({0, {{0, model.base_time, -1}}});
  for (int op = block_ - 1; op >= 0; --op) Step(op);
  for (const Entry& entry : states_.front().entries) {
    choices_.push_back({fixed + entry.bytes, entry.time, entry.node});
  }
  std::reverse(choices_.begin(), choices_.end());
}

// Find out what each tensor adds to the block; return the bytes that are there in any case.
int64_t Front::Prepare(const Timeline& base) {
  std::vector<int64_t> sizes;
  for (int t = 0; t < model_.tensors(); ++t) {
    if (model_.producer[t] < 0 || model_.producer[t] >= block_) continue;
    later_[t] = model_.points.values[model_.points.begin[t + 1] - 1] > block_;
    keep_[t] = model_.bytes[t];
    if (later_[t]) sizes.push_back(model_.bytes[t]);
  }
  int64_t fixed = model_.workspace[block_];
  for (int i = model_.inputs.begin[block_]; i < model_.inputs.begin[block_ + 1]; ++i) {
    const int tensor = model_.inputs.values[i];
    fixed += model_.bytes[tensor];
    keep_[tensor] = 0;
  }
  for (int i = model_.outputs.begin[block_]; i < model_.outputs.begin[block_ + 1]; ++i) {
    fixed += model_.bytes[model_.outputs.values[i]];
  }
  const auto always = [](int) { return true; };
  model_.ForSharedPairs(block_, always, [&](int input, int) {
    fixed -= model_.bytes[input];  // the output takes its place, unless it is kept
    keep_[input] = model_.bytes[input];
  });
  std::sort(sizes.begin(), sizes.end());
  int64_t sum = 0, least = 0;
  for (int64_t size : sizes) {
    least = size;
    sum += size;
    if (sum > base.Peak() / kSmallPart) break;
  }
  for (int t = 0; t < model_.tensors(); ++t) {
    if (keep_[t] < least) keep_[t] = 0;
  }
  return fixed;
}

std::size_t Front::Find(int64_t limit) const {
  const auto at = std::partition_point(choices_.begin(), choices_.end(),
                                       [&](const Choice& c) { return c.limit > limit; });
  return at - choices_.begin();
}

// Give the tensors that a kernel reads a slot; return those that running it again wants.
uint64_t Front::Want(int op) {
  uint64_t wanted = 0;
  for (int i = model_.inputs.begin[op]; i < model_.inputs.begin[op + 1]; ++i) {
    const int tensor = model_.inputs.values[i];
    if (later_[tensor] || keep_[tensor] == 0) continue;
    if (slot_[tensor] < 0 && free_slots_ == 0) {
      later_[tensor] = 1;  // count it as wanted in any case
      exact_ = false;
      continue;
    }
    if (slot_[tensor] < 0) {
      slot_[tensor] = 0;
      while (!(free_slots_ >> slot_[tensor] & 1)) ++slot_[tensor];
      free_slots_ &= free_slots_ - 1;
    }
    wanted |= uint64_t{1} << slot_[tensor];
  }
  return wanted;
}

// Add the entries of a state after which what a kernel makes is made again, or reloaded.
void Front::Return(const State& state, int op, bool reload, int64_t time, uint64_t wanted) {
  std::vector<Entry> entries = state.entries;
  for (Entry& entry : entries) {
    entry.time += time;
    nodes_.push_back({entry.node, op, reload});
    entry.node = static_cast<int>(nodes_.size()) - 1;
  }
  Add(wanted, std::move(entries));
}

// Decide about what a kernel makes: not wanted, kept, made again, or reloaded.
void Front::Step(int op) {
  const int begin = model_.outputs.begin[op], end = model_.outputs.begin[op + 1];
  uint64_t mine = 0;
  int64_t always = 0, most = 0;
  bool again = model_.deadline[op] > block_, reloads = true;
  for (int i = begin; i < end; ++i) {
    const int tensor = model_.outputs.values[i];
    again = again && model_.evictable[tensor];
    reloads = reloads && (keep_[tensor] == 0 || model_.reload[tensor] >= 0);
    most += keep_[tensor];
    if (later_[tensor]) always += keep_[tensor];
    if (slot_[tensor] >= 0) mine |= uint64_t{1} << slot_[tensor];
  }
  if (most == 0 || (always == 0 && mine == 0)) return;
  const uint64_t wants = again ? Want(op) : 0;
  next_.clear();
  for (State& state : states_) {
    int64_t bytes = 0, reload_time = 0;
    for (int i = begin; i < end; ++i) {
      const int tensor = model_.outputs.values[i], slot = slot_[tensor];
      if (!later_[tensor] && (slot < 0 || !(state.wanted >> slot & 1))) continue;
      bytes += keep_[tensor];
      if (reloads && keep_[tensor] > 0) reload_time += model_.rerun[model_.reload[tensor]];
    }
    const uint64_t wanted = state.wanted & ~mine;
    if (again && bytes > 0) Return(state, op, false, model_.rerun[op], wanted | wants);
    if (reloads && bytes > 0) Return(state, op, true, reload_time, wanted);
    for (Entry& entry : state.entries) entry.bytes += bytes;
    Add(wanted, std::move(state.entries));
  }
  for (int i = begin; i < end; ++i) {
    int& slot = slot_[model_.outputs.values[i]];
    if (slot >= 0) free_slots_ |= uint64_t{1} << slot;
    slot = -1;
  }
  std::swap(states_, next_);
  if (states_.size() > kStates) Narrow();
}

// Tell fewer sets apart: count tensors that only some of them want as wanted.
void Front::Narrow() {
  exact_ = false;
  while (states_.size() > kStates) {
    uint64_t some = 0, all = ~uint64_t{0};
    for (const State& state : states_) {
      some |= state.wanted;
      all &= state.wanted;
    }
    const uint64_t open = some & ~all;
    next_.clear();
    for (State& state : states_) {
      Add(state.wanted | (open & -open), std::move(state.entries));
    }
    std::swap(states_, next_);
  }
}

// Add entries to those of a set in next_; of two with the same figures the older one stays.
void Front::Add(uint64_t wanted, std::vector<Entry>&& entries) {
  const auto same = [&](const State& state) { return state.wanted == wanted; };
  const auto state = std::find_if(next_.begin(), next_.end(), same);
  if (state == next_.end()) {
    next_.push_back({wanted, std::move(entries)});
    return;
  }
  std::vector<Entry> merged;
  merged.reserve(state->entries.size() + entries.size());
  auto a = state->entries.begin(), b = entries.begin();
  while (a != state->entries.end() || b != entries.end()) {
    const bool first = b == entries.end() ||
                       (a != state->entries.end() &&
                        (a->bytes != b->bytes ? a->bytes < b->bytes : a->time <= b->time));
    const Entry& entry = first ? *a++ : *b++;
    if (merged.empty() || entry.time < merged.back().time) merged.push_back(entry);
  }
  if (merged.size() > kEntries) Thin(&merged);
  state->entries = std::move(merged);
}

// Keep the fastest entry of each bucket of bytes.
void Front::Thin(std::vector<Entry>* entries) {
  std::size_t count = 0;
  for (const Entry& entry : *entries) {
    const bool alike = count && (*entries)[count - 1].bytes / bucket_ == entry.bytes / bucket_;
    (*entries)[count - alike] = entry;
    count += !alike;
  }
  exact_ = exact_ && count == entries->size();
  entries->resize(count);
}

std::vector<Window> Front::Windows(const Choice& choice, int grace) const {
  std::vector<Window> windows = Timeline::BaseWindows(model_, grace);
  std::vector<char> again(model_.ops, 0), reloads(model_.ops, 0);
  for (int node = choice.node; node >= 0; node = nodes_[node].parent) {
    (nodes_[node].reload ? reloads : again)[nodes_[node].op] = 1;
  }
  for (int op = 0; op < block_; ++op) {
    if (!again[op] && !reloads[op]) continue;
    const bool reload = reloads[op];
    for (int i = model_.outputs.begin[op]; i < model_.outputs.begin[op + 1]; ++i) {
      const int tensor = model_.outputs.values[i];
      if (reload && keep_[tensor] == 0) continue;
      const int gap = model_.GapBefore(tensor, block_), next = gap + 1;
      const bool read = !model_.IsTail(gap) && model_.points.values[next] == block_;
      if (read) {
        windows[next] = {block_, block_ + 1, reload};
      } else {
        windows[gap] = {model_.points.values[gap], block_, reload};
      }
    }
    if (reload) continue;
    for (int i = model_.inputs.begin[op]; i < model_.inputs.begin[op + 1]; ++i) {
      const int tensor = model_.inputs.values[i];
      if (again[model_.producer[tensor]] || reloads[model_.producer[tensor]]) continue;
      const int tail = model_.points.begin[tensor + 1] - 1, point = model_.points.values[tail];
      if (point <= block_) windows[tail] = {point, point};  // wanted again: kept until then
    }
  }
  return windows;
}

}  // namespace relax_disc
