#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <algorithm>

#include "runtime_session.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

bool SameShape(const ffi::Tensor& tensor, const std::vector<int64_t>& shape) {
  return tensor.ndim() == static_cast<int32_t>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), tensor.shape().begin());
}

int64_t BytesOf(const ffi::Tensor& tensor) {
  return static_cast<int64_t>(ffi::GetDataSize(tensor.numel(), tensor.dtype()));
}

}  // namespace

Frame::~Frame() {
  if (session_ != nullptr && !finished_) session_->Return(this);
}

void Frame::Bind() {
  const Metadata& metadata = session_->metadata();
  if (static_cast<int32_t>(given_.size()) < metadata.given_count) {
    TVM_FFI_THROW(ValueError) << metadata.function << " takes " << metadata.given_count
                              << " tensors, got " << given_.size();
  }
  for (const ffi::Tensor& tensor : given_) resident_bytes_ += BytesOf(tensor);
  const Backing backing = mode_ == Mode::kDryRun ? Backing::kReserved : Backing::kReal;
  given_views_.reserve(plan_->given_views.size());
  for (const OwnView& own : plan_->given_views) {
    const ffi::Tensor& tensor = given_[own.owner];
    given_views_.push_back(
        SameShape(tensor, own.shape)
            ? tensor
            : ViewOfTensor(tensor, own.shape, metadata.views[own.view].dtype));
  }
  std::vector<ffi::Tensor> whole(plan_->escaping_count, ffi::Tensor(ffi::UnsafeInit{}));
  for (const OwnView& own : plan_->escaping_views) {
    const ViewEntry& view = metadata.views[own.view];
    ffi::Tensor& tensor = whole[own.owner];
    if (!tensor.defined()) {
      const DLDevice device = arena_->device();
      const int64_t bytes =
          RoundUp(plan_->values[metadata.tensors[view.tensor].bytes], metadata.alignment);
      tensor = ViewOfBlock(MemoryBlock::Allocate(device, bytes, backing), 0, own.shape, view.dtype);
      escaping_bytes_ += bytes;
    }
    escaping_views_.push_back(
        SameShape(tensor, own.shape) ? tensor : ViewOfTensor(tensor, own.shape, view.dtype));
  }
  auto patch = [&](const std::vector<std::pair<int32_t, int32_t>>& patches,
                   std::vector<ffi::AnyView>* values) {
    for (const auto& [at, entry] : patches) {
      (*values)[at] = entry >= 0 ? given_views_[entry] : escaping_views_[-1 - entry];
    }
  };
  patch(binding_->patches, &binding_->arguments);
  patch(binding_->copy_patches, &binding_->copies);
}

void Frame::Kernel(int64_t k, const ffi::Function& function) {
  const Step& step = plan_->steps[position_];
  if (step.kernel != k || plan_->first_position[k] != position_) {
    TVM_FFI_THROW(InternalError) << session_->metadata().function << ": kernel " << k
                                 << " is called where the plan has kernel " << step.kernel;
  }
  ffi::Function& known = session_->functions_[k];
  if (!known.defined() && mode_ != Mode::kDryRun) known = function;
  Execute(step, plan_->steps[position_ + 1]);
}

void Frame::Regenerate(int64_t k) {
  const int32_t until = plan_->first_position[k];
  while (position_ < until) {
    Execute(plan_->steps[position_], plan_->steps[position_ + 1]);
    ++report_.recomputations;
  }
}

void Frame::Execute(const Step& step, const Step& next) {
  const KernelEntry& kernel = session_->metadata().kernels[step.kernel];
  arena_peak_ = std::max(arena_peak_, step.arena_end);
  ++position_;
  if (mode_ == Mode::kDryRun) return;
  wrote_given_ = wrote_given_ || kernel.overwrites;
  std::vector<ffi::AnyView>& copies = binding_->copies;
  for (int32_t i = step.first_copy; i < next.first_copy; i += 2) {
    CopyBytes(copies[i].cast<DLTensor*>(), copies[i + 1].cast<DLTensor*>());
  }
  const ffi::Function& function = session_->functions_[step.kernel];
  ffi::PackedArgs arguments(binding_->arguments.data() + step.first_argument,
                            next.first_argument - step.first_argument);
  ffi::Any ignored;
  if (mode_ != Mode::kProfile) {
    function.CallPacked(arguments, &ignored);
    return;
  }
  auto start = std::chrono::steady_clock::now();
  function.CallPacked(arguments, &ignored);
  auto end = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> lock(session_->mutex_);
  session_->kernel_ns_[step.kernel] +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
  ++session_->kernel_runs_[step.kernel];
}

ffi::Tensor Frame::Output(int64_t i) const {
  const ArgumentSource& source = plan_->outputs.at(i);
  return source.kind == ArgumentSource::kEscapingView ? escaping_views_[source.value]
                                                      : given_views_[source.value];
}

void Frame::Leave() {
  report_.dims = plan_->dims;
  report_.budget_bytes = plan_->budget_bytes;
  report_.planned_peak_bytes = plan_->peak_bytes();
  report_.arena_bytes = arena_peak_;
  report_.escaping_bytes = escaping_bytes_;
  report_.resident_bytes = resident_bytes_;
  report_.peak_bytes = arena_peak_ + escaping_bytes_ + resident_bytes_;
  report_.planning_ns = report_.cache_hit ? 0 : plan_->planning_ns;
  report_.time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now() - start_)
                        .count();
  finished_ = true;
  session_->Return(this);
}

}  // namespace relax_disc
