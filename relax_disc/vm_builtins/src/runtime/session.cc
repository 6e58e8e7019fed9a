#include "runtime/session.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>

#include "kernels/parallel.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {
// A binding takes some 100 bytes an argument.  One serves all shapes without a budget; under one,
// the shapes that come back soon find theirs.
constexpr size_t kBindingLimit = 4;
}  // namespace

PlanPtr Session::Lookup(const std::vector<int64_t>& dims, int64_t budget_bytes, bool* hit,
                        bool needs_least) {
  const int threads = NumThreads();
  const Key key{dims, budget_bytes, threads};
  auto found = plans_.find(key);
  const bool is_known =
      found != plans_.end() && (found->second.plan->has_least || !needs_least);
  if (hit != nullptr) *hit = is_known;
  if (found != plans_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second.use);
    if (is_known) return found->second.plan;
  }
  TierModel figures;
  const bool may_offload = tier_ != nullptr && budget_bytes >= 0;
  if (may_offload) figures = tier_->Figures();
  StateModel state{in_file_, {}};
  if (state_file_ != nullptr) state.speeds = state_tier_->Figures();
  PlanPtr plan = MakePlan(metadata_, CostFor(threads), dims, budget_bytes, threads,
                          may_offload ? &figures : nullptr,
                          state_file_ != nullptr ? &state : nullptr, needs_least);
  if (found != plans_.end()) {
    found->second.plan = plan;
    return plan;
  }
  recent_.push_front(key);
  plans_[key] = {plan, recent_.begin()};
  while (plans_.size() > plan_limit_) {
    plans_.erase(recent_.back());
    recent_.pop_back();
    ++counters_.evicted_plans;
  }
  return plan;
}

PlanPtr Session::PlanFor(const std::vector<int64_t>& dims, int64_t budget_bytes, bool* hit,
                         bool needs_least) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (dims.size() != metadata_.dims.size()) {
    TVM_FFI_THROW(ValueError) << metadata_.function << " has " << metadata_.dims.size()
                              << " dims, got " << dims.size();
  }
  return Lookup(dims, budget_bytes, hit, needs_least);
}

void Session::CheckBudget(const std::vector<int64_t>& dims) {
  PlanPtr plan = PlanFor(dims, budget_bytes_);
  if (!plan->feasible) RefuseBudget(*plan);
}

void Session::RefuseBudget(const Plan& plan) const {
  const int64_t outside = plan.outside_bytes();
  std::string shape;
  for (size_t i = 0; i < plan.dims.size(); ++i) {
    shape += (i > 0 ? ", " : " at ") + metadata_.dims[i] + "=" + std::to_string(plan.dims[i]);
  }
  const int64_t least = plan.least_bytes(), bound = outside + plan.arena.lower_bound_bytes;
  std::ostringstream text;
  text << metadata_.function << shape << " does not fit into the memory budget of "
       << plan.budget_bytes << " bytes: the least found feasible is " << least << " bytes, of which "
       << outside << " are parameters, inputs and results; no plan can do with less than "
       << bound << " bytes. Raise the budget or lower the shape";
  if (tier_ == nullptr && !offer_.empty()) text << ", or " << offer_;
  text << ".";
  const TVMFFIByteArray* trace = TVMFFIBacktrace(__FILE__, __LINE__, TVM_FFI_FUNC_SIG, 0);
  throw ffi::Error("MemoryBudgetError", text.str(), std::string(trace->data, trace->size),
                   std::nullopt,
                   ffi::Map<ffi::String, int64_t>{{"least_bytes", least},
                                                  {"lower_bound_bytes", bound}});
}

ffi::ObjectPtr<Frame> Session::Enter(const std::vector<int64_t>& dims,
                                     std::vector<ffi::Tensor> given) {
  auto start = std::chrono::steady_clock::now();
  ffi::ObjectPtr<Frame> frame = ffi::make_object<Frame>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counters_.calls;
    bool hit = false;
    PlanPtr plan = Lookup(dims, budget_bytes_, &hit);
    ++(hit ? counters_.hits : counters_.misses);
    if (!plan->feasible) RefuseBudget(*plan);
    for (const ffi::Tensor& tensor : given) {
      if (tensor.defined() && tensor.device().device_type != kDLCPU) device_ = tensor.device();
    }
    frame->plan_ = plan;
    frame->dims_ = plan->dims;
    frame->tier_ = tier_;
    frame->state_file_ = state_file_;
    frame->mode_ = mode_;
    frame->report_.cache_hit = hit;
    TakeArena(frame.get());
    frame->session_ = ffi::details::ObjectUnsafe::ObjectPtrFromUnowned<Session>(this);
    frame->binding_ = TakeBinding(plan, frame->arena_);
  }
  frame->given_ = std::move(given);
  frame->start_ = start;
  frame->Bind();
  frame->report_.entry_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                std::chrono::steady_clock::now() - start)
                                .count();
  return frame;
}

void Session::TakeArena(Frame* frame) {
  const Plan& plan = *frame->plan_;
  const ArenaNeed need{device_, plan.arena.arena_bytes,
                       budget_bytes_ < 0 ? -1 : budget_bytes_ - plan.outside_bytes()};
  if (mode_ == Mode::kDryRun) {
    frame->arena_ = MemoryBlock::Allocate(need.device, need.arena_bytes, Backing::kReserved);
  } else if (arena_->Take(need, &frame->arena_)) {
    frame->taken_from_ = arena_;
  } else {
    frame->arena_ = MemoryBlock::Allocate(need.device, need.arena_bytes, Backing::kReal);
  }
}

std::unique_ptr<Binding> Session::TakeBinding(const PlanPtr& plan, const BlockPtr& arena) {
  auto chosen = std::find_if(bindings_.begin(), bindings_.end(), [&](const auto& kept) {
    return kept->Holds(plan, arena->base());
  });
  if (chosen == bindings_.end()) {
    chosen = std::find_if(bindings_.begin(), bindings_.end(),
                          [&](const auto& kept) { return kept->Serves(*plan); });
  }
  std::unique_ptr<Binding> binding;
  if (chosen != bindings_.end()) {
    binding = std::move(*chosen);
    bindings_.erase(chosen);
  } else {
    binding = std::make_unique<Binding>(metadata_, *plan);
  }
  if (!binding->Holds(plan, arena->base())) binding->Fill(plan, *arena);
  return binding;
}

void Session::Return(Frame* frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (frame->taken_from_ != nullptr) frame->taken_from_->Return();
  frame->arena_ = nullptr;
  std::vector<std::unique_ptr<Binding>> returned = std::move(frame->earlier_);
  if (frame->binding_ != nullptr) returned.push_back(std::move(frame->binding_));
  for (std::unique_ptr<Binding>& binding : returned) {
    bindings_.push_front(std::move(binding));
    if (bindings_.size() > kBindingLimit) bindings_.pop_back();
  }
  const bool abandoned = frame->paused_ && !frame->finished_;  // its second half is not wanted
  if (!frame->finished_ && !abandoned) {
    ++counters_.failures;
    torn_ = torn_ || frame->wrote_given_;
  }
  counters_.recomputations += frame->report_.recomputations;
  frame->report_.finished = frame->finished_;
  frame->report_.held_bytes = arena_->held_bytes();
  if (!abandoned) last_ = frame->report_;
}

void Session::SetBudget(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  budget_bytes_ = bytes;
  // Nothing in the arena outlives a call, so what would break the budget goes at once.
  if (bytes >= 0) arena_->GiveBackAbove(bytes - last_.resident_bytes - last_.escaping_bytes);
}

void Session::SetTier(TierPtr tier) {
  std::lock_guard<std::mutex> lock(mutex_);
  tier_ = std::move(tier);
  DropPlans();
}

void Session::SetOffer(std::string offer) {
  std::lock_guard<std::mutex> lock(mutex_);
  offer_ = std::move(offer);
}

void Session::SetState(StateFilePtr file, TierPtr tier, const std::vector<int64_t>& given) {
  std::lock_guard<std::mutex> lock(mutex_);
  state_file_ = std::move(file);
  state_tier_ = std::move(tier);
  in_file_.assign(metadata_.given_count, 0);
  for (int64_t index : given) in_file_.at(index) = 1;
  DropPlans();
}

void Session::SetMode(Mode mode) {
  std::lock_guard<std::mutex> lock(mutex_);
  mode_ = mode;
  if (mode == Mode::kProfile) {
    std::fill(kernel_ns_.begin(), kernel_ns_.end(), 0);
    std::fill(kernel_runs_.begin(), kernel_runs_.end(), 0);
  }
}

const CostModel& Session::CostFor(int threads) const {
  return costs_.at(costs_.count(threads) > 0 ? threads : 0);
}

PlannerGraph Session::GraphFor(const std::vector<int64_t>& dims) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const int threads = NumThreads();
  return GraphAt(metadata_, CostFor(threads), metadata_.Evaluate(dims), threads);
}

std::vector<double> Session::Work(const std::vector<int64_t>& dims) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<int64_t> values = metadata_.Evaluate(dims);
  std::vector<double> work;
  for (const KernelEntry& kernel : metadata_.kernels) {
    work.push_back(costs_.at(0).Work(values[kernel.flops], values[kernel.moved_bytes]));
  }
  return work;
}

void Session::SetCostModel(int threads, CostModel cost) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (threads == 0) costs_.clear();
  costs_[threads] = std::move(cost);
  DropPlans();
}

void Session::DropPlans() {
  plans_.clear();
  recent_.clear();
  bindings_.clear();
}

void Session::SetPlanLimit(int64_t plans) {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_limit_ = static_cast<size_t>(std::max<int64_t>(plans, 1));
}

void Session::Release() {
  std::lock_guard<std::mutex> lock(mutex_);
  DropPlans();
  arena_->GiveBackAbove(0);
}

void Session::ShareArena(Session* other) {
  if (other == this) return;
  std::shared_ptr<SharedArena> arena;
  {
    std::lock_guard<std::mutex> lock(other->mutex_);
    arena = other->arena_;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  arena_ = std::move(arena);
}

Report Session::last_report() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

Counters Session::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

int64_t Session::held_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return arena_->held_bytes();
}

std::vector<int64_t> Session::arena() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return arena_->place();
}

int64_t Session::plan_count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(plans_.size());
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> Session::profile() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {kernel_runs_, kernel_ns_};
}

}  // namespace relax_disc
