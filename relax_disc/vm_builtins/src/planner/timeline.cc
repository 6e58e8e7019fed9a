#include "planner/timeline.h"

#include <algorithm>

namespace relax_disc {

namespace {

// The first touch in a block or later; T is a vector of Touch, const or not.
template <typename T>
auto FindTouch(T& touches, int block) {
  return std::lower_bound(touches.begin(), touches.end(), block,
                          [](const Touch& touch, int b) { return touch.block < b; });
}

// Whether the copy that block `at` leaves behind is read later.
bool Survives(const std::vector<Touch>& touches, size_t at) {
  return at + 1 < touches.size() && touches[at + 1].old_last >= 0;
}

}  // namespace

std::vector<Window> Timeline::BaseWindows(const Model& model, int grace) {
  std::vector<Window> windows(model.gaps());
  for (int gap = 0; gap < model.gaps(); ++gap) {
    const int point = model.points.values[gap];
    const bool dies = model.IsTail(gap) && model.evictable[model.gap_tensor[gap]];
    windows[gap] = {dies ? point + grace : point, dies ? kForever : point};
  }
  return windows;
}

Timeline::Timeline(const Model& model, int grace)
    : model_(model),
      windows_(BaseWindows(model, grace)),
      touches_(model.tensors()),
      blocks_(model.ops + 1),
      carried_(model.ops + 2, 0),
      local_peak_(model.ops + 1, 0),
      is_dirty_(model.ops + 1, 0),
      is_stale_(model.ops + 1, 0),
      stamp_(model.tensors(), 0),
      slot_(model.tensors(), 0) {
  for (int k = 0; k <= model.ops; ++k) MarkDirty(k);
  Flush();
  time_ = model.base_time;
}

void Timeline::Set(int gap, Window window) {
  const int tensor = model_.gap_tensor[gap];
  const int from = model_.points.values[gap];
  const int to = model_.IsTail(gap) ? model_.ops : model_.points.values[gap + 1];
  std::vector<Touch>& touches = touches_[tensor];
  const Window before = windows_[gap];
  for (auto it = FindTouch(touches, from + 1); it != touches.end() && it->block <= to; ++it) {
    windows_[gap] = before;
    const bool was = Present(tensor, it->block);
    windows_[gap] = window;
    if (Present(tensor, it->block) != was || window.reload != before.reload) MarkDirty(it->block);
  }
  windows_[gap] = window;
  Flush();
}

void Timeline::Assign(const std::vector<Window>& windows) {
  for (int gap = 0; gap < model_.gaps(); ++gap) {
    if (windows_[gap] == windows[gap]) continue;
    const int tensor = model_.gap_tensor[gap];
    const int to = model_.IsTail(gap) ? model_.ops : model_.points.values[gap + 1];
    auto it = FindTouch(touches_[tensor], model_.points.values[gap] + 1);
    for (; it != touches_[tensor].end() && it->block <= to; ++it) MarkDirty(it->block);
    windows_[gap] = windows[gap];
  }
  Flush();
}

int Timeline::PeakBlock() const {
  const int64_t peak = Peak();
  int block = 0;
  while (BlockPeak(block) < peak) ++block;
  return block;
}

int64_t Timeline::Peak() const {
  int64_t peak = BlockPeak(0);
  for (int k = 1; k <= model_.ops; ++k) peak = std::max(peak, BlockPeak(k));
  return peak;
}

int64_t Timeline::Overflow(int64_t limit) const {
  int64_t sum = 0;
  for (int k = 0; k <= model_.ops; ++k) sum += std::max<int64_t>(0, BlockPeak(k) - limit);
  return sum;
}

bool Timeline::Present(int tensor, int block) const {
  const int gap = model_.GapBefore(tensor, block);
  if (gap < model_.points.begin[tensor]) return false;
  const Window& window = windows_[gap];
  if (window.empty() || block <= window.low) return true;
  if (block <= window.high) return false;
  for (const Touch& touch : touches_[tensor]) {
    if (touch.block >= block) return false;
    if (touch.block >= window.high) return true;
  }
  return false;
}

bool Timeline::Touched(int tensor, int block) const {
  for (const Touch& touch : touches_[tensor]) {
    if (touch.block >= block) return touch.block == block;
  }
  return false;
}

int Timeline::Maker(int tensor, int block) const {
  const int gap = model_.GapBefore(tensor, block);
  const bool reload = gap >= model_.points.begin[tensor] && windows_[gap].reload;
  return reload ? model_.reload[tensor] : model_.producer[tensor];
}

std::vector<int32_t> Timeline::Sequence() const {
  std::vector<int32_t> sequence;
  for (const Block& block : blocks_) {
    sequence.insert(sequence.end(), block.executions.begin(), block.executions.end());
  }
  sequence.pop_back();
  return sequence;
}

void Timeline::MarkDirty(int block) {
  if (is_dirty_[block]) return;
  is_dirty_[block] = 1;
  dirty_.push_back(block);
  std::push_heap(dirty_.begin(), dirty_.end(), std::greater<int>());
}

void Timeline::MarkStale(int block) {
  if (is_stale_[block]) return;
  is_stale_[block] = 1;
  stale_.push_back(block);
}

// Run the dirty blocks again, earliest first: a block only makes later ones dirty.
void Timeline::Flush() {
  while (!dirty_.empty()) {
    std::pop_heap(dirty_.begin(), dirty_.end(), std::greater<int>());
    const int block = dirty_.back();
    dirty_.pop_back();
    is_dirty_[block] = 0;
    Rebuild(block);
  }
  for (int block : stale_) {
    is_stale_[block] = 0;
    Measure(block);
  }
  stale_.clear();
}

Touch& Timeline::LocalTouch(int tensor, int block) {
  if (stamp_[tensor] != mark_) {
    stamp_[tensor] = mark_;
    slot_[tensor] = static_cast<int>(next_touches_.size());
    next_touches_.push_back({block, -1, -1, -1});
    next_.touched.push_back(tensor);
  }
  return next_touches_[slot_[tensor]];
}

bool Timeline::Have(int tensor, int block) const {
  return stamp_[tensor] == mark_ || Present(tensor, block);
}

void Timeline::Execute(int op, int block, bool again) {
  const int position = static_cast<int>(next_.executions.size());
  next_.executions.push_back(op);
  for (int i = model_.inputs.begin[op]; i < model_.inputs.begin[op + 1]; ++i) {
    Touch& touch = LocalTouch(model_.inputs.values[i], block);
    (touch.created >= 0 ? touch.new_last : touch.old_last) = position;
  }
  for (int i = model_.outputs.begin[op]; i < model_.outputs.begin[op + 1]; ++i) {
    Touch& touch = LocalTouch(model_.outputs.values[i], block);
    touch.created = touch.new_last = position;
  }
  if (again) {
    time_ += model_.rerun[op];
    next_.late += model_.deadline[op] < block;
  }
}

// Run a tensor's kernel again, first making its absent inputs in the same way.
void Timeline::Materialize(int tensor, int block) {
  stack_.clear();
  stack_.emplace_back(Maker(tensor, block), 0);
  while (!stack_.empty()) {
    const int op = stack_.back().first;
    int& next = stack_.back().second;
    const int count = model_.inputs.Size(op);
    const int* inputs = &model_.inputs.values[model_.inputs.begin[op]];
    while (next < count && Have(inputs[next], block)) ++next;
    if (next < count) {
      stack_.emplace_back(Maker(inputs[next], block), 0);
    } else {
      stack_.pop_back();
      Execute(op, block, true);
    }
  }
}

void Timeline::Rebuild(int block) {
  ++mark_;
  next_.executions.clear();
  next_.touched.clear();
  next_.late = 0;
  next_touches_.clear();
  Block& old = blocks_[block];
  for (size_t i = 0; i + 1 < old.executions.size(); ++i) time_ -= model_.rerun[old.executions[i]];
  for (int i = model_.inputs.begin[block]; i < model_.inputs.begin[block + 1]; ++i) {
    const int tensor = model_.inputs.values[i];
    if (!Have(tensor, block)) Materialize(tensor, block);
  }
  Execute(block, block, false);

  for (int tensor : old.touched) {
    const auto before = FindTouch(touches_[tensor], block);
    const Touch copy = *before;
    if (stamp_[tensor] != mark_) Replace(tensor, block, &copy, nullptr);
  }
  for (size_t i = 0; i < next_.touched.size(); ++i) {
    const int tensor = next_.touched[i];
    const auto before = FindTouch(touches_[tensor], block);
    const bool existed = before != touches_[tensor].end() && before->block == block;
    const Touch copy = existed ? *before : Touch{};
    if (existed && copy == next_touches_[i]) continue;
    Replace(tensor, block, existed ? &copy : nullptr, &next_touches_[i]);
  }
  late_ += next_.late - old.late;
  work_ += static_cast<int64_t>(next_.executions.size());
  std::swap(old.executions, next_.executions);
  std::swap(old.touched, next_.touched);
  old.late = next_.late;
  MarkStale(block);
}

// Put `after` in the place of `before` (either may be missing) in a tensor's life.
void Timeline::Replace(int tensor, int block, const Touch* before, const Touch* after) {
  std::vector<Touch>& touches = touches_[tensor];
  auto at = FindTouch(touches, block);
  if (before && after && (before->old_last < 0) == (after->old_last < 0) &&
      (before->created < 0) == (after->created < 0)) {
    *at = *after;  // no copy lives longer or shorter
    if (at != touches.begin()) MarkStale((at - 1)->block);
    return;
  }
  CollectSpans(tensor, &spans_before_);
  if (before && after) {
    *at = *after;
  } else if (after) {
    at = touches.insert(at, *after);
  } else {
    at = touches.erase(at);
  }
  CollectSpans(tensor, &spans_after_);
  const int64_t size = model_.bytes[tensor];
  for (const auto& span : spans_before_) {
    if (std::find(spans_after_.begin(), spans_after_.end(), span) == spans_after_.end()) {
      Carry(span, -size);
    }
  }
  for (const auto& span : spans_after_) {
    if (std::find(spans_before_.begin(), spans_before_.end(), span) == spans_before_.end()) {
      Carry(span, size);
    }
  }
  if (at != touches.begin()) MarkStale((at - 1)->block);
  if (before && after) return;
  // The tensor is now touched here, or no longer: the next reader in the gap may find it changed.
  if (after) ++at;
  const int gap = model_.GapBefore(tensor, block);
  if (at == touches.end() || gap < model_.points.begin[tensor]) return;
  if (windows_[gap].empty() || block < windows_[gap].high) return;
  if (model_.IsTail(gap) || at->block <= model_.points.values[gap + 1]) MarkDirty(at->block);
}

// (first block, last block) of each copy that outlives the block that made it.
void Timeline::CollectSpans(int tensor, Spans* spans) const {
  spans->clear();
  int created = -1, last = -1;
  for (const Touch& touch : touches_[tensor]) {
    if (touch.old_last >= 0) last = touch.block;
    if (touch.created < 0) continue;
    if (last > created && created >= 0) spans->emplace_back(created, last);
    created = last = touch.block;
  }
  if (last > created && created >= 0) spans->emplace_back(created, last);
}

void Timeline::Carry(const std::pair<int, int>& span, int64_t bytes) {
  for (int k = span.first + 1; k <= span.second; ++k) carried_[k] += bytes;
}

// Whether the copy of a tensor that is read at a position of a block is read there last.
bool Timeline::DiesAt(int tensor, int block, int position) const {
  const std::vector<Touch>& touches = touches_[tensor];
  const size_t at = FindTouch(touches, block) - touches.begin();
  const Touch& touch = touches[at];
  const bool incoming = touch.created < 0 || position <= touch.created;
  const bool leaves = (!incoming || touch.created < 0) && Survives(touches, at);
  return position == (incoming ? touch.old_last : touch.new_last) && !leaves;
}

// Peak within a block, above what is carried into it.
void Timeline::Measure(int index) {
  Block& block = blocks_[index];
  const size_t count = block.executions.size();
  deaths_.assign(count, 0);
  for (int tensor : block.touched) {
    const std::vector<Touch>& touches = touches_[tensor];
    const size_t at = FindTouch(touches, index) - touches.begin();
    const Touch& touch = touches[at];
    const int64_t size = model_.bytes[tensor];
    const bool survives = Survives(touches, at);
    if (touch.created < 0) {
      if (!survives) deaths_[touch.old_last] += size;
    } else {
      if (touch.old_last >= 0) deaths_[touch.old_last] += size;
      if (!survives) deaths_[touch.new_last] += size;
    }
  }
  int64_t live = 0;
  int64_t peak = INT64_MIN;
  for (size_t p = 0; p < count; ++p) {
    const int op = block.executions[p];
    for (int i = model_.outputs.begin[op]; i < model_.outputs.begin[op + 1]; ++i) {
      live += model_.bytes[model_.outputs.values[i]];
    }
    int64_t here = live + model_.workspace[op];
    if (!model_.inplace[op].empty()) {
      const auto dies = [&](int tensor) { return DiesAt(tensor, index, static_cast<int>(p)); };
      model_.ForSharedPairs(op, dies, [&](int, int output) { here -= model_.bytes[output]; });
    }
    if (here > peak) {
      peak = here;
      block.peak_position = static_cast<int>(p);
    }
    live -= deaths_[p];
  }
  local_peak_[index] = peak;
}

}  // namespace relax_disc
