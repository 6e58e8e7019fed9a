// From a timeline to the buffers that an arena must hold.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_VERSIONS_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_VERSIONS_H_

#include <cstdint>
#include <vector>

#include "planner/planner.h"
#include "planner/timeline.h"

namespace relax_disc {

// Versions without offsets, and the buffers they lie in: outputs that take the place of an input
// share its buffer.  Positions count the kernels' runs, not the reloads: a reloaded version is there
// from the run that follows its reload in the timeline.
struct Buffers {
  std::vector<Version> versions;  // in the order of ArenaPlan::versions
  std::vector<int> buffer;        // per version
  std::vector<int> first_read;    // per version: where it is read first; -1 for none
  std::vector<char> reloaded;     // per version
  std::vector<int64_t> lower, upper, size;  // per buffer: [lower, upper) in positions, bytes
};

// `apart`: (tensor, created) of versions whose place no output may take, in ascending order.
Buffers CollectBuffers(const Model& model, const Timeline& timeline,
                       const std::vector<std::pair<int, int>>& apart = {});

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_VERSIONS_H_
