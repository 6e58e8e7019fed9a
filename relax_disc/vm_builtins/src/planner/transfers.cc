#include "planner/transfers.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace relax_disc {

namespace {

class Planner {
 public:
  Planner(const Model& model, const Timeline& timeline, const TierModel& tier, int64_t limit)
      : model_(model), tier_(tier), limit_(limit), plan_{CollectBuffers(model, timeline)} {
    TakeTimes(timeline);
    FindWrites();
    KeepApart(timeline);
    ExtendWrites();
    ExtendReads();
    MakeRequests();
    Simulate();
  }

  TransferPlan Take() { return std::move(plan_); }

 private:
  Version& At(int version) { return plan_.buffers.versions[version]; }
  int64_t Bytes(int version) { return model_.bytes[At(version).tensor]; }
  int64_t& Upper(int version) { return plan_.buffers.upper[plan_.buffers.buffer[version]]; }

  void TakeTimes(const Timeline& timeline);
  void FindWrites();
  void SumLive();
  void KeepApart(const Timeline& timeline);
  void ExtendWrites();
  void ExtendReads();
  void SortVersions();
  void MakeRequests();
  void Simulate();

  const Model& model_;
  const TierModel& tier_;
  const int64_t limit_;
  TransferPlan plan_;
  int runs_ = 0;                        // positions are 0 .. runs_, the last one being the end
  std::vector<int64_t> run_ns_, start_ns_;  // per position, without waiting
  std::vector<int64_t> live_;           // per position: bytes
  std::vector<int> next_, before_;      // per version: of the same tensor, or -1
  std::vector<char> taken_over_;        // per version: by an output of the kernel that reads it last
  std::vector<int> writes_, reads_;     // versions
};

void Planner::TakeTimes(const Timeline& timeline) {
  std::vector<char> ran(model_.ops, 0);
  for (int32_t op : timeline.Sequence()) {
    if (model_.IsReload(op)) continue;
    run_ns_.push_back(ran[op] ? model_.rerun[op] : model_.time[op]);
    ran[op] = 1;
  }
  runs_ = static_cast<int>(run_ns_.size());
  start_ns_.assign(1, 0);
  for (int64_t time : run_ns_) start_ns_.push_back(start_ns_.back() + time);
}

void Planner::FindWrites() {
  const int count = static_cast<int>(plan_.buffers.versions.size());
  std::vector<int> last(model_.tensors(), -1);
  next_.assign(count, -1);
  before_.assign(count, -1);
  taken_over_.assign(count, 0);
  writes_.clear();
  reads_.clear();
  std::vector<char> written(count, 0);
  std::vector<int> latest(plan_.buffers.size.size(), -1);
  for (int v = 0; v < count; ++v) {
    int& latest_there = latest[plan_.buffers.buffer[v]];
    if (latest_there >= 0) taken_over_[latest_there] = 1;
    latest_there = v;
    const int tensor = At(v).tensor;
    if (tensor < 0) continue;
    before_[v] = last[tensor];
    if (last[tensor] >= 0) next_[last[tensor]] = v;
    last[tensor] = v;
    if (!plan_.buffers.reloaded[v]) continue;
    reads_.push_back(v);
    int first = v;
    while (before_[first] >= 0) first = before_[first];
    if (!written[first]) writes_.push_back(first);
    written[first] = 1;
  }
  std::sort(writes_.begin(), writes_.end());
}

void Planner::SumLive() {
  live_.assign(runs_ + 2, 0);
  const Buffers& buffers = plan_.buffers;
  for (std::size_t b = 0; b < buffers.size.size(); ++b) {
    live_[buffers.lower[b]] += buffers.size[b];
    live_[buffers.upper[b]] -= buffers.size[b];
  }
  std::partial_sum(live_.begin(), live_.end(), live_.begin());
}

// Outputs lie beside what is being written out, not in its place, where there is room: else the
// kernel would wait.
void Planner::KeepApart(const Timeline& timeline) {
  SumLive();
  std::vector<std::pair<int, int>> apart;
  for (int v : writes_) {
    const int last = At(v).last_use;
    if (!taken_over_[v] || live_[last] + Bytes(v) > limit_) continue;
    live_[last] += Bytes(v);
    apart.emplace_back(At(v).tensor, At(v).created);
  }
  if (apart.empty()) return;
  std::sort(apart.begin(), apart.end());
  plan_.buffers = CollectBuffers(model_, timeline, apart);
  FindWrites();
  SumLive();
}

void Planner::ExtendWrites() {
  int64_t free_ns = 0;
  for (int v : writes_) {
    free_ns = std::max(free_ns, start_ns_[At(v).created + 1]) + tier_.Time(Bytes(v), false);
    if (taken_over_[v]) continue;
    const int64_t until = next_[v] < 0 ? runs_ : At(next_[v]).created;
    int64_t& upper = Upper(v);
    while (upper < until && start_ns_[upper] < free_ns && live_[upper] + Bytes(v) <= limit_) {
      live_[upper++] += Bytes(v);
    }
    At(v).last_use = static_cast<int32_t>(upper) - 1;
  }
}

void Planner::ExtendReads() {
  std::vector<int> order = reads_;
  const std::vector<int>& first_read = plan_.buffers.first_read;
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return first_read[a] > first_read[b]; });
  int64_t free_ns = INT64_MAX;
  for (int v : order) {
    const int64_t end = std::min(free_ns, start_ns_[first_read[v]]);
    free_ns = end - tier_.Time(Bytes(v), true);
    const int64_t from = At(before_[v]).last_use + 1;
    int64_t& lower = plan_.buffers.lower[plan_.buffers.buffer[v]];
    while (lower > from && start_ns_[lower] > free_ns && live_[lower - 1] + Bytes(v) <= limit_) {
      live_[--lower] += Bytes(v);
    }
    At(v).created = static_cast<int32_t>(lower);
  }
}

// By creation again; what was made together keeps its order.
void Planner::SortVersions() {
  Buffers& buffers = plan_.buffers;
  const Buffers old = buffers;
  std::vector<int> order(old.versions.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return old.versions[a].created < old.versions[b].created;
  });
  for (std::size_t i = 0; i < order.size(); ++i) {
    buffers.versions[i] = old.versions[order[i]];
    buffers.buffer[i] = old.buffer[order[i]];
    buffers.first_read[i] = old.first_read[order[i]];
    buffers.reloaded[i] = old.reloaded[order[i]];
  }
}

void Planner::MakeRequests() {
  SortVersions();
  FindWrites();
  const auto& first_read = plan_.buffers.first_read;
  for (int v : reads_) plan_.transfers.push_back({v, true, At(v).created, first_read[v]});
  for (int v : writes_) {
    const int end = At(v).last_use + (taken_over_[v] ? 0 : 1);
    plan_.transfers.push_back({v, false, At(v).created, std::min(end, runs_)});
  }
  std::stable_sort(plan_.transfers.begin(), plan_.transfers.end(),
                   [](const Transfer& a, const Transfer& b) {
                     if (a.start != b.start) return a.start < b.start;
                     return a.is_read != b.is_read ? a.is_read : a.wait < b.wait;
                   });
}

// The run as it will be: one transfer at a time, in the order of the requests.
void Planner::Simulate() {
  std::vector<Transfer>& transfers = plan_.transfers;
  std::size_t requested = 0;
  int64_t now = 0;
  std::vector<std::vector<int>> waits(runs_ + 1);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    waits[transfers[i].wait].push_back(static_cast<int>(i));
  }
  const auto wait = [&](std::size_t request) {
    const int64_t delay = std::max<int64_t>(0, transfers[request].end_ns - now);
    now += delay;
    plan_.stall_ns += delay;
  };
  const auto request_all = [&](int position, bool is_read) {
    const std::size_t queue = static_cast<std::size_t>(tier_.queue);
    for (; requested < transfers.size(); ++requested) {
      Transfer& transfer = transfers[requested];
      if (transfer.start != position || transfer.is_read != is_read) return;
      if (requested >= queue) wait(requested - queue);
      transfer.begin_ns = std::max(now, requested == 0 ? 0 : transfers[requested - 1].end_ns);
      transfer.end_ns = transfer.begin_ns + tier_.Time(Bytes(transfer.version), is_read);
    }
  };
  for (int position = 0; position <= runs_; ++position) {
    // What is needed here only now is requested first, then waited for.
    for (int i : waits[position]) {
      if (transfers[i].start < position || !transfers[i].is_read) wait(i);
    }
    request_all(position, true);
    for (int i : waits[position]) wait(i);
    if (position == runs_) break;
    now += run_ns_[position];
    request_all(position, false);
  }
  plan_.time_ns = now;
}

}  // namespace

TransferPlan PlanTransfers(const Model& model, const Timeline& timeline, const TierModel& tier,
                           int64_t limit) {
  return Planner(model, timeline, tier, limit).Take();
}

int64_t PlanSlots(const Model& model, const std::vector<Version>& versions, int64_t alignment,
                  std::vector<Transfer>* transfers) {
  std::vector<int> slot_of(model.tensors(), -1);
  std::vector<int64_t> lower, upper, size, offsets;
  for (const Transfer& transfer : *transfers) {
    const int tensor = versions[transfer.version].tensor;
    if (!transfer.is_read) {
      slot_of[tensor] = static_cast<int>(size.size());
      lower.push_back(transfer.start);
      size.push_back((model.bytes[tensor] + alignment - 1) / alignment * alignment);
    }
    upper.resize(size.size(), 0);
    upper[slot_of[tensor]] = std::max<int64_t>(upper[slot_of[tensor]], transfer.wait + 1);
  }
  const int64_t height = PlanOffsets(lower, upper, size, -1, &offsets);
  for (Transfer& transfer : *transfers) {
    transfer.slot = offsets[slot_of[versions[transfer.version].tensor]];
  }
  return height;
}

}  // namespace relax_disc
