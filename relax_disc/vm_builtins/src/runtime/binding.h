/*!
 * \file binding.h
 * \brief The arguments of every kernel of a call, ready to be passed.
 *
 * Plans of different shapes have the same sequence of kernels as long as nothing is computed again,
 * so a binding is made for a sequence and filled in for one plan after the other: addresses, shapes
 * and integers change, the objects stay.  A call whose plan is in it already costs nothing but the
 * places of what the caller passes.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_BINDING_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_BINDING_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/memory.h"
#include "runtime/metadata.h"
#include "runtime/plan.h"

namespace relax_disc {

/*! \brief One execution of a kernel: its part of the list of values. */
struct Step {
  int32_t kernel;
  int32_t first_copy;      // pairs (from, to), up to first_argument
  int32_t first_argument;  // up to first_copy of the next step
  int64_t arena_end;       // highest arena byte that the kernel may touch, plus one
  int32_t workspace = -1;  // version; negative: none
  int64_t workspace_offset = 0;
};

class Binding {
 public:
  Binding(const Metadata& metadata, const Plan& plan);
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  /*! \brief Whether a plan runs the same kernels over the same lives of tensors. */
  bool Serves(const Plan& plan) const;
  /*! \brief Whether it is filled in for this plan and place. */
  bool Holds(const PlanPtr& plan, const char* base) const {
    return plan_ == plan && base_ == base && !is_resized_;
  }
  /*! \brief Take sizes and offsets from a plan that it serves, for an arena. */
  void Fill(const PlanPtr& plan, const MemoryBlock& arena);
  /*!
   * \brief Take other sizes, none larger than the plan's; every tensor stays at its offset.
   * \param values Of the metadata's programs.
   */
  void Resize(const std::vector<int64_t>& values);

  /*! \brief Put in what one call gets and returns; both must live until it ends. */
  void Pass(const std::vector<tvm::ffi::Tensor>& given,
            const std::vector<tvm::ffi::Tensor>& escaping);
  /*! \brief Escaping tensors that a call must make, each as the first view of it. */
  const std::vector<int32_t>& escaping() const { return escaping_; }
  /*! \brief A tensor of the flat result, which owns its memory. */
  tvm::ffi::Tensor Output(int64_t i, const std::vector<tvm::ffi::Tensor>& given,
                          const std::vector<tvm::ffi::Tensor>& escaping,
                          const std::vector<int64_t>& values) const;

  /*! \brief Executions in order, and one more at the end, empty. */
  const std::vector<Step>& steps() const { return steps_; }
  /*! \brief Where each kernel runs for the first time. */
  const std::vector<int32_t>& first_position() const { return first_position_; }
  const tvm::ffi::AnyView* values() const { return values_.data(); }

 private:
  /*! \brief A view at a place in the arena. */
  struct ArenaView {
    int32_t version, bytes;  // `bytes`: program of the tensor's size
    int32_t first_extent;    // in extents_
    tvm::ffi::Tensor tensor;
    int64_t offset = 0, end = 0;
  };
  /*! \brief A view of a given or escaping tensor. */
  struct OwnView {
    int32_t view, owner, first_extent;
    tvm::ffi::Tensor tensor;  // of the view's shape, for owners of another shape
  };
  struct ShapeValue {
    int32_t at;
    const Argument* source;
    tvm::ffi::Any value;
  };

  int32_t AddExtents(const ViewEntry& view);
  void SetShape(const tvm::ffi::Tensor& tensor, int32_t first_extent,
                const std::vector<int64_t>& values) const;
  void AddView(int32_t view);
  void AddArgument(const Argument& argument);
  int32_t OwnIndex(int32_t view);
  void SetSizes(const std::vector<int64_t>& values);
  int32_t Next() const { return static_cast<int32_t>(values_.size()); }

  const Metadata& metadata_;
  std::vector<int32_t> sequence_;
  std::vector<std::pair<int32_t, int32_t>> lives_;  // tensor and creation of each version
  std::vector<Step> steps_;
  std::vector<int32_t> first_position_, escaping_;
  std::vector<tvm::ffi::AnyView> values_;
  // Programs of the views' extents, side by side: a call of another shape reads them in order.
  std::vector<int32_t> extents_;
  std::vector<ArenaView> arena_views_;
  std::vector<OwnView> given_views_, escaping_views_;
  std::vector<std::pair<int32_t, int32_t>> arena_uses_;     // step, arena view
  std::vector<std::pair<int32_t, int32_t>> integers_;       // place in values_, program
  std::vector<std::pair<int32_t, int32_t>> given_places_;   // place in values_, given view
  std::vector<std::pair<int32_t, int32_t>> escaping_places_;
  std::vector<ShapeValue> shapes_;
  // While it is made: of each tensor its current version, of each view its last entry.
  std::vector<int32_t> version_, arena_entry_, own_entry_;

  PlanPtr plan_;
  char* base_ = nullptr;
  bool is_resized_ = false;
};

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_BINDING_H_
