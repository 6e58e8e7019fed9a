#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "runtime/session.h"
#include "kernels/parallel.h"
#include "kernels/workspace.h"
#include "planner/remainder.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

Frame::~Frame() {
  transfers_ = nullptr;
  state_ = nullptr;
  if (session_ != nullptr && !finished_) session_->Return(this);
}

void Frame::Bind() {
  const Metadata& metadata = session_->metadata();
  if (static_cast<int32_t>(given_.size()) < metadata.given_count) {
    TVM_FFI_THROW(ValueError) << metadata.function << " takes " << metadata.given_count
                              << " tensors, got " << given_.size();
  }
  for (size_t i = 0; i < given_.size(); ++i) {
    if (given_[i].defined() && !IsInFile(i)) resident_bytes_ += BytesOf(given_[i]);
  }
  const Backing backing = mode_ == Mode::kDryRun ? Backing::kReserved : Backing::kReal;
  for (int32_t first : binding_->escaping()) {
    const ViewEntry& view = metadata.views[first];
    const int64_t bytes =
        RoundUp(plan_->values[metadata.tensors[view.tensor].bytes], metadata.machine.alignment);
    escaping_.push_back(ViewOfBlock(MemoryBlock::Allocate(arena_->device(), bytes, backing), 0,
                                    ShapeAt(view.shape, plan_->values), view.dtype));
    escaping_bytes_ += bytes;
  }
  binding_->Pass(given_, escaping_);
  if (mode_ == Mode::kDryRun) return;
  TakeOverflow();  // what was called outside of programs took is no part of this one's peak
  if (!plan_->arena.transfers.empty()) BeginTransfers();
  if (!plan_->state.windows.empty()) {
    state_ = std::make_unique<StateMover>(state_file_, plan_->state, given_);
  }
}

// Of a dry run the tensors have no memory at all.
bool Frame::IsInFile(size_t given) const {
  if (state_file_ == nullptr || given >= session_->in_file_.size() || !session_->in_file_[given]) {
    return false;
  }
  if (mode_ == Mode::kDryRun) return true;
  if (state_file_->Holds(given_[given].data_ptr(), BytesOf(given_[given]))) return true;
  TVM_FFI_THROW(InternalError) << session_->metadata().function << ": tensor " << given
                               << " should lie in the offload folder";
  return false;
}

void Frame::BeginTransfers() {
  transfers_ = tier_->Begin(*arena_, plan_->arena.tier_bytes);
  const std::vector<Transfer>& transfers = plan_->arena.transfers;
  waits_.resize(transfers.size());
  for (size_t i = 0; i < transfers.size(); ++i) waits_[i] = static_cast<int32_t>(i);
  std::stable_sort(waits_.begin(), waits_.end(), [&](int32_t a, int32_t b) {
    return transfers[a].wait < transfers[b].wait;
  });
}

void Frame::Request(int32_t position, bool is_read) {
  const ArenaPlan& arena = plan_->arena;
  const Metadata& metadata = session_->metadata();
  while (requests_.size() < arena.transfers.size()) {
    const Transfer& transfer = arena.transfers[requests_.size()];
    if (transfer.start != position || transfer.is_read != is_read) break;
    const Version& version = arena.versions[transfer.version];
    const int64_t bytes = Values()[metadata.tensors[version.tensor].bytes];
    char* memory = arena_->base() + version.offset;
    if (is_read) {
      const int64_t end = version.offset + RoundUp(bytes, metadata.machine.alignment);
      arena_peak_ = std::max(arena_peak_, end);
      report_.reloaded_bytes += bytes;
      requests_.push_back(transfers_->Read(memory, bytes, transfer.slot));
    } else {
      report_.offloaded_bytes += bytes;
      requests_.push_back(transfers_->Write(memory, bytes, transfer.slot));
    }
  }
}

// Wait for what must be done before a position, as far as it has been requested.
void Frame::WaitFor(int32_t position) {
  const std::vector<Transfer>& transfers = plan_->arena.transfers;
  while (next_wait_ < waits_.size()) {
    const size_t transfer = static_cast<size_t>(waits_[next_wait_]);
    if (transfers[transfer].wait > position || transfer >= requests_.size()) break;
    transfers_->Wait(requests_[transfer]);
    ++next_wait_;
  }
}

// First the memory that reads at this position go to must be free.
void Frame::MoveBefore(int32_t position) {
  auto start = std::chrono::steady_clock::now();
  WaitFor(position);
  Request(position, true);
  WaitFor(position);
  report_.waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(
                           std::chrono::steady_clock::now() - start)
                           .count();
}

void Frame::MoveState(int32_t position) {
  auto start = std::chrono::steady_clock::now();
  state_->Before(position);
  report_.waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(
                           std::chrono::steady_clock::now() - start)
                           .count();
}

void Frame::Kernel(int64_t k, const ffi::Function& function) {
  const std::vector<Step>& steps = Bound().steps();
  const Step& step = steps[position_];
  if (step.kernel != k || binding_->first_position()[k] != position_) {
    TVM_FFI_THROW(InternalError) << session_->metadata().function << ": kernel " << k
                                 << " is called where the plan has kernel " << step.kernel;
  }
  ffi::Function& known = session_->functions_[k];
  if (!known.defined() && mode_ != Mode::kDryRun) known = function;
  Execute(step, steps[position_ + 1]);
}

void Frame::Regenerate(int64_t k) {
  const std::vector<Step>& steps = Bound().steps();
  const int32_t until = binding_->first_position()[k];
  while (position_ < until) {
    Execute(steps[position_], steps[position_ + 1]);
    ++report_.recomputations;
  }
}

void Frame::Execute(const Step& step, const Step& next) {
  arena_peak_ = std::max(arena_peak_, step.arena_end);
  const int32_t position = position_++;
  if (mode_ == Mode::kDryRun) return;
  if (transfers_ != nullptr) MoveBefore(position);
  if (state_ != nullptr) MoveState(position);
  Call(step, next);
  if (transfers_ != nullptr) Request(position, false);
  if (state_ != nullptr) state_->After(position);
}

void Frame::Call(const Step& step, const Step& next) {
  const KernelEntry& kernel = session_->metadata().kernels[step.kernel];
  wrote_given_ = wrote_given_ || kernel.overwrites;
  const ffi::AnyView* values = binding_->values();
  for (int32_t i = step.first_copy; i < step.first_argument; i += 2) {
    CopyBytes(values[i].cast<ffi::Tensor>(), values[i + 1].cast<ffi::Tensor>());
  }
  SerialScope serial(plan_->is_small[step.kernel]);
  std::optional<LentWorkspace> lent;
  if (session_->metadata().machine.lends_memory) {
    lent.emplace(arena_->base() + step.workspace_offset, plan_->workspaces[step.kernel]);
  }
  const ffi::Function& function = session_->functions_[step.kernel];
  ffi::PackedArgs arguments(values + step.first_argument, next.first_copy - step.first_argument);
  ffi::Any result;
  if (mode_ != Mode::kProfile) {
    function.CallPacked(arguments, &result);
    if (kernel.counts >= 0) Count(kernel.counts, result.cast<int64_t>());
    return;
  }
  auto start = std::chrono::steady_clock::now();
  function.CallPacked(arguments, &result);
  if (kernel.counts >= 0) Count(kernel.counts, result.cast<int64_t>());
  if (arena_->device().device_type != kDLCPU) {  // there a call only begins the kernel
    ffi::Function::GetGlobalRequired("relax_disc.device_synchronize")(arena_->device());
  }
  auto end = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> lock(session_->mutex_);
  session_->kernel_ns_[step.kernel] +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
  ++session_->kernel_runs_[step.kernel];
}

// A dim that was entered with its bound gets its size, and with it whatever is made of it.
void Frame::Count(int32_t dim, int64_t count) {
  const Metadata& metadata = session_->metadata();
  if (is_known_.empty()) {
    is_known_.assign(dims_.size(), 1);
    for (const KernelEntry& kernel : metadata.kernels) {
      if (kernel.counts >= 0) is_known_[kernel.counts] = 0;
    }
  }
  if (is_known_[dim]) {
    if (count == dims_[dim]) return;
    TVM_FFI_THROW(ShapeRangeError)
        << metadata.function << ": " << metadata.dims[dim] << " is " << dims_[dim] << " and "
        << count << ": the model combines what two masks select, which must be as much";
  }
  if (count < 0 || count > plan_->dims[dim]) {
    TVM_FFI_THROW(InternalError) << metadata.function << ": " << metadata.dims[dim] << " is "
                                 << count << ", beyond its bound of " << plan_->dims[dim];
  }
  is_known_[dim] = 1;
  const bool is_less = count < dims_[dim];
  if (is_less) {
    dims_[dim] = count;
    counted_ = metadata.Evaluate(dims_);
  }
  CheckCounts(dim);
  if (!is_less) return;
  if (!PlanRest()) binding_->Resize(counted_);
  binding_->Pass(given_, escaping_);
}

// Look at what the model needs of a dim and of those that were counted before it.
void Frame::CheckCounts(int32_t dim) const {
  const Metadata& metadata = session_->metadata();
  const std::vector<int64_t>& values = Values();
  for (const CountCheck& check : metadata.count_checks) {
    const std::vector<int32_t>& dims = check.dims;
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) continue;
    if (!std::all_of(dims.begin(), dims.end(), [&](int32_t d) { return is_known_[d]; })) continue;
    const int64_t size = values[check.size], limit = values[check.limit];
    if (check.is_inequality ? size != limit : size <= limit) continue;
    std::ostringstream sizes;
    for (int32_t each : dims) {
      sizes << (each == dims.front() ? "" : ", ") << metadata.dims[each] << " is " << dims_[each];
    }
    TVM_FFI_THROW(ShapeRangeError)
        << "The model " << check.message << "; for this batch " << sizes.str();
  }
}

// The plan was made for the bound.  What it computes again for want of memory is left out from here
// on as far as it fits now.  Transfers are under way by position and stay as they were planned.
bool Frame::PlanRest() {
  const Metadata& metadata = session_->metadata();
  const size_t count = plan_->arena.sequence.size();
  if (count == metadata.kernels.size()) return false;
  if (!plan_->arena.transfers.empty() || !plan_->state.windows.empty()) return false;
  auto start = std::chrono::steady_clock::now();
  const PlannerGraph graph = session_->GraphFor(dims_);
  auto rest = std::make_shared<Plan>(*plan_);
  rest->arena = PlanRemainder(graph, plan_->arena, position_ - 1);
  const bool is_shorter = rest->arena.sequence.size() < count;
  if (is_shorter) {
    rest->dims = dims_;
    rest->values = counted_;
    for (size_t k = 0; k < graph.ops.size(); ++k) {
      rest->workspaces[k] = std::min(rest->workspaces[k], graph.ops[k].workspace);
    }
    plan_ = rest;
    std::lock_guard<std::mutex> lock(session_->mutex_);
    earlier_.push_back(std::move(binding_));  // its step is still running
    binding_ = session_->TakeBinding(plan_, arena_);
  }
  replanning_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now() - start)
                        .count();
  return is_shorter;
}

void Frame::Supply(int64_t i, const ffi::Tensor& tensor) {
  Bound();
  paused_ = false;
  given_.at(i) = tensor;
  resident_bytes_ += BytesOf(tensor);
  binding_->Pass(given_, escaping_);
}

ffi::Tensor Frame::Output(int64_t i) const {
  return Bound().Output(i, given_, escaping_, Values());
}

const Binding& Frame::Bound() const {
  if (binding_ == nullptr) {
    TVM_FFI_THROW(InternalError) << session_->metadata().function << ": the call has ended";
  }
  return *binding_;
}

void Frame::Leave() {
  if (transfers_ != nullptr) MoveBefore(position_);
  transfers_ = nullptr;
  report_.state_window_bytes = plan_->state.peak_bytes;
  if (state_ != nullptr) {
    state_->Finish();
    report_.state_window_bytes = state_->peak_bytes();
    state_ = nullptr;
  }
  report_.offloaded_state_bytes = plan_->state.file_bytes;
  report_.dims = dims_;
  report_.budget_bytes = plan_->budget_bytes;
  report_.planned_peak_bytes = plan_->peak_bytes();
  report_.arena_bytes = arena_peak_;
  report_.escaping_bytes = escaping_bytes_;
  report_.resident_bytes = resident_bytes_;
  const int64_t overflow = TakeOverflow();
  report_.workspace_bytes = plan_->workspace_bytes + overflow;
  report_.peak_bytes =
      arena_peak_ + escaping_bytes_ + resident_bytes_ + overflow + plan_->library_bytes +
      plan_->buffer_bytes + report_.state_window_bytes;
  report_.planning_ns = replanning_ns_ + (report_.cache_hit ? 0 : plan_->planning_ns);
  report_.time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now() - start_)
                        .count();
  finished_ = true;
  session_->Return(this);
}

}  // namespace relax_disc
