#include "planner/versions.h"

#include <algorithm>

namespace relax_disc {

namespace {

// All lifetimes, in the order of execution; a reload that no kernel reads before its tensor is made
// again, as something else that a kernel makes, is none.
void CollectVersions(const Model& model, const Timeline& timeline, Buffers* result) {
  std::vector<int> current(model.tensors(), -1);  // version of each tensor that is read now
  const auto add = [&](int tensor, int position, bool reloaded) {
    if (tensor >= 0) current[tensor] = static_cast<int>(result->versions.size());
    result->versions.push_back({tensor, position, position, 0});
    result->first_read.push_back(-1);
    result->reloaded.push_back(reloaded);
  };
  int position = 0;
  for (int block = 0; block <= model.ops; ++block) {
    for (int op : timeline.executions(block)) {
      for (int i = model.inputs.begin[op]; i < model.inputs.begin[op + 1]; ++i) {
        const int version = current[model.inputs.values[i]];
        result->versions[version].last_use = position;
        if (result->first_read[version] < 0) result->first_read[version] = position;
      }
      if (op == model.ops) break;  // the outputs are read at the end
      for (int i = model.outputs.begin[op]; i < model.outputs.begin[op + 1]; ++i) {
        add(model.outputs.values[i], position, model.IsReload(op));
      }
      if (model.IsReload(op)) continue;
      if (model.workspace[op] > 0) add(-1 - op, position, false);
      ++position;
    }
  }
  std::size_t kept = 0;
  for (std::size_t v = 0; v < result->versions.size(); ++v) {
    if (result->reloaded[v] && result->first_read[v] < 0) continue;
    result->versions[kept] = result->versions[v];
    result->first_read[kept] = result->first_read[v];
    result->reloaded[kept++] = result->reloaded[v];
  }
  result->versions.resize(kept);
  result->first_read.resize(kept);
  result->reloaded.resize(kept);
}

}  // namespace

Buffers CollectBuffers(const Model& model, const Timeline& timeline,
                       const std::vector<std::pair<int, int>>& apart) {
  Buffers result;
  // First all lifetimes, since sharing depends on who reads a version last.
  CollectVersions(model, timeline, &result);
  std::vector<int> current(model.tensors(), -1);
  result.buffer.assign(result.versions.size(), -1);
  int position = 0, next = 0;
  const int count = static_cast<int>(result.versions.size());
  const auto place = [&](int v) {
    const Version& version = result.versions[v];
    if (version.tensor >= 0) current[version.tensor] = v;
    if (result.buffer[v] >= 0) {
      result.upper[result.buffer[v]] = version.last_use + 1;
      return;
    }
    result.buffer[v] = static_cast<int>(result.size.size());
    result.lower.push_back(version.created);
    result.upper.push_back(version.last_use + 1);
    result.size.push_back(version.tensor >= 0 ? model.bytes[version.tensor]
                                              : model.workspace[-1 - version.tensor]);
  };
  for (int block = 0; block <= model.ops; ++block) {
    for (int op : timeline.executions(block)) {
      if (model.IsReload(op)) continue;
      while (next < count && result.versions[next].created == position && result.reloaded[next]) {
        place(next++);
      }
      if (op == model.ops) break;
      const int first = next;
      while (next < count && result.versions[next].created == position) ++next;
      const auto dies = [&](int tensor) {
        const Version& version = result.versions[current[tensor]];
        const std::pair<int, int> key{tensor, version.created};
        return version.last_use == position &&
               !std::binary_search(apart.begin(), apart.end(), key);
      };
      model.ForSharedPairs(op, dies, [&](int input, int output) {
        int made = first;
        while (result.versions[made].tensor != output) ++made;
        result.buffer[made] = result.buffer[current[input]];
      });
      for (int v = first; v < next; ++v) place(v);
      ++position;
    }
  }
  return result;
}

}  // namespace relax_disc
