/*!
 * \file state_windows.h
 * \brief When the parts of the optimizer's state that lie in a file are in memory during a call.
 *
 * A window is a kernel with such arguments, in the order of the plan.  Its tensors are brought
 * before it and put away after it, but for those that the next window has too.  Those of the next
 * window are brought while a kernel runs where both together take no more memory than the largest
 * window takes alone.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_STATE_WINDOWS_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_STATE_WINDOWS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "offload/state_file.h"
#include "planner/planner.h"
#include "runtime/metadata.h"

namespace relax_disc {

/*! \brief Which tensors lie in the file, and how fast they come and go. */
struct StateModel {
  std::vector<char> in_file;  // by index of the given tensor
  TierModel speeds;
};

struct StateWindow {
  int32_t position;              // in the plan's sequence
  std::vector<int32_t> arrive;   // given tensors that it has and the one before has not
  std::vector<int32_t> depart;   // given tensors that it has and the next has not
  bool early = true;             // whether `arrive` may come while the one before runs
};

struct StateWindows {
  std::vector<StateWindow> windows;
  int64_t file_bytes = 0;   // of all tensors in the file
  int64_t peak_bytes = 0;   // most of them in memory at once
  int64_t stall_ns = 0;     // modelled time that kernels wait for them
};

StateWindows PlanStateWindows(const Metadata& metadata, const std::vector<int64_t>& values,
                              const std::vector<int32_t>& sequence, const PlannerGraph& graph,
                              const StateModel& model);

/*! \brief Brings and puts away the tensors of one call. */
class StateMover {
 public:
  StateMover(StateFilePtr file, const StateWindows& windows,
             const std::vector<tvm::ffi::Tensor>& given);
  ~StateMover();

  /*! \brief Have in memory what the kernel at a position needs.  Throws OffloadError. */
  void Before(int32_t position);
  /*! \brief Let go of what is not needed any more. */
  void After(int32_t position);
  /*! \brief All is on the disk.  Throws OffloadError. */
  void Finish();
  int64_t peak_bytes() const { return call_.peak_bytes; }

 private:
  void Arrive(size_t window);

  const StateFilePtr file_;
  const StateWindows& windows_;
  const std::vector<tvm::ffi::Tensor>& given_;
  StateCall call_;
  size_t next_ = 0;                // window
  std::vector<int64_t> arrivals_;  // last request of each window whose tensors were asked for
  std::map<char*, int64_t> there_;  // asked for and not yet put away: memory, bytes
};

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_STATE_WINDOWS_H_
