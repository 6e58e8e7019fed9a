/*!
 * \file lists.h
 * \brief Lists of numbers as they come from Python and from JSON, and what goes back: the only
 *   encoding at the border to Python.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_LISTS_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_LISTS_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace relax_disc {

using List = tvm::ffi::Array<tvm::ffi::Any>;
/*! \brief Named figures, as they go back to Python. */
using Facts = tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any>;

inline List ListOf(const tvm::ffi::Any& value) { return value.cast<List>(); }

template <typename T = int32_t>
std::vector<T> Integers(const tvm::ffi::Any& value) {
  const List list = ListOf(value);
  std::vector<T> result;
  result.reserve(list.size());
  for (const tvm::ffi::Any& item : list) result.push_back(static_cast<T>(item.cast<int64_t>()));
  return result;
}

inline std::vector<std::pair<int32_t, int32_t>> Pairs(const tvm::ffi::Any& value) {
  std::vector<std::pair<int32_t, int32_t>> result;
  for (const tvm::ffi::Any& item : ListOf(value)) {
    const std::vector<int32_t> pair = Integers(item);
    result.emplace_back(pair.at(0), pair.at(1));
  }
  return result;
}

template <typename T>
tvm::ffi::Shape Numbers(const std::vector<T>& values) {
  return tvm::ffi::Shape(std::vector<int64_t>(values.begin(), values.end()));
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_LISTS_H_
