// Which recomputations are left out: one after the other, those first that save most time for the
// bytes that are kept and for how long, as long as the live bytes stay within the arena; then all
// is placed, and where that fails the last ones are taken back.
#include "planner/remainder.h"

#include <algorithm>

#include "planner/offsets/offsets.h"

namespace relax_disc {

namespace {

class Remainder {
 public:
  Remainder(const PlannerGraph& graph, const ArenaPlan& plan, int32_t position);

  ArenaPlan Run();

 private:
  std::vector<int> Candidates() const;
  void FindKept(const std::vector<char>& skipped);
  void CollectVersions();
  void CollectBuffers();
  bool Fits(const std::vector<char>& skipped);
  bool Place();
  ArenaPlan Result() const;
  int64_t Bytes(int32_t tensor) const {
    return tensor >= 0 ? graph_.bytes[tensor] : graph_.ops[-1 - tensor].workspace;
  }
  int End() const { return static_cast<int>(plan_.sequence.size()); }

  const PlannerGraph& graph_;
  const ArenaPlan& plan_;
  const int32_t position_;
  std::vector<char> again_;     // per position of the plan: whether the kernel has run before
  std::vector<int> first_made_;  // per position of the plan, and its end: first version made there

  // Of the program looked at last.
  std::vector<char> kept_;  // per position of the plan
  std::vector<int32_t> sequence_;
  std::vector<Version> versions_;
  std::vector<int> source_;  // per version: its number in the plan
  std::vector<int> buffer_;  // per version; outputs in place of an input share its buffer
  std::vector<int64_t> lower_, upper_, size_;  // per buffer: [lower, upper) in positions, bytes
  std::vector<int64_t> pinned_;                // per buffer: where it lies; negative: anywhere
};

Remainder::Remainder(const PlannerGraph& graph, const ArenaPlan& plan, int32_t position)
    : graph_(graph), plan_(plan), position_(position) {
  std::vector<char> ran(graph.ops.size(), 0);
  int next = 0;
  for (int i = 0; i < End(); ++i) {
    const int32_t k = plan.sequence[i];
    again_.push_back(ran[k]);
    ran[k] = 1;
    first_made_.push_back(next);
    const int count = static_cast<int>(plan.versions.size());
    while (next < count && plan.versions[next].created == i) ++next;
  }
  first_made_.push_back(next);
}

// Positions behind ours where kernels run again, those first that are most worth leaving out.
std::vector<int> Remainder::Candidates() const {
  std::vector<int> found, last(graph_.bytes.size(), -1);  // last: use of the version before
  std::vector<double> worth(End(), 0);
  for (int i = 0; i < End(); ++i) {
    const PlannerOp& op = graph_.ops[plan_.sequence[i]];
    double kept = 1;
    for (int v = first_made_[i]; v < first_made_[i + 1]; ++v) {
      const int32_t tensor = plan_.versions[v].tensor;
      if (tensor < 0) continue;
      kept += static_cast<double>(Bytes(tensor)) * (i - std::max(last[tensor], position_));
      last[tensor] = plan_.versions[v].last_use;
    }
    if (i <= position_ || !again_[i]) continue;
    worth[i] = static_cast<double>(op.rerun_ns < 0 ? op.time_ns : op.rerun_ns) / kept;
    found.push_back(i);
  }
  std::stable_sort(found.begin(), found.end(), [&](int a, int b) { return worth[a] > worth[b]; });
  return found;
}

// What still runs: of the second runs behind our position those that are not left out and make
// something that is read before it is made again.
void Remainder::FindKept(const std::vector<char>& skipped) {
  kept_.assign(End(), 1);
  std::vector<char> needed(graph_.bytes.size(), 0);
  for (const Version& version : plan_.versions) {
    if (version.last_use == End()) needed[version.tensor] = 1;
  }
  for (int i = End() - 1; i >= 0; --i) {
    bool is_read = false;
    for (int v = first_made_[i]; v < first_made_[i + 1]; ++v) {
      const int32_t tensor = plan_.versions[v].tensor;
      is_read = is_read || (tensor >= 0 && needed[tensor]);
    }
    kept_[i] = i <= position_ || !again_[i] || (!skipped[i] && is_read);
    if (!kept_[i]) continue;
    for (int v = first_made_[i]; v < first_made_[i + 1]; ++v) {
      if (plan_.versions[v].tensor >= 0) needed[plan_.versions[v].tensor] = 0;
    }
    for (int32_t tensor : graph_.ops[plan_.sequence[i]].inputs) needed[tensor] = 1;
  }
}

void Remainder::CollectVersions() {
  sequence_.clear();
  versions_.clear();
  source_.clear();
  std::vector<int> current(graph_.bytes.size(), -1);
  for (int i = 0; i < End(); ++i) {
    if (!kept_[i]) continue;
    const int32_t now = static_cast<int32_t>(sequence_.size());
    for (int32_t tensor : graph_.ops[plan_.sequence[i]].inputs) {
      if (current[tensor] >= 0) versions_[current[tensor]].last_use = now;
    }
    for (int v = first_made_[i]; v < first_made_[i + 1]; ++v) {
      const Version& made = plan_.versions[v];
      if (made.tensor >= 0) current[made.tensor] = static_cast<int>(versions_.size());
      versions_.push_back({made.tensor, now, now, made.offset});
      source_.push_back(v);
    }
    sequence_.push_back(plan_.sequence[i]);
  }
  for (const Version& version : plan_.versions) {
    if (version.last_use != End()) continue;
    versions_[current[version.tensor]].last_use = static_cast<int32_t>(sequence_.size());
  }
}

void Remainder::CollectBuffers() {
  lower_.clear();
  upper_.clear();
  size_.clear();
  pinned_.clear();
  buffer_.assign(versions_.size(), -1);
  std::vector<int> current(graph_.bytes.size(), -1);
  for (size_t v = 0; v < versions_.size(); ++v) {
    const Version& version = versions_[v];
    if (version.tensor >= 0 && version.created > position_) {
      const PlannerOp& op = graph_.ops[sequence_[version.created]];
      for (const auto& [input, output] : op.inplace) {
        const int from = current[input];
        if (output != version.tensor || from < 0 || versions_[from].last_use != version.created ||
            Bytes(input) != Bytes(output) || upper_[buffer_[from]] != version.created + 1) {
          continue;
        }
        buffer_[v] = buffer_[from];
        // Its end is moved on now, so that no other output takes the same place.
        upper_[buffer_[v]] = std::max(version.last_use, version.created + 1) + 1;
        break;
      }
    }
    if (version.tensor >= 0) current[version.tensor] = static_cast<int>(v);
    if (buffer_[v] >= 0) continue;
    buffer_[v] = static_cast<int>(size_.size());
    const bool is_there = version.created <= position_;
    lower_.push_back(is_there ? position_ + 1 : version.created);
    upper_.push_back(version.last_use + 1);
    size_.push_back(Bytes(version.tensor));
    pinned_.push_back(is_there ? version.offset : -1);
  }
}

// Whether what a program reads is there, and no more lives at once than the arena holds.
bool Remainder::Fits(const std::vector<char>& skipped) {
  FindKept(skipped);
  CollectVersions();
  for (size_t v = 0; v < versions_.size(); ++v) {
    if (versions_[v].created > position_ || versions_[v].last_use <= position_) continue;
    if (plan_.versions[source_[v]].last_use <= position_) return false;  // it is gone
  }
  CollectBuffers();
  std::vector<int64_t> change(sequence_.size() + 3, 0);
  for (size_t b = 0; b < size_.size(); ++b) {
    if (lower_[b] >= upper_[b]) continue;
    change[lower_[b]] += size_[b];
    change[upper_[b]] -= size_[b];
  }
  int64_t live = 0, most = 0;
  for (int64_t bytes : change) most = std::max(most, live += bytes);
  return most <= plan_.arena_bytes;
}

bool Remainder::Place() {
  const OffsetProblem problem(lower_, upper_, size_);
  std::vector<int64_t> pinned, placed;
  for (int b : problem.index) pinned.push_back(pinned_[b]);
  for (std::vector<int> order : PlacementOrders(problem)) {
    std::stable_partition(order.begin(), order.end(), [&](int i) { return pinned[i] >= 0; });
    for (const bool smallest : {false, true}) {
      if (PlaceInOrder(problem, order, smallest, &placed, pinned) > plan_.arena_bytes) continue;
      std::vector<int64_t> offsets(size_.size(), 0);
      for (int i = 0; i < problem.count(); ++i) offsets[problem.index[i]] = placed[i];
      for (size_t v = 0; v < versions_.size(); ++v) {
        if (versions_[v].created > position_) versions_[v].offset = offsets[buffer_[v]];
      }
      return true;
    }
  }
  return false;
}

ArenaPlan Remainder::Result() const {
  ArenaPlan result = plan_;
  result.sequence = sequence_;
  result.versions = versions_;
  result.time_ns = 0;
  std::vector<char> ran(graph_.ops.size(), 0);
  for (int32_t k : sequence_) {
    const PlannerOp& op = graph_.ops[k];
    result.time_ns += ran[k] && op.rerun_ns >= 0 ? op.rerun_ns : op.time_ns;
    ran[k] = 1;
  }
  return result;
}

ArenaPlan Remainder::Run() {
  std::vector<char> skipped(End(), 0);
  std::vector<int> taken;
  for (int candidate : Candidates()) {
    skipped[candidate] = 1;
    if (Fits(skipped)) {
      taken.push_back(candidate);
    } else {
      skipped[candidate] = 0;
    }
  }
  while (!taken.empty()) {
    if (Fits(skipped) && Place()) return Result();
    for (size_t left = taken.size() - taken.size() / 4 - 1; taken.size() > left;) {
      skipped[taken.back()] = 0;
      taken.pop_back();
    }
  }
  return plan_;
}

}  // namespace

ArenaPlan PlanRemainder(const PlannerGraph& graph, const ArenaPlan& plan, int32_t position) {
  return Remainder(graph, plan, position).Run();
}

}  // namespace relax_disc
