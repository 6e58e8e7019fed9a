/*!
 * \file plan_numbers.h
 * \brief Lives and transfers of a plan as they go to Python: a fixed count of numbers each.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_PLAN_NUMBERS_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_PLAN_NUMBERS_H_

#include <tvm/ffi/container/shape.h>

#include <cstdint>
#include <vector>

#include "planner/planner.h"

namespace relax_disc {

inline tvm::ffi::Shape VersionNumbers(const ArenaPlan& plan) {
  std::vector<int64_t> numbers;
  for (const Version& version : plan.versions) {
    numbers.insert(numbers.end(),
                   {version.tensor, version.created, version.last_use, version.offset});
  }
  return tvm::ffi::Shape(numbers);
}

inline tvm::ffi::Shape TransferNumbers(const ArenaPlan& plan) {
  std::vector<int64_t> numbers;
  for (const Transfer& transfer : plan.transfers) {
    numbers.insert(numbers.end(),
                   {transfer.version, transfer.is_read, transfer.start, transfer.wait,
                    transfer.slot, transfer.begin_ns, transfer.end_ns});
  }
  return tvm::ffi::Shape(numbers);
}

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_PLAN_NUMBERS_H_
