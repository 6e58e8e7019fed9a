// PlanArena: the fastest program, among those of some searches, that an arena of the budget can
// hold.  How much arena a program needs does not depend on the budget, so time is monotone in it.
#include <algorithm>
#include <memory>

#include "planner/offsets/offsets.h"
#include "planner/planner.h"
#include "planner/chain.h"
#include "planner/front_search.h"
#include "planner/transfers.h"
#include "planner/versions.h"

namespace relax_disc {

namespace {

// Placements within this part of the live bytes are good enough.
constexpr int64_t kTolerance = 100;
// Patience of repair for the programs of chains, and for those of the front, which are many.
constexpr int kPatience = 120, kShortPatience = 24;
// Work of a search for places, for the programs of chains.
constexpr int64_t kWorkPerPair = 10;

// Live bytes, in percent of the budget, up to which lives are drawn out for transfers; places for
// more are seldom found.
constexpr int kTransferLimits[] = {100, 97, 90};
// A slot in the tier begins at a multiple of this: the largest block of a disk in use.
constexpr int64_t kSlotAlignment = 4096;
// What is waited for, and how much the transfers can take, follows only from the whole plan.  So
// several searches take different parts of the transfers' time for waiting time; some, for where
// transfers cannot take all, let only what is made early be reloaded, which is away for longest.  Each
// gives a program and the fastest one is taken.
struct Trial {
  double exposed, early;  // see Model
};
constexpr Trial kTrials[] = {{1.0, 1.0},  {0.5, 1.0},   {0.25, 1.0}, {0.12, 1.0}, {0.06, 1.0},
                             {0.02, 1.0}, {0.02, 0.08}, {0.02, 0.16}, {0.02, 0.24}};

// Most bytes alive at once.
int64_t LiveBytes(const Buffers& buffers) {
  const OffsetProblem problem(buffers.lower, buffers.upper, buffers.size);
  return problem.lower_bound;
}

OffsetEffort Effort(int patience, int64_t enough) {
  return {0, kTolerance, patience, enough, patience == kPatience ? kWorkPerPair : 0};
}

int Patience(const FrontSearch& front) { return front.shows_rung() ? kShortPatience : 0; }

PlannerGraph Rounded(const PlannerGraph& graph, int64_t alignment) {
  PlannerGraph result = graph;
  const auto round = [&](int64_t* bytes) {
    *bytes = (*bytes + alignment - 1) / alignment * alignment;
  };
  for (int64_t& bytes : result.bytes) round(&bytes);
  for (PlannerOp& op : result.ops) round(&op.workspace);
  return result;
}

// Finds the fastest program that the arena holds.  Each source of programs knows a least time of
// those that it has not given yet; the source with the least goes on, and so the first program that
// fits is the fastest.
class ArenaSearch {
 public:
  ArenaSearch(const Model& model, int64_t budget, int effort, const TierModel& tier)
      : model_(model), tier_(tier), budget_(budget), bound_(LowerBound(model)), effort_(effort) {}

  ArenaPlan Run(bool needs_least);

 private:
  struct Program {  // of the front, not yet placed
    int64_t time;
    std::vector<Window> windows;
    int patience;
  };
  struct Descent {
    ChainStyle style;
    std::unique_ptr<Chain> chain;  // made when its turn comes
    bool refused;                  // whether the arena does not hold its program
    int64_t time;
  };

  bool Fits(const Timeline& timeline, int patience);
  bool Place(const Timeline& timeline, int patience, int64_t limit);
  bool PlaceProgram();
  bool GoDown(Descent* descent);
  bool Search();
  void FindLeast();

  const Model& model_;
  const TierModel& tier_;
  const int64_t budget_, bound_;
  const int effort_;
  ArenaPlan plan_;  // the program placed last, and its kernels with reloads among them
  std::vector<int32_t> placed_;
  int patience_ = 0;
  int64_t least_ = INT64_MAX;
  std::unique_ptr<FrontSearch> front_;
  std::vector<Program> programs_;
  std::vector<Descent> descents_;
};

// Place a program's tensors; whether they fit.  Where some are reloaded, what transfers need beside
// is left out as far as it does not fit.
bool ArenaSearch::Fits(const Timeline& timeline, int patience) {
  if (timeline.Peak() > budget_) return false;
  std::vector<int32_t> sequence = timeline.Sequence();
  if (plan_.feasible && patience_ >= patience && placed_ == sequence) {
    return plan_.arena_bytes <= budget_;
  }
  placed_ = std::move(sequence);
  patience_ = patience;
  const auto reload = [&](int32_t op) { return model_.IsReload(op); };
  const bool reloads = std::any_of(placed_.begin(), placed_.end(), reload);
  for (int percent : kTransferLimits) {
    if (reloads && Place(timeline, patience, budget_ / 100 * percent)) return true;
  }
  const bool fits = Place(timeline, patience, 0);
  least_ = std::min(least_, plan_.arena_bytes);
  return fits;
}

// A greedy placement, repaired where it is not within a percent of the live bytes nor within the
// budget, and searched for where the buffers are few.  `limit`: see PlanTransfers.
bool ArenaSearch::Place(const Timeline& timeline, int patience, int64_t limit) {
  const int64_t enough = timeline.time() > model_.base_time ? budget_ : 0;
  TransferPlan transfers = PlanTransfers(model_, timeline, tier_, limit);
  const Buffers& buffers = transfers.buffers;
  std::vector<int64_t> offsets;
  plan_.arena_bytes = PlanOffsetsWithin(buffers.lower, buffers.upper, buffers.size, -1,
                                        Effort(patience, enough), &offsets);
  plan_.versions = buffers.versions;
  for (std::size_t i = 0; i < plan_.versions.size(); ++i) {
    plan_.versions[i].offset = offsets[buffers.buffer[i]];
  }
  plan_.sequence.clear();
  for (int32_t op : placed_) {
    if (!model_.IsReload(op)) plan_.sequence.push_back(op);
  }
  plan_.transfers = std::move(transfers.transfers);
  plan_.live_peak_bytes = LiveBytes(buffers);
  plan_.time_ns = transfers.time_ns;
  plan_.stall_ns = transfers.stall_ns;
  plan_.feasible = true;
  return plan_.arena_bytes <= budget_;
}

// Place the fastest program of the front.
bool ArenaSearch::PlaceProgram() {
  const auto faster = [](const Program& a, const Program& b) { return a.time < b.time; };
  const auto at = std::min_element(programs_.begin(), programs_.end(), faster);
  const Program program = std::move(*at);
  programs_.erase(at);
  front_->search.timeline.Assign(program.windows);
  return Fits(front_->search.timeline, program.patience);
}

// Place a chain's program; where that does not fit, go down a rung.
bool ArenaSearch::GoDown(Descent* descent) {
  if (!descent->chain) {
    descent->chain = std::make_unique<Chain>(model_, descent->style, bound_);
    descent->refused = true;  // the program without recomputation
  }
  Chain& chain = *descent->chain;
  if (!descent->refused) {
    if (Fits(chain.search.timeline, kPatience)) return true;
    descent->refused = true;
  }
  descent->time = chain.Descend() ? chain.time() : INT64_MAX;
  descent->refused = chain.search.timeline.Peak() > budget_;
  return false;
}

bool ArenaSearch::Search() {
  if (Fits(Timeline(model_), kPatience)) return true;
  front_ = std::make_unique<FrontSearch>(model_, effort_, budget_);
  const Timeline& timeline = front_->search.timeline;
  front_->found = [&] {
    if (timeline.Peak() > budget_) return;
    programs_.push_back({timeline.time(), timeline.windows(), Patience(*front_)});
  };
  const int64_t first = std::max(model_.base_time, front_->bound());
  for (const ChainStyle& style : ChainStyles(model_, effort_)) {
    descents_.push_back({style, nullptr, false, first});
  }
  while (true) {
    int64_t time = front_->NextTime();
    for (const Descent& descent : descents_) time = std::min(time, descent.time);
    int64_t waiting = INT64_MAX;
    for (const Program& program : programs_) waiting = std::min(waiting, program.time);
    if (waiting == INT64_MAX && time == INT64_MAX) return false;
    if (waiting <= time) {
      if (PlaceProgram()) return true;
    } else if (front_->NextTime() == time) {
      front_->Next();
    } else {
      const auto next = [&](const Descent& descent) { return descent.time == time; };
      if (GoDown(&*std::find_if(descents_.begin(), descents_.end(), next))) return true;
    }
  }
}

// Where nothing fits: the least arena that other programs of the sources need.
void ArenaSearch::FindLeast() {
  const auto note = [&](const Timeline& timeline, int patience, int64_t at_least) {
    if (std::max(timeline.Peak(), at_least) >= least_) return;
    const Buffers buffers = CollectBuffers(model_, timeline);
    std::vector<int64_t> offsets;
    const int64_t height =
        PlanOffsetsWithin(buffers.lower, buffers.upper, buffers.size, -1,
                          Effort(patience, 0), &offsets);
    least_ = std::min(least_, std::max(height, at_least));
  };
  for (const Descent& descent : descents_) note(descent.chain->search.timeline, kPatience, 0);
  front_->found = [&] {
    note(front_->search.timeline, Patience(*front_), front_->shown_limit());
  };
  front_->ShowRest();
}

ArenaPlan ArenaSearch::Run(bool needs_least) {
  const bool is_hopeless = bound_ > budget_ && !needs_least;
  if (is_hopeless || !Search()) {
    if (needs_least) FindLeast();
    plan_ = ArenaPlan();
    if (needs_least) plan_.least_bytes = least_;
  }
  plan_.lower_bound_bytes = bound_;
  return std::move(plan_);
}

Model WithTier(const PlannerGraph& graph, const TierModel& tier, const Trial& trial) {
  Model model(graph, tier, trial.exposed, trial.early);
  model.resident_bytes = 0;
  return model;
}

// The faster plan, or the one that shows a smaller arena to be enough.
bool Better(const ArenaPlan& plan, const ArenaPlan& best) {
  if (plan.feasible != best.feasible) return plan.feasible;
  return plan.feasible ? plan.time_ns < best.time_ns : plan.least_bytes < best.least_bytes;
}

}  // namespace

ArenaPlan PlanArena(const PlannerGraph& graph, int64_t arena_budget, int64_t alignment,
                    int effort, const TierModel* tier, bool needs_least) {
  const PlannerGraph rounded = Rounded(graph, alignment);
  TierModel alone;  // of which nothing is reloaded
  alone.least_bytes = kUnlimited;
  alone.recompute = tier == nullptr || tier->recompute;
  Model model = WithTier(rounded, alone, kTrials[0]);
  ArenaPlan best = ArenaSearch(model, arena_budget, effort, alone).Run(needs_least);
  if (tier == nullptr) return best;
  best.lower_bound_bytes = LowerBound(WithTier(rounded, *tier, kTrials[0]));
  if (best.feasible && best.sequence.size() == rounded.ops.size()) return best;
  const int64_t bound = best.lower_bound_bytes;
  for (const Trial& trial : kTrials) {
    model = WithTier(rounded, *tier, trial);
    const int64_t room = std::max<int64_t>(0, arena_budget - tier->buffer_bytes);
    ArenaPlan plan = ArenaSearch(model, room, effort, *tier).Run(needs_least);
    if (!plan.feasible && needs_least) plan.least_bytes += tier->buffer_bytes;
    if (Better(plan, best)) best = std::move(plan);
  }
  best.lower_bound_bytes = bound;
  best.tier_bytes = PlanSlots(model, best.versions, kSlotAlignment, &best.transfers);
  return best;
}

}  // namespace relax_disc
