/*!
 * \file workspace.h
 * \brief Memory of the library kernels beside their arguments.
 *
 * The run time lends a kernel a piece of the arena, which the plan places like a tensor that lives
 * while the kernel runs.  `WorkspaceBytes` says how much that is, and shares
 * its formulas with the kernels.  A kernel that is called directly, by a test say, uses memory that
 * its thread keeps.
 */
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_WORKSPACE_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_WORKSPACE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace relax_disc {

/*! \brief Pieces of the calling thread's workspace; they are given back when the scope ends. */
class WorkspaceScope {
 public:
  WorkspaceScope();
  ~WorkspaceScope();
  WorkspaceScope(const WorkspaceScope&) = delete;
  WorkspaceScope& operator=(const WorkspaceScope&) = delete;

  /*!
   * \brief Room for `count` elements on a 64-byte boundary; not initialised.
   * \throws InternalError if the lent block is too small: `WorkspaceBytes` is wrong then.
   */
  template <typename T>
  T* Take(int64_t count) {
    return static_cast<T*>(TakeBytes(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  void* TakeBytes(int64_t bytes);
  int64_t used_;  // of the lent block, or pieces of the thread's own, when the scope began
};

/*! \brief Lends a block to the kernels that the calling thread starts while this lives. */
class LentWorkspace {
 public:
  LentWorkspace(char* data, int64_t bytes);
  ~LentWorkspace();
  LentWorkspace(const LentWorkspace&) = delete;
  LentWorkspace& operator=(const LentWorkspace&) = delete;

 private:
  bool was_lent_;
  char* data_;
  int64_t bytes_, used_;  // of whoever lent before: calls may nest
};

/*! \brief Note that a library took so many bytes beyond what it was lent. */
void CountOverflow(int64_t bytes);

/*! \brief Most bytes that a call of this thread took so since the last question. */
int64_t TakeOverflow();

/*! \brief Bytes of a piece as `WorkspaceScope` counts it. */
inline int64_t PieceBytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/*!
 * \brief Most workspace that a library kernel takes on so many threads.
 * \param kind Formula: "matmul", "batch_matmul", the two with "aten_" before, "attention",
 *   "attention_backward", "recurrence", "recurrence_backward", "aten", "convolution",
 *   "ctc_loss_backward" or "vocabulary_head".
 * \param numbers Bytes of an element, then the formula's parameters.
 */
int64_t WorkspaceBytes(const std::string& kind, const std::vector<int64_t>& numbers,
                       int64_t threads);

/*!
 * \brief Most that a library takes by itself meanwhile, from malloc: MKL's packing buffers.
 *
 * Nothing can lend it that memory, so it lies beside the arena.  Parameters as above.
 * \param or_smaller Sizes are bounds of what is known when the kernel runs.
 */
int64_t LibraryBytes(const std::string& kind, const std::vector<int64_t>& numbers, bool or_smaller,
                     int64_t threads);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_WORKSPACE_H_
