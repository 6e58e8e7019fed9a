/*!
 * \file state_file.h
 * \brief Tensors of the user that lie in a file: a step has a few of them in memory at a time.
 *
 * Each is a shared mapping of a part of one file without a name, so that it stays an ordinary
 * tensor: whoever reads it between steps gets its pages.  A thread brings the pages of what the
 * next kernels read, and writes out and drops those of what they wrote.  What comes back is compared
 * with a checksum of what went, unless this process used it meanwhile: it may have written it.
 */
#ifndef RELAX_DISC_VM_BUILTINS_OFFLOAD_STATE_FILE_H_
#define RELAX_DISC_VM_BUILTINS_OFFLOAD_STATE_FILE_H_

#include <tvm/ffi/object.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "offload/request_thread.h"

namespace relax_disc {

/*! \brief What the requests of one call have in common; guarded by the file's mutex. */
struct StateCall {
  std::string failure;
  int64_t bytes = 0, peak_bytes = 0;  // in memory by requests of the call
  int64_t last_request = 0;           // of the caller
};

class StateFile : public tvm::ffi::Object {
 public:
  /*! \throws OffloadError if no file can be made in the folder. */
  explicit StateFile(std::string folder);
  ~StateFile();

  /*! \brief Every tensor takes whole pages. */
  static constexpr int64_t kPage = 4096;

  /*!
   * \brief Make room for a tensor, with anything in it, and return its address.
   * \throws OffloadError if the disk is full; nothing has changed.
   */
  char* Allocate(int64_t bytes);
  /*! \brief Nobody has the tensor any more. */
  void Free(char* memory);
  /*! \brief Whether these bytes are a tensor of the file. */
  bool Holds(const void* memory, int64_t bytes);
  /*! \brief Somebody wrote the tensor: there is nothing to compare it with. */
  void Forget(char* memory);

  /*! \brief Ask for pages to be in memory, or out of it; returns the request's number. */
  int64_t Bring(StateCall* call, char* memory, int64_t bytes);
  int64_t PutAway(StateCall* call, char* memory, int64_t bytes);
  /*!
   * \brief Wait until a request is done.
   * \throws OffloadError if it, or one before it in the call, failed.
   */
  void Wait(StateCall* call, int64_t request);
  /*! \brief Wait for all requests of a call, failed or not. */
  void Finish(StateCall* call);

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("relax_disc.StateFile", StateFile, tvm::ffi::Object);

 private:
  struct Part {
    int64_t offset, bytes;
    uint64_t checksum = 0;      // of what was put away last
    bool is_known = false;      // whether there is that checksum
    bool is_changed = false;    // found not to be what was put away, and not written since
    bool is_there = true;       // false: it could not be read, and must not be
  };

  int64_t Submit(StateCall* call, char* memory, int64_t bytes, bool is_in);
  std::string BringNow(char* memory, int64_t bytes);     // on the thread; why it failed, or nothing
  std::string PutAwayNow(char* memory, int64_t bytes);
  std::string Failure(int64_t bytes, const std::string& what) const;
  int64_t TakePart(int64_t bytes);  // mutex held; returns its offset

  const std::string folder_;
  std::mutex mutex_;
  int file_ = -1;
  std::string name_;  // where the file could not lose it
  int64_t file_bytes_ = 0;
  std::map<char*, Part> parts_;           // in use
  std::multimap<int64_t, int64_t> free_;  // bytes, offset
  RequestThread thread_;  // the last member: it ends before what it uses
};

using StateFilePtr = tvm::ffi::ObjectPtr<StateFile>;

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_OFFLOAD_STATE_FILE_H_
