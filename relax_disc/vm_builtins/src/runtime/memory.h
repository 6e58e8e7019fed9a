/*!
 * \file memory.h
 * \brief Memory of the run time: the arena of a session, tensors that escape, and views of both.
 *
 * On the CPU an arena is a mapping of its own, so that growing and shrinking give pages back to the
 * system at once and keep the pages that stay; it lies so that the system can use huge pages, of
 * which the first touch costs a tenth.  On other devices a registered function allocates.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_MEMORY_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_MEMORY_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/object.h>

#include <cstdint>
#include <vector>

namespace relax_disc {

/*! \brief Whether memory can be used, or is address space only (dry runs of any size). */
enum class Backing : int32_t { kReal = 0, kReserved = 1 };

inline int64_t RoundUp(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

inline int64_t BytesOf(const tvm::ffi::Tensor& tensor) {
  return static_cast<int64_t>(tvm::ffi::GetDataSize(tensor.numel(), tensor.dtype()));
}

/*! \brief One contiguous piece of memory that its owner frees with it. */
class MemoryBlock : public tvm::ffi::Object {
 public:
  /*!
   * \brief Allocate.
   * \throws OutOfMemoryError if the system refuses; nothing has changed then.
   */
  static tvm::ffi::ObjectPtr<MemoryBlock> Allocate(DLDevice device, int64_t bytes, Backing backing);
  ~MemoryBlock();

  /*!
   * \brief Change the size, contents lost or kept; the base may move.
   *
   * Memory of a device is given back first, so that there are never two; on failure none is left.
   */
  void Resize(int64_t bytes);

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  DLDevice device() const { return device_; }
  Backing backing() const { return backing_; }

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("relax_disc.MemoryBlock", MemoryBlock, tvm::ffi::Object);

 private:
  void AllocateOnDevice(int64_t bytes);
  void Free();

  DLDevice device_{kDLCPU, 0};
  bool small_ = false;  // from the C library, not a mapping
  Backing backing_ = Backing::kReal;
  char* base_ = nullptr;
  int64_t bytes_ = 0;
  tvm::ffi::ObjectRef owner_;  // of device memory
};

using BlockPtr = tvm::ffi::ObjectPtr<MemoryBlock>;

/*! \brief A tensor at an offset of a block, which it keeps alive; its data pointer is shifted. */
tvm::ffi::Tensor ViewOfBlock(const BlockPtr& block, int64_t offset, const std::vector<int64_t>& shape,
                             DLDataType dtype);

/*! \brief The same bytes as another tensor, with a shape of its own. */
tvm::ffi::Tensor ViewOfTensor(const tvm::ffi::Tensor& base, const std::vector<int64_t>& shape,
                              DLDataType dtype);

/*!
 * \brief Make the n-th allocation from now fail (0: the next; negative: none), for tests.
 */
void FailAllocation(int64_t countdown);

/*! \brief Bytes that blocks hold now: by this count a leak is seen. */
int64_t AllocatedBytes();

/*! \brief Copy bytes between two tensors of one size; does nothing when they are the same place. */
void CopyBytes(const tvm::ffi::Tensor& from, const tvm::ffi::Tensor& to);

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_MEMORY_H_
