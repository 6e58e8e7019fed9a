#include "runtime/binding.h"

#include <tvm/ffi/error.h>

#include <algorithm>

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief Memory of a view that is told later where it is; whoever passes it keeps that alive. */
struct NoMemory {
  void AllocData(DLTensor* tensor) { tensor->data = nullptr; }
  void FreeData(DLTensor*) {}
};

ffi::Tensor EmptyView(const ViewEntry& view, DLDevice device) {
  const std::vector<int64_t> shape(view.shape.size(), 1);
  return ffi::Tensor::FromNDAlloc(NoMemory{}, ffi::ShapeView(shape.data(), shape.size()),
                                  view.dtype, device);
}

// Between two steps the caches hold tensors; a view's fields take two or three lines.
constexpr size_t kAhead = 12;
void Prefetch(const ffi::Tensor& view) {
  const char* start = reinterpret_cast<const char*>(view.GetDLTensorPtr());
  for (int line = 0; line < 3; ++line) __builtin_prefetch(start + 64 * line, 1);
}

DLTensor* Fields(const ffi::Tensor& tensor) {
  return const_cast<DLTensor*>(tensor.GetDLTensorPtr());
}

bool SameShape(const ffi::Tensor& a, const ffi::Tensor& b) {
  return a.ndim() == b.ndim() && std::equal(a.shape().begin(), a.shape().end(), b.shape().begin());
}

}  // namespace

Binding::Binding(const Metadata& metadata, const Plan& plan)
    : metadata_(metadata), sequence_(plan.arena.sequence) {
  const std::vector<Version>& versions = plan.arena.versions;
  lives_.reserve(versions.size());
  for (const Version& version : versions) lives_.emplace_back(version.tensor, version.created);
  version_.assign(metadata.tensors.size(), -1);
  arena_entry_.assign(metadata.views.size(), -1);
  own_entry_.assign(metadata.views.size(), -1);
  first_position_.assign(metadata.kernels.size(), -1);
  size_t next = 0;
  for (size_t i = 0; i < sequence_.size(); ++i) {
    const int32_t position = static_cast<int32_t>(i);
    const KernelEntry& kernel = metadata.kernels[sequence_[i]];
    int32_t workspace = -1;
    // No kernel reads a tensor that it makes, so its new versions can be known at once.
    for (; next < versions.size() && versions[next].created == position; ++next) {
      const int32_t tensor = versions[next].tensor;
      (tensor >= 0 ? version_[tensor] : workspace) = static_cast<int32_t>(next);
    }
    steps_.push_back({sequence_[i], Next(), 0, 0, workspace});
    for (const auto& [from, to] : kernel.copies) {
      AddView(from);
      AddView(to);
    }
    steps_.back().first_argument = Next();
    for (const Argument& argument : kernel.arguments) AddArgument(argument);
    if (first_position_[sequence_[i]] < 0) first_position_[sequence_[i]] = position;
  }
  steps_.push_back({-1, Next(), Next(), 0});
  for (int32_t view : metadata.outputs) OwnIndex(view);
  version_ = {};
  arena_entry_ = {};
}

int32_t Binding::AddExtents(const ViewEntry& view) {
  const int32_t first = static_cast<int32_t>(extents_.size());
  extents_.insert(extents_.end(), view.shape.begin(), view.shape.end());
  return first;
}

void Binding::SetShape(const ffi::Tensor& view, int32_t first_extent,
                       const std::vector<int64_t>& values) const {
  DLTensor* tensor = Fields(view);
  int64_t step = 1;
  for (int32_t axis = tensor->ndim - 1; axis >= 0; --axis) {
    const int64_t extent = values[extents_[first_extent + axis]];
    tensor->shape[axis] = extent;
    tensor->strides[axis] = step;
    step *= extent;
  }
}

int32_t Binding::OwnIndex(int32_t view) {
  const ViewEntry& entry = metadata_.views[view];
  const TensorEntry& tensor = metadata_.tensors[entry.tensor];
  const bool escapes = tensor.storage == Storage::kEscaping;
  std::vector<OwnView>& list = escapes ? escaping_views_ : given_views_;
  if (own_entry_[view] < 0) {
    int32_t owner = tensor.given;
    if (escapes) {
      auto same = [&](int32_t known) { return metadata_.views[known].tensor == entry.tensor; };
      auto found = std::find_if(escaping_.begin(), escaping_.end(), same);
      owner = static_cast<int32_t>(found - escaping_.begin());
      if (found == escaping_.end()) escaping_.push_back(view);
    }
    own_entry_[view] = static_cast<int32_t>(list.size());
    list.push_back({view, owner, AddExtents(entry), EmptyView(entry, {kDLCPU, 0})});
  }
  return own_entry_[view];
}

void Binding::AddView(int32_t view) {
  const int32_t tensor = metadata_.views[view].tensor;
  const Storage storage = metadata_.tensors[tensor].storage;
  if (storage == Storage::kArena) {
    int32_t& entry = arena_entry_[view];
    if (entry < 0 || arena_views_[entry].version != version_[tensor]) {
      entry = static_cast<int32_t>(arena_views_.size());
      const ViewEntry& placed = metadata_.views[view];
      arena_views_.push_back({version_[tensor], metadata_.tensors[tensor].bytes,
                              AddExtents(placed), EmptyView(placed, {kDLCPU, 0})});
    }
    arena_uses_.emplace_back(static_cast<int32_t>(steps_.size()) - 1, entry);
    values_.push_back(arena_views_[entry].tensor);
    return;
  }
  auto& places = storage == Storage::kEscaping ? escaping_places_ : given_places_;
  places.emplace_back(Next(), OwnIndex(view));
  values_.push_back(ffi::AnyView());
}

void Binding::AddArgument(const Argument& argument) {
  switch (argument.kind) {
    case ArgumentKind::kView:
      AddView(argument.index);
      return;
    case ArgumentKind::kInteger:
      integers_.emplace_back(Next(), argument.index);
      break;
    case ArgumentKind::kShape:
      shapes_.push_back({Next(), &argument, ffi::Any()});
      break;
    case ArgumentKind::kConstant:
      values_.push_back(argument.constant);
      return;
  }
  values_.push_back(ffi::AnyView());
}

bool Binding::Serves(const Plan& plan) const {
  const std::vector<Version>& versions = plan.arena.versions;
  return sequence_ == plan.arena.sequence && lives_.size() == versions.size() &&
         std::equal(lives_.begin(), lives_.end(), versions.begin(),
                    [](const std::pair<int32_t, int32_t>& life, const Version& version) {
                      return life.first == version.tensor && life.second == version.created;
                    });
}

void Binding::Fill(const PlanPtr& plan, const MemoryBlock& arena) {
  const std::vector<int64_t>& values = plan->values;
  const size_t count = arena_views_.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) Prefetch(arena_views_[i + kAhead].tensor);
    ArenaView& placed = arena_views_[i];
    // A tensor that no kernel of the plan makes has no version; nothing looks at it.
    const int64_t offset =
        placed.version >= 0 ? plan->arena.versions[placed.version].offset : 0;
    DLTensor* tensor = Fields(placed.tensor);
    tensor->data = arena.base() + offset;
    tensor->device = arena.device();
    placed.offset = offset;
  }
  plan_ = plan;
  base_ = arena.base();
  is_resized_ = false;
  SetSizes(values);
}

void Binding::Resize(const std::vector<int64_t>& values) {
  for (const ArenaView& placed : arena_views_) {
    if (values[placed.bytes] > plan_->values[placed.bytes]) {
      TVM_FFI_THROW(InternalError) << metadata_.function << ": a tensor of " << values[placed.bytes]
                                   << " bytes was planned with " << plan_->values[placed.bytes];
    }
  }
  is_resized_ = true;
  SetSizes(values);
}

void Binding::SetSizes(const std::vector<int64_t>& values) {
  const size_t count = arena_views_.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) Prefetch(arena_views_[i + kAhead].tensor);
    ArenaView& placed = arena_views_[i];
    SetShape(placed.tensor, placed.first_extent, values);
    placed.end = placed.offset + RoundUp(values[placed.bytes], metadata_.machine.alignment);
  }
  for (Step& step : steps_) {
    step.arena_end = 0;
    if (step.workspace < 0) continue;
    step.workspace_offset = plan_->arena.versions[step.workspace].offset;
    step.arena_end = step.workspace_offset + plan_->workspaces[step.kernel];
  }
  for (const auto& [step, entry] : arena_uses_) {
    steps_[step].arena_end = std::max(steps_[step].arena_end, arena_views_[entry].end);
  }
  for (const auto& [place, program] : integers_) values_[place] = values[program];
  for (ShapeValue& shape : shapes_) {
    shape.value = ffi::Shape(ShapeAt(shape.source->items, values));
    values_[shape.at] = shape.value;
  }
  for (std::vector<OwnView>* list : {&given_views_, &escaping_views_}) {
    for (OwnView& own : *list) SetShape(own.tensor, own.first_extent, values);
  }
}

void Binding::Pass(const std::vector<ffi::Tensor>& given,
                   const std::vector<ffi::Tensor>& escaping) {
  auto pass = [this](const std::vector<ffi::Tensor>& owners, std::vector<OwnView>* views,
                     const std::vector<std::pair<int32_t, int32_t>>& places) {
    for (OwnView& own : *views) {
      const ffi::Tensor& owner = owners[own.owner];
      if (!owner.defined()) continue;  // it is supplied later
      DLTensor* tensor = Fields(own.tensor);
      const int64_t begin = metadata_.tensors[metadata_.views[own.view].tensor].begin;
      tensor->data = static_cast<char*>(owner.data_ptr()) + owner.byte_offset() +
                     std::max<int64_t>(begin, 0);
      tensor->device = owner.device();
    }
    for (const auto& [place, entry] : places) {
      const OwnView& own = (*views)[entry];
      const ffi::Tensor& owner = owners[own.owner];
      if (!owner.defined()) continue;
      values_[place] = SameShape(owner, own.tensor) ? owner : own.tensor;
    }
  };
  pass(given, &given_views_, given_places_);
  pass(escaping, &escaping_views_, escaping_places_);
}

ffi::Tensor Binding::Output(int64_t i, const std::vector<ffi::Tensor>& given,
                            const std::vector<ffi::Tensor>& escaping,
                            const std::vector<int64_t>& values) const {
  const int32_t view = metadata_.outputs.at(i);
  const ViewEntry& entry = metadata_.views[view];
  const bool escapes = metadata_.tensors[entry.tensor].storage == Storage::kEscaping;
  const OwnView& own = (escapes ? escaping_views_ : given_views_)[own_entry_[view]];
  const ffi::Tensor& owner = (escapes ? escaping : given)[own.owner];
  if (SameShape(owner, own.tensor)) return owner;
  return ViewOfTensor(owner, ShapeAt(entry.shape, values), entry.dtype);
}

}  // namespace relax_disc
