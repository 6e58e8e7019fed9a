/*!
 * \file arena.h
 * \brief The memory that sessions keep between calls.
 *
 * It belongs to one session, or to several whose calls take turns.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_ARENA_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_ARENA_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/memory.h"

namespace relax_disc {

/*! \brief What one call needs. */
struct ArenaNeed {
  DLDevice device{kDLCPU, 0};
  int64_t arena_bytes = 0;
  int64_t room_bytes = -1;  // what may be held; negative: no limit
};

class SharedArena {
 public:
  /*!
   * \brief Lend the memory to a call, grown or shrunk to what it may have; false: it is taken.
   * \throws OutOfMemoryError if the system refuses; nothing is lent then.
   */
  bool Take(const ArenaNeed& need, BlockPtr* arena);
  /*! \brief The call that took it has ended. */
  void Return();

  int64_t held_bytes() const;
  /*! \brief Address and size of what is held. */
  std::vector<int64_t> place() const;
  /*! \brief Set every byte that is held on the CPU, for tests: who reads it gets this. */
  void Fill(uint8_t byte);
  /*! \brief Give everything back to the system if more than so many bytes are held and no call has it. */
  void GiveBackAbove(int64_t bytes);

 private:
  bool IsIdle(int64_t needed_bytes);
  int64_t Held() const;

  mutable std::mutex mutex_;  // taken while a session's own may be held, never the other way round
  BlockPtr arena_;
  bool taken_ = false;
  int64_t idle_calls_ = 0, idle_need_ = 0;  // calls in a row that left half unused, their most
};

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_ARENA_H_
