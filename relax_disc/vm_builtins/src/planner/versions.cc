#include "planner/versions.h"

#include <algorithm>

namespace relax_disc {

Buffers CollectBuffers(const Model& model, const Timeline& timeline) {
  Buffers result;
  std::vector<int> current(model.tensors(), -1);  // version of each tensor that is read now
  // First all lifetimes, since sharing depends on who reads a version last.
  int position = 0;
  for (int block = 0; block <= model.ops; ++block) {
    for (int op : timeline.executions(block)) {
      for (int i = model.inputs.begin[op]; i < model.inputs.begin[op + 1]; ++i) {
        result.versions[current[model.inputs.values[i]]].last_use = position;
      }
      if (op == model.ops) break;  // the outputs are read at the end
      for (int i = model.outputs.begin[op]; i < model.outputs.begin[op + 1]; ++i) {
        const int tensor = model.outputs.values[i];
        current[tensor] = static_cast<int>(result.versions.size());
        result.versions.push_back({tensor, position, position, 0});
      }
      if (model.workspace[op] > 0) result.versions.push_back({-1 - op, position, position, 0});
      ++position;
    }
  }

  std::fill(current.begin(), current.end(), -1);
  position = 0;
  int next = 0;
  const int count = static_cast<int>(result.versions.size());
  for (int block = 0; block <= model.ops; ++block) {
    for (int op : timeline.executions(block)) {
      if (op == model.ops) break;
      const int first = next;
      while (next < count && result.versions[next].created == position) ++next;
      result.buffer.resize(next, -1);
      const auto dies = [&](int tensor) {
        return result.versions[current[tensor]].last_use == position;
      };
      model.ForSharedPairs(op, dies, [&](int input, int output) {
        int made = first;
        while (result.versions[made].tensor != output) ++made;
        result.buffer[made] = result.buffer[current[input]];
      });
      for (int v = first; v < next; ++v) {
        const Version& version = result.versions[v];
        if (version.tensor >= 0) current[version.tensor] = v;
        if (result.buffer[v] >= 0) {
          result.upper[result.buffer[v]] = version.last_use + 1;
          continue;
        }
        result.buffer[v] = static_cast<int>(result.size.size());
        result.lower.push_back(version.created);
        result.upper.push_back(version.last_use + 1);
        result.size.push_back(version.tensor >= 0 ? model.bytes[version.tensor]
                                                  : model.workspace[-1 - version.tensor]);
      }
      ++position;
    }
  }
  return result;
}

}  // namespace relax_disc
