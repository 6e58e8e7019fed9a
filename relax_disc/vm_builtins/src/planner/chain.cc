#include "planner/chain.h"

#include <algorithm>

namespace relax_disc {

namespace {

// Graphs with more kernels than this get fewer chains: they are slow, and vary less.
constexpr int kLarge = 3000;
// Graphs with no more kernels than this are planned within some milliseconds: fewer trials.
constexpr int kSmall = 1000;

}  // namespace

std::vector<ChainStyle> ChainStyles(const Model& model, int effort) {
  std::vector<ChainStyle> styles{
      {80, {80, 1, false}, kGrace},
      {20, {80, model.ops <= kSmall ? 4 : 12, false}, kGrace},
      {80, {100, 6, false}},
  };
  if (effort >= kEffortHigh) {
    if (model.ops <= kSmall) styles.push_back({20, {80, 12, false}, kGrace});
    styles.push_back({10, {70, 6, true}});
    styles.push_back({20, {100, 12, true}});
    if (model.ops <= kLarge) {
      styles.push_back({10, {100, 6, true}});
      styles.push_back({10, {50, 12, true}});
      styles.push_back({20, {80, 1, true}});
      styles.push_back({20, {50, 12, true}});
      styles.push_back({40, {100, 1, true}});
      styles.push_back({80, {100, 12, true}});
      styles.push_back({80, {80, 1, true}});
    }
  }
  return styles;
}

std::vector<ChainStyle> FrontStyles(int effort) {
  std::vector<ChainStyle> styles{{80, {100, 12, false, true}, kGrace}};
  if (effort >= kEffortHigh) styles.push_back({160, {80, 6, false, true}, kGrace});
  return styles;
}

int64_t RungLimit(const Model& model, int64_t base_peak, int divisions, int rung) {
  const int64_t all = base_peak + model.resident_bytes;
  return all / divisions * rung + all % divisions * rung / divisions - model.resident_bytes;
}

int64_t LowerBound(const Model& model) {
  int64_t bound = 0, stuck = 0;  // stuck: bytes that nothing can bring back, alive across a block
  std::vector<std::vector<int>> begins(model.ops + 1), ends(model.ops + 1);
  for (int tensor = 0; tensor < model.tensors(); ++tensor) {
    const int first = model.points.begin[tensor], last = model.points.begin[tensor + 1] - 1;
    if (model.producer[tensor] < 0 || model.reload[tensor] >= 0 || last <= first) continue;
    const int made = model.producer[tensor];
    // From here on the tensor cannot be made again.
    const int from = model.evictable[tensor] ? std::max(made + 1, model.deadline[made]) : made + 1;
    const int to = model.points.values[last];
    if (from >= to) continue;
    begins[from].push_back(tensor);
    ends[to].push_back(tensor);
  }
  std::vector<char> alive(model.tensors(), 0);
  for (int k = 0; k <= model.ops; ++k) {
    for (int tensor : ends[k]) {
      stuck -= model.bytes[tensor];
      alive[tensor] = 0;
    }
    for (int tensor : begins[k]) {
      stuck += model.bytes[tensor];
      alive[tensor] = 1;
    }
    int64_t here = stuck + model.workspace[k];
    for (int i = model.inputs.begin[k]; i < model.inputs.begin[k + 1]; ++i) {
      const int tensor = model.inputs.values[i];
      if (!alive[tensor]) here += model.bytes[tensor];
    }
    for (int i = model.outputs.begin[k]; i < model.outputs.begin[k + 1]; ++i) {
      here += model.bytes[model.outputs.values[i]];
    }
    const auto always = [](int) { return true; };
    model.ForSharedPairs(k, always, [&](int input, int) { here -= model.bytes[input]; });
    bound = std::max(bound, here);
  }
  return bound;
}

Chain::Chain(const Model& model, const ChainStyle& style, int64_t lower_bound)
    : search(model, style.grace),
      model_(model),
      style_(style),
      lower_bound_(lower_bound),
      base_peak_(search.timeline.Peak()),
      limit_(base_peak_),
      floor_(model.base_time),
      rung_(style.divisions) {}

bool Chain::Descend() {
  if (rung_ <= 0 || limit_ <= lower_bound_) return false;
  --rung_;
  const int64_t last_limit = limit_;
  limit_ = std::max(RungLimit(model_, base_peak_, style_.divisions, rung_), lower_bound_);
  if (search.timeline.Peak() <= limit_) return true;
  const std::vector<Window> last = search.timeline.windows();
  if (search.Shrink(limit_, floor_, style_.search)) {
    search.Relax(limit_, floor_, style_.search.thorough);
  } else if (!StartAgain()) {
    search.timeline.Assign(last);
    limit_ = last_limit;
    rung_ = 0;
    return false;
  }
  floor_ = search.timeline.time();
  return true;
}

// Try to reach the rung from the program without recomputation.
bool Chain::StartAgain() {
  const auto seen = std::move(search.seen);
  search.seen = [] {};
  search.timeline.Assign(Timeline::BaseWindows(model_, style_.grace));
  const bool reached = search.Shrink(limit_, 0, style_.search);
  if (reached) search.Relax(limit_, floor_, style_.search.thorough);
  search.seen = seen;
  if (!reached || search.timeline.time() < floor_) return false;
  search.seen();
  return true;
}

}  // namespace relax_disc
