#include "planner/model.h"

#include <algorithm>

namespace relax_disc {

namespace {

void AppendOnce(Lists* lists, int value) {
  const auto first = lists->values.begin() + lists->begin.back();
  if (std::find(first, lists->values.end(), value) == lists->values.end()) {
    lists->values.push_back(value);
  }
}

}  // namespace

Model::Model(const PlannerGraph& graph)
    : ops(static_cast<int>(graph.ops.size())), bytes(graph.bytes), inplace(graph.ops.size() + 1) {
  const int count = tensors();
  producer.assign(count, -1);
  reload.assign(count, -1);
  evictable.assign(count, 0);
  std::vector<char> tracked(count, 0);
  std::vector<int> overwritten(count, ops);
  std::vector<char> once(ops, 0);
  for (int k = 0; k < ops; ++k) {
    const PlannerOp& op = graph.ops[k];
    once[k] = !op.recomputable;
    for (int t : op.outputs) {
      tracked[t] = !graph.resident[t] && bytes[t] > 0;
      if (tracked[t]) producer[t] = k;
    }
    for (const auto& [input, output] : op.inplace) {
      if (!graph.resident[input]) continue;
      overwritten[input] = std::min(overwritten[input], k);
      tracked[output] = 0;
      producer[output] = -1;
      once[k] = 1;
    }
  }
  for (int t = 0; t < count; ++t) {
    if (graph.resident[t]) resident_bytes += bytes[t];
    if (tracked[t]) evictable[t] = !once[producer[t]];
  }
  for (int k = 0; k < ops; ++k) {
    const PlannerOp& op = graph.ops[k];
    time.push_back(op.time_ns);
    rerun.push_back(op.rerun_ns < 0 ? op.time_ns : op.rerun_ns);
    workspace.push_back(op.workspace);
    deadline.push_back(ops);
    base_time += op.time_ns;
    for (int t : op.inputs) {
      deadline[k] = std::min(deadline[k], overwritten[t]);
      if (tracked[t]) AppendOnce(&inputs, t);
    }
    for (int t : op.outputs) {
      if (tracked[t]) AppendOnce(&outputs, t);
    }
    for (const auto& [input, output] : op.inplace) {
      const bool fits = tracked[input] && tracked[output] && bytes[input] == bytes[output];
      if (fits && inplace[k].size() < 64) {
        inplace[k].emplace_back(input, output);
      }
    }
    inputs.Close();
    outputs.Close();
  }
  for (int t = 0; t < count; ++t) {
    if (tracked[t] && graph.is_output[t]) inputs.values.push_back(t);
  }
  inputs.Close();
  outputs.Close();
  time.push_back(0);
  rerun.push_back(0);
  workspace.push_back(0);
  deadline.push_back(ops);

  std::vector<std::vector<int>> blocks(count);
  for (int k = 0; k <= ops; ++k) {
    for (int i = outputs.begin[k]; i < outputs.begin[k + 1]; ++i) {
      blocks[outputs.values[i]].push_back(k);
    }
    for (int i = inputs.begin[k]; i < inputs.begin[k + 1]; ++i) {
      blocks[inputs.values[i]].push_back(k);
    }
  }
  for (int t = 0; t < count; ++t) {
    for (int block : blocks[t]) {
      points.values.push_back(block);
      gap_tensor.push_back(t);
    }
    points.Close();
  }
}

Model::Model(const PlannerGraph& graph, const TierModel& tier, double exposed, double early)
    : Model(graph) {
  int next = ops + 1, last = 0;
  const auto until = static_cast<int64_t>(static_cast<double>(base_time) * early);
  for (int64_t begin = 0; last < ops && begin <= until; ++last) begin += time[last];
  for (int t = 0; t < tensors(); ++t) {
    if (producer[t] < 0) continue;
    if (!tier.recompute) evictable[t] = 0;
    if (bytes[t] < tier.least_bytes || producer[t] >= last) continue;
    reload[t] = next++;
    const int64_t both = tier.Time(bytes[t], false) + tier.Time(bytes[t], true);
    rerun.push_back(static_cast<int64_t>(static_cast<double>(both) * exposed) + 1);
    time.push_back(0);
    workspace.push_back(0);
    deadline.push_back(ops);
    outputs.values.push_back(t);
    inputs.Close();
    outputs.Close();
    inplace.emplace_back();
  }
}

int Model::GapBefore(int tensor, int block) const {
  const auto first = points.values.begin() + points.begin[tensor];
  const auto last = points.values.begin() + points.begin[tensor + 1];
  return static_cast<int>(std::lower_bound(first, last, block) - points.values.begin()) - 1;
}

}  // namespace relax_disc
