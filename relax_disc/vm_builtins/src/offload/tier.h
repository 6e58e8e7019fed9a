/*!
 * \file tier.h
 * \brief A place beside the device's memory where a call keeps tensors meanwhile.
 */
#ifndef RELAX_DISC_VM_BUILTINS_OFFLOAD_TIER_H_
#define RELAX_DISC_VM_BUILTINS_OFFLOAD_TIER_H_

#include <tvm/ffi/object.h>

#include <cstdint>
#include <memory>

#include "planner/planner.h"
#include "runtime/memory.h"

namespace relax_disc {

/*!
 * \brief The transfers of one call, done one at a time in the order of the requests.
 *
 * When it is destroyed, nothing that comes later finds one under way.
 */
class TierCall {
 public:
  virtual ~TierCall() = default;
  /*! \brief Ask for a transfer between the arena and a slot; returns the request's number. */
  virtual int64_t Write(char* from, int64_t bytes, int64_t slot) = 0;
  virtual int64_t Read(char* to, int64_t bytes, int64_t slot) = 0;
  /*!
   * \brief Let what the caller does from now on find a request done.
   * \throws OffloadError if it, or one before it in the call, failed.
   */
  virtual void Wait(int64_t request) = 0;
};

class Tier : public tvm::ffi::Object {
 public:
  virtual ~Tier() = default;
  /*!
   * \brief What plans know of it.
   * \throws OffloadError if it cannot be used.
   */
  virtual TierModel Figures() = 0;
  /*!
   * \brief Reserve room for the tensors of a call.
   * \throws OffloadError or OutOfMemoryError if there is none; nothing has changed.
   */
  virtual std::unique_ptr<TierCall> Begin(const MemoryBlock& arena, int64_t bytes) = 0;

  /*! \brief Smaller tensors stay: a transfer of so many bytes takes little more than its latency. */
  static constexpr int64_t kLeastBytes = 1 << 14;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO("relax_disc.Tier", Tier, tvm::ffi::Object);
};

using TierPtr = tvm::ffi::ObjectPtr<Tier>;

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_OFFLOAD_TIER_H_
