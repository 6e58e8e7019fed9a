#include "planner/search.h"

#include <algorithm>

namespace relax_disc {

namespace {

constexpr int64_t kImpossible = INT64_MAX / 4;
// Give up when so many evictions in a row have not lowered the overflow.
constexpr int kPatience = 60;
constexpr int kBriefPatience = 10;
// Give up when the program takes so many times as long as without recomputation.
constexpr int64_t kSlowest = 6;
// Give up after so many kernels looked at, in all that is tried: some 300 ms.
constexpr int64_t kShrinkWork = 10'000'000;
// The same where it is to be brief, for each kernel of the program.
constexpr int64_t kBriefWork = 15;
// Most windows that Relax tries in place of one.
constexpr std::size_t kRetreats = 6;

}  // namespace

Search::Search(const Model& model, int grace)
    : timeline(model, grace), model_(model), mark_(model.tensors(), 0) {}

// Time of bringing a tensor back in a block, as the plan stands for the others.
int64_t Search::Cost(int tensor, int block, bool reload) {
  if (reload) return model_.rerun[model_.reload[tensor]];
  ++stamp_;
  int64_t cost = 0;
  stack_.assign(1, tensor);
  mark_[tensor] = stamp_;
  while (!stack_.empty()) {
    const int last = stack_.back();
    const int op = last == tensor ? model_.producer[tensor] : timeline.Maker(last, block);
    stack_.pop_back();
    if (model_.deadline[op] < block) return kImpossible;
    cost += model_.rerun[op];
    ++work_;
    for (int i = model_.outputs.begin[op]; i < model_.outputs.begin[op + 1]; ++i) {
      mark_[model_.outputs.values[i]] = stamp_;
    }
    for (int i = model_.inputs.begin[op]; i < model_.inputs.begin[op + 1]; ++i) {
      const int input = model_.inputs.values[i];
      if (mark_[input] == stamp_) continue;
      mark_[input] = stamp_;
      if (!timeline.Touched(input, block) && !timeline.Present(input, block)) {
        stack_.push_back(input);
      }
    }
  }
  return cost;
}

// Whether a copy of the tensor lies idle at a position of a block, and the window to let it go.
bool Search::FindIdle(int tensor, int block, int position, Idle* idle) const {
  const std::vector<Touch>& touches = timeline.touches(tensor);
  std::size_t i = 0;
  while (i < touches.size() && touches[i].block < block) ++i;
  if (i == 0) return false;
  const bool here = i < touches.size() && touches[i].block == block;
  const std::size_t after = here ? i + 1 : i;
  const bool later = after < touches.size() && touches[after].old_last >= 0;
  bool wait = false;  // let go only after this block, which reads or makes it first
  idle->from = touches[i - 1].block;
  idle->need = later ? touches[after].block : block;
  if (here && touches[i].created >= 0 && touches[i].created <= position) {
    if (touches[i].new_last >= position || !later) return false;
    wait = true;
  } else if (here && touches[i].old_last > position) {
    idle->need = block;
  } else if (here) {
    if (touches[i].old_last == position || touches[i].created >= 0 || !later) return false;
    wait = true;
  } else if (!later) {
    return false;
  }
  if (wait) idle->from = block;
  idle->gap = model_.GapBefore(tensor, block);
  if (idle->gap < model_.points.begin[tensor]) return false;
  const Window old = timeline.windows()[idle->gap];
  const int high = wait ? block + 1 : block;
  if (!old.empty() && old.high >= high) return false;
  const int low = std::max(idle->from, model_.points.values[idle->gap]);
  idle->window = {old.empty() ? low : old.low, high};
  return !idle->window.empty();
}

// Note an idle copy as a candidate, one way of having it back.
void Search::Consider(int tensor, const Idle& idle, bool reload) {
  const int64_t cost = Cost(tensor, idle.need, reload);
  if (cost >= kImpossible) return;
  const int relieved = overfull_[std::max(idle.need, idle.from + 1)] - overfull_[idle.from + 1];
  // Products and quotients only: a sum of products may round differently where the processor
  // fuses the two, and plans are the same on every machine.
  double score = static_cast<double>(model_.bytes[tensor]) * std::max(1, relieved);
  score /= static_cast<double>(cost + 1);
  candidates_.push_back({score, idle.gap, {idle.window.low, idle.window.high, reload}});
}

// What could be let go at the peak.
void Search::Collect(int64_t limit, const SearchStyle& style) {
  candidates_.clear();
  const int block = timeline.PeakBlock();
  const int position = timeline.PeakPosition(block);
  const int64_t all = limit + model_.resident_bytes;
  const int64_t high = all / 100 * style.ahead_percent - model_.resident_bytes;
  overfull_.assign(model_.ops + 2, 0);
  for (int k = 0; k <= model_.ops; ++k) {
    overfull_[k + 1] = overfull_[k] + (timeline.BlockPeak(k) > high);
  }
  for (int tensor = 0; tensor < model_.tensors(); ++tensor) {
    if (!model_.CanReturn(tensor) || model_.producer[tensor] >= block) continue;
    Idle idle;
    if (!FindIdle(tensor, block, position, &idle)) continue;
    if (model_.evictable[tensor]) Consider(tensor, idle, false);
    if (model_.reload[tensor] >= 0) Consider(tensor, idle, true);
  }
}

bool Search::Shrink(int64_t limit, int64_t floor, const SearchStyle& style) {
  const auto worse = [](const Candidate& a, const Candidate& b) {
    if (a.score != b.score) return a.score < b.score;
    return a.gap != b.gap ? a.gap > b.gap : a.window.reload > b.window.reload;
  };
  int64_t best = timeline.Overflow(limit);
  const int patience = style.brief ? kBriefPatience : kPatience;
  const int64_t slowest = kSlowest * model_.base_time;
  const int64_t last_work =
      timeline.work() + work_ + (style.brief ? kBriefWork * model_.ops : kShrinkWork);
  int stalled = 0;
  while (timeline.Peak() > limit) {
    if (timeline.time() > slowest || timeline.work() + work_ > last_work) return false;
    Collect(limit, style);
    std::make_heap(candidates_.begin(), candidates_.end(), worse);
    const int64_t overflow = timeline.Overflow(limit);
    const int64_t time = timeline.time();
    Candidate chosen{0, -1, {0, 0}};
    for (int tried = 0; tried < style.trials && !candidates_.empty();) {
      std::pop_heap(candidates_.begin(), candidates_.end(), worse);
      Candidate candidate = candidates_.back();
      candidates_.pop_back();
      const Window old = timeline.windows()[candidate.gap];
      timeline.Set(candidate.gap, candidate.window);
      if (timeline.valid() && timeline.time() >= floor) {
        ++tried;
        const int64_t relief = overflow - timeline.Overflow(limit);
        const int64_t cost = std::max<int64_t>(timeline.time() - time, 1);
        candidate.score = static_cast<double>(relief);
        if (relief > 0) candidate.score /= static_cast<double>(cost);
        if (chosen.gap < 0 || candidate.score > chosen.score) chosen = candidate;
      }
      timeline.Set(candidate.gap, old);
    }
    if (chosen.gap < 0) return false;
    timeline.Set(chosen.gap, chosen.window);
    seen();
    const int64_t now = timeline.Overflow(limit);
    if (now < best) {
      best = now;
      stalled = 0;
    } else if (++stalled > patience) {
      return false;
    }
  }
  return true;
}

// Quick test before a retreat from `old` is tried: is there room in the blocks where the tensor
// would lie idle?
bool Search::MayFit(int tensor, Window old, Window option, int64_t limit) const {
  const int64_t room = limit - model_.bytes[tensor];
  int from = old.low;
  for (const Touch& touch : timeline.touches(tensor)) {
    if (touch.block <= old.low) continue;
    if (option.empty() || touch.block <= option.low || from >= option.high) {
      for (int k = from + 1; k < touch.block; ++k) {
        if (timeline.BlockPeak(k) > room) return false;
      }
    }
    if (touch.block > old.high) break;
    from = touch.block;
  }
  return true;
}

// Replace a gap's window by the first smaller one that saves time within the limit.
bool Search::Retreat(int gap, int64_t limit, int64_t floor, bool thorough) {
  const int tensor = model_.gap_tensor[gap];
  const int from = model_.points.values[gap];
  const int to = model_.IsTail(gap) ? model_.ops : model_.points.values[gap + 1];
  const Window old = timeline.windows()[gap];
  if (old.empty()) return false;
  std::vector<Window> options{{from, from}};
  const bool has_both = model_.evictable[tensor] && model_.reload[tensor] >= 0;
  if (has_both) options.push_back({old.low, old.high, !old.reload});
  for (const Touch& touch : timeline.touches(tensor)) {
    const int at = touch.block;
    if (at <= from || at >= to || at <= old.low || at >= old.high) continue;
    if (options.size() < kRetreats + has_both) options.push_back({old.low, at, old.reload});
    if (options.size() < kRetreats + has_both) options.push_back({at, old.high, old.reload});
  }
  const int64_t time = timeline.time();
  for (const Window& option : options) {
    const bool same_stay = option.low == old.low && option.high == old.high;
    if (!thorough && !same_stay && !MayFit(tensor, old, option, limit)) continue;
    timeline.Set(gap, option);
    const bool good = timeline.valid() && timeline.time() < time && timeline.time() >= floor &&
                      timeline.Peak() <= limit;
    if (good) {
      seen();
      return true;
    }
    timeline.Set(gap, old);
  }
  return false;
}

bool Search::Relax(int64_t limit, int64_t floor, bool thorough) {
  std::vector<int64_t> spent(model_.tensors(), 0);
  for (int k = 0; k <= model_.ops; ++k) {
    const std::vector<int>& executions = timeline.executions(k);
    for (std::size_t i = 0; i + 1 < executions.size(); ++i) {
      const int op = executions[i];
      for (int j = model_.outputs.begin[op]; j < model_.outputs.begin[op + 1]; ++j) {
        spent[model_.outputs.values[j]] += model_.rerun[op];
      }
    }
  }
  std::vector<int> order;
  for (int gap = 0; gap < model_.gaps(); ++gap) {
    if (spent[model_.gap_tensor[gap]] > 0 && !timeline.windows()[gap].empty()) {
      order.push_back(gap);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return spent[model_.gap_tensor[a]] > spent[model_.gap_tensor[b]];
  });
  bool changed = false;
  for (int gap : order) changed |= Retreat(gap, limit, floor, thorough);
  return changed;
}

}  // namespace relax_disc
