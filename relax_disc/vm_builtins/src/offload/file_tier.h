/*!
 * \file file_tier.h
 * \brief A file that tensors are written to and read back from while kernels run.
 *
 * One thread moves the bytes, a request at a time in their order, through a buffer of its own and
 * past the page cache where the file system allows it.  The file has no name, so that it ends with
 * the process however that ends; where it cannot lose its name, the next start removes it.  What is
 * read back is compared with a checksum of what was written.
 */
#ifndef RELAX_DISC_VM_BUILTINS_OFFLOAD_FILE_TIER_H_
#define RELAX_DISC_VM_BUILTINS_OFFLOAD_FILE_TIER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "offload/request_thread.h"
#include "offload/tier.h"

namespace relax_disc {

struct TierOptions {
  std::string folder;
  double bytes_per_s = 0;  // that plans go by; 0: measured at the first use
  bool paced = false;      // no transfer takes less time than plans take it to
  bool recompute = true;   // whether kernels may run again, too
};

class FileTier;

/*! \brief What the transfers of one call share: a part of the file, and its first failure. */
class FileCall : public TierCall {
 public:
  FileCall(FileTier* tier, int64_t offset) : tier_(tier), offset_(offset) {}
  ~FileCall();
  int64_t Write(char* from, int64_t bytes, int64_t slot) final;
  int64_t Read(char* to, int64_t bytes, int64_t slot) final;
  void Wait(int64_t request) final;

 private:
  friend class FileTier;
  FileTier* tier_;
  const int64_t offset_;
  std::string failure_;  // guarded by the tier's mutex
  int64_t last_request_ = 0;
  std::unordered_map<int64_t, uint64_t> checksums_;  // by slot; of the tier's thread
};

class FileTier : public Tier {
 public:
  explicit FileTier(TierOptions options);
  ~FileTier();

  /*! \brief Memory that it takes beside an arena once it is used. */
  static constexpr int64_t kBufferBytes = 1 << 18;
  /*! \brief Measures, the first time. */
  TierModel Figures() final;
  std::unique_ptr<TierCall> Begin(const MemoryBlock& arena, int64_t bytes) final;
  /*! \brief Reserve a part of the file. */
  std::unique_ptr<FileCall> Begin(int64_t bytes);

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("relax_disc.FileTier", FileTier, Tier);

 private:
  friend class FileCall;
  struct Request {
    FileCall* call;
    char* memory;
    int64_t bytes, slot;
    bool is_read;
    int64_t asked_ns;
  };

  void Open();                 // mutex held
  void Grow(int64_t bytes);    // mutex held
  void Measure();
  int64_t Submit(Request request);
  void Serve(const Request& request);  // on the thread
  void Move(const Request& request);
  void MoveChunk(const Request& request, int64_t done, int64_t bytes);
  void Pace(const Request& request);

  const TierOptions options_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> parts_;  // of the file, in use: offset, bytes
  int file_ = -1;
  bool direct_ = false;
  std::string name_;  // where the file could not lose it
  int64_t file_bytes_ = 0;
  BlockPtr buffer_;
  TierModel figures_;
  bool known_ = false;
  std::mutex measuring_;
  int64_t paced_until_ns_ = 0;  // of the thread
  RequestThread thread_;        // the last member: it ends before what it uses
};

/*!
 * \brief Let the n-th system call on a tier's file from now go wrong (0: the next; negative: none),
 *   for tests: "error", "full", "short" (half of the bytes), "end" (none), "changed" (other bytes).
 */
void FailTransfer(int64_t countdown, const std::string& how);

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_OFFLOAD_FILE_TIER_H_
