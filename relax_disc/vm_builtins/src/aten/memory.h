/*!
 * \file memory.h
 * \brief PyTorch's own kernels on planned memory: views of tensors, and where ATen allocates.
 *
 * ATen, and oneDNN under it, take their temporary tensors and scratch from PyTorch's allocator for
 * the CPU.  While an `AtenScope` lives, its thread's allocations come from the workspace that the
 * run time lends, so that they are inside the planned peak.
 */
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_MEMORY_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <vector>

#include "kernels/tensor_view.h"
#include "kernels/workspace.h"

namespace relax_disc {

/*!
 * \brief Serves the allocations of the calling thread from the lent workspace.
 *
 * One allocation that is exactly as large as the result is served from the result's own memory, so
 * that most operators without an `out=` form write in place.  What does not fit comes from
 * PyTorch's allocator and is counted (`TakeOverflow`): the plan's figure was too small.
 */
class AtenScope {
 public:
  /*!
   * \brief Workspace of `bytes`; `result` is written by the call.
   * \param at_once Whether the result's memory is free until then: it is not written in parts.
   */
  AtenScope(int64_t bytes, const at::Tensor& result, bool at_once = true);
  ~AtenScope();
  AtenScope(const AtenScope&) = delete;
  AtenScope& operator=(const AtenScope&) = delete;

  void* Allocate(int64_t bytes);
  /*! \brief Take a block back; false if it is none of this scope's. */
  bool Free(void* block);
  /*! \brief Most bytes that were taken at once, overflow included. */
  int64_t Peak() const { return peak_; }

 private:
  struct Piece {
    int64_t offset, bytes;
  };

  c10::InferenceMode mode_;
  WorkspaceScope workspace_;
  char* base_;
  int64_t bytes_, peak_ = 0, most_pieces_ = 0;
  void* result_;
  int64_t result_bytes_;
  bool result_taken_ = false;
  std::vector<Piece> pieces_;  // in use, by offset
  AtenScope* outer_;
};

/*! \brief A compact tensor as ATen sees it, on its device. */
at::Tensor AtenView(TensorView view);

/*! \brief `[n, *p, c]` as stored seen as `[n, c, *p]`; one spatial axis is seen as two. */
at::Tensor ChannelsFirst(TensorView view);

/*! \brief Write `value` into `result` unless it is there already. */
void Deliver(const at::Tensor& value, const at::Tensor& result);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_MEMORY_H_
