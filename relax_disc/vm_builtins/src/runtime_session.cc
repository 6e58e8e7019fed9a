#include "runtime_session.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <string>

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {
// A binding takes about 100 bytes an argument; shapes that come back soon keep theirs.
constexpr size_t kBindingLimit = 16;
}  // namespace

PlanPtr Session::Lookup(const Key& key, bool* hit) {
  auto found = plans_.find(key);
  if (hit != nullptr) *hit = found != plans_.end();
  if (found != plans_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second.use);
    return found->second.plan;
  }
  PlanRequest request;
  request.dims = key.first;
  request.budget_bytes = key.second;
  request.alignment = metadata_.alignment;
  PlanPtr plan = MakePlan(metadata_, cost_, request);
  recent_.push_front(key);
  plans_[key] = {plan, nullptr, recent_.begin()};
  while (plans_.size() > plan_limit_) {
    bound_.remove(recent_.back());
    plans_.erase(recent_.back());
    recent_.pop_back();
    ++counters_.evicted_plans;
  }
  return plan;
}

PlanPtr Session::PlanFor(const std::vector<int64_t>& dims, int64_t budget_bytes, bool* hit) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (dims.size() != metadata_.dims.size()) {
    TVM_FFI_THROW(ValueError) << metadata_.function << " has " << metadata_.dims.size()
                              << " dims, got " << dims.size();
  }
  return Lookup({dims, budget_bytes}, hit);
}

void Session::CheckBudget(const std::vector<int64_t>& dims) {
  PlanPtr plan = PlanFor(dims, budget_bytes_);
  if (!plan->feasible) RefuseBudget(*plan);
}

void Session::RefuseBudget(const Plan& plan) const {
  const int64_t outside = plan.resident_bytes + plan.escaping_bytes;
  std::string shape;
  for (size_t i = 0; i < plan.dims.size(); ++i) {
    shape += (i > 0 ? ", " : "") + metadata_.dims[i] + "=" + std::to_string(plan.dims[i]);
  }
  const int64_t least = outside + (plan.arena.feasible ? plan.arena.arena_bytes
                                                       : plan.arena.least_bytes);
  const int64_t bound = outside + plan.arena.lower_bound_bytes;
  TVM_FFI_THROW(MemoryBudgetError)
      << metadata_.function << " at " << shape << " does not fit into the memory budget of "
      << plan.budget_bytes << " bytes: the least found feasible is " << least << " bytes, of which "
      << outside << " are parameters, inputs and results; no plan can do with less than " << bound
      << " bytes. Raise the budget or lower the shape.";
}

ffi::ObjectPtr<Frame> Session::Enter(const std::vector<int64_t>& dims,
                                     std::vector<ffi::Tensor> given) {
  auto start = std::chrono::steady_clock::now();
  ffi::ObjectPtr<Frame> frame = ffi::make_object<Frame>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counters_.calls;
    bool hit = false;
    PlanPtr plan = Lookup({dims, budget_bytes_}, &hit);
    ++(hit ? counters_.hits : counters_.misses);
    if (!plan->feasible) RefuseBudget(*plan);
    for (const ffi::Tensor& tensor : given) {
      if (tensor.device().device_type != kDLCPU) device_ = tensor.device();
    }
    frame->plan_ = plan;
    frame->mode_ = mode_;
    frame->report_.cache_hit = hit;
    TakeArena(frame.get());
    frame->session_ = ffi::details::ObjectUnsafe::ObjectPtrFromUnowned<Session>(this);
    frame->binding_ = TakeBinding(plan, frame->arena_, frame->taken_from_ != nullptr);
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
  const int64_t wanted = frame->plan_->arena.arena_bytes;
  const Backing backing = mode_ == Mode::kDryRun ? Backing::kReserved : Backing::kReal;
  std::lock_guard<std::mutex> lock(arena_->mutex);
  BlockPtr& block = arena_->block;
  if (arena_->taken || backing == Backing::kReserved) {
    frame->arena_ = MemoryBlock::Allocate(device_, wanted, backing);
    return;
  }
  const bool same_device = block != nullptr && block->device().device_type == device_.device_type &&
                           block->device().device_id == device_.device_id;
  const int64_t outside = frame->plan_->resident_bytes + frame->plan_->escaping_bytes;
  const bool breaks_budget = block != nullptr && budget_bytes_ >= 0 &&
                             outside + block->bytes() > budget_bytes_;
  if (!same_device) {
    if (block != nullptr) block->Resize(0);  // bindings may keep the block, never its memory
    block = nullptr;
    block = MemoryBlock::Allocate(device_, wanted, Backing::kReal);
  } else if (block->bytes() < wanted || breaks_budget) {
    block->Resize(wanted);
  }
  frame->arena_ = block;
  frame->taken_from_ = arena_;
  arena_->taken = true;
}

std::shared_ptr<Binding> Session::TakeBinding(const PlanPtr& plan, const BlockPtr& arena,
                                              bool primary) {
  if (primary) {
    auto found = plans_.find({plan->dims, plan->budget_bytes});
    if (found != plans_.end() && found->second.binding != nullptr) {
      std::shared_ptr<Binding> kept = std::move(found->second.binding);
      found->second.binding = nullptr;
      bound_.remove(found->first);
      if (kept->base == arena->base() && kept->plan == plan) return kept;
    }
  }
  auto binding = std::make_shared<Binding>();
  binding->plan = plan;
  binding->base = arena->base();
  binding->arena_views.reserve(plan->arena_views.size());
  for (const PlacedView& placed : plan->arena_views) {
    const ViewEntry& view = metadata_.views[placed.view];
    std::vector<int64_t> shape = ShapeAt(view.shape, plan->values);
    binding->arena_views.push_back(ViewOfBlock(arena, placed.offset, shape, view.dtype));
  }
  auto fill = [&](const std::vector<ArgumentSource>& sources, std::vector<ffi::AnyView>* values,
                  std::vector<std::pair<int32_t, int32_t>>* patches) {
    values->resize(sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
      const ArgumentSource& source = sources[i];
      const int32_t at = static_cast<int32_t>(i), entry = static_cast<int32_t>(source.value);
      switch (source.kind) {
        case ArgumentSource::kArenaView: (*values)[i] = binding->arena_views[entry]; break;
        case ArgumentSource::kInteger: (*values)[i] = source.value; break;
        case ArgumentSource::kConstant: (*values)[i] = plan->constants[entry]; break;
        case ArgumentSource::kGivenView: patches->emplace_back(at, entry); break;
        case ArgumentSource::kEscapingView: patches->emplace_back(at, -1 - entry); break;
      }
    }
  };
  fill(plan->arguments, &binding->arguments, &binding->patches);
  fill(plan->copies, &binding->copies, &binding->copy_patches);
  return binding;
}

void Session::Return(Frame* frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (frame->taken_from_ != nullptr) {
    {
      std::lock_guard<std::mutex> arena_lock(frame->taken_from_->mutex);
      frame->taken_from_->taken = false;
    }
    auto found = plans_.find({frame->plan_->dims, frame->plan_->budget_bytes});
    const bool current = found != plans_.end() && found->second.plan == frame->plan_;
    if (current && frame->binding_ != nullptr && found->second.binding == nullptr) {
      found->second.binding = std::move(frame->binding_);
      bound_.push_front(found->first);
      while (bound_.size() > kBindingLimit) {
        plans_.at(bound_.back()).binding = nullptr;
        bound_.pop_back();
      }
    }
  }
  if (!frame->finished_) {
    ++counters_.failures;
    torn_ = torn_ || frame->wrote_given_;
  }
  counters_.recomputations += frame->report_.recomputations;
  frame->report_.finished = frame->finished_;
  frame->report_.held_bytes = HeldBytes();
  last_ = frame->report_;
}

void Session::SetBudget(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  budget_bytes_ = bytes;
}

void Session::SetMode(Mode mode) {
  std::lock_guard<std::mutex> lock(mutex_);
  mode_ = mode;
  if (mode == Mode::kProfile) {
    std::fill(kernel_ns_.begin(), kernel_ns_.end(), 0);
    std::fill(kernel_runs_.begin(), kernel_runs_.end(), 0);
  }
}

void Session::SetCostModel(CostModel cost) {
  std::lock_guard<std::mutex> lock(mutex_);
  cost_ = std::move(cost);
  plans_.clear();
  recent_.clear();
  bound_.clear();
}

void Session::SetPlanLimit(int64_t plans) {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_limit_ = static_cast<size_t>(std::max<int64_t>(plans, 1));
}

void Session::Release() {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.clear();
  recent_.clear();
  bound_.clear();
  GiveArenaBack();
}

void Session::GiveArenaBack() {
  std::lock_guard<std::mutex> lock(arena_->mutex);
  if (arena_->taken || arena_->block == nullptr) return;
  arena_->block->Resize(0);  // bindings of other sessions may keep the block, never its memory
  arena_->block = nullptr;
}

void Session::ShareArena(Session* other) {
  if (other == this) return;
  std::shared_ptr<SharedArena> arena;
  {
    std::lock_guard<std::mutex> lock(other->mutex_);
    arena = other->arena_;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (arena == arena_) return;
  for (const Key& key : bound_) plans_.at(key).binding = nullptr;
  bound_.clear();
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
  return HeldBytes();
}

int64_t Session::HeldBytes() const {
  std::lock_guard<std::mutex> lock(arena_->mutex);
  return arena_->block != nullptr ? arena_->block->bytes() : 0;
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
