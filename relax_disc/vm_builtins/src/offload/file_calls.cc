#include "offload/file_calls.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/error.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "offload/file_tier.h"

namespace relax_disc {

namespace {

constexpr char kPrefix[] = "relax_disc-offload-";

enum class Fault { kError, kFull, kShort, kEnd, kChanged };

std::atomic<int64_t> countdown{-1};
std::atomic<Fault> fault{Fault::kError};

bool FailsNow() {
  if (countdown.load() < 0) return false;
  return countdown.fetch_sub(1) == 0;
}

/*! \brief Remove files of processes that ended before theirs had lost their names. */
void RemoveLeftovers(const std::string& folder) {
  DIR* entries = opendir(folder.c_str());
  if (entries == nullptr) return;
  while (const dirent* entry = readdir(entries)) {
    if (std::strncmp(entry->d_name, kPrefix, sizeof(kPrefix) - 1) != 0) continue;
    const std::string path = folder + "/" + entry->d_name;
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0) continue;
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) unlink(path.c_str());
    close(descriptor);
  }
  closedir(entries);
}

/*! \brief The error number that a fault gives a call that moves no bytes. */
int Number() { return fault.load() == Fault::kFull ? ENOSPC : EIO; }

}  // namespace

void FailTransfer(int64_t count, const std::string& how) {
  const std::vector<std::string> names{"error", "full", "short", "end", "changed"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == how) fault = static_cast<Fault>(i);
  }
  countdown = count;
}

NamelessFile OpenNameless(const std::string& folder, bool direct) {
  NamelessFile file;
  if (FailsNow()) {
    errno = Number();
    return file;
  }
  const std::string pattern = folder + "/" + kPrefix + "XXXXXX";  // mkostemp fills it in
  std::string name = pattern;
#ifdef O_DIRECT
  if (direct) file.descriptor = mkostemp(name.data(), O_CLOEXEC | O_DIRECT);
  file.direct = file.descriptor >= 0;
#endif
  if (file.descriptor < 0) {
    name = pattern;
    file.descriptor = mkostemp(name.data(), O_CLOEXEC);
  }
  if (file.descriptor < 0) return file;
  flock(file.descriptor, LOCK_EX | LOCK_NB);  // until then it is a leftover to others, as well
  if (unlink(name.c_str()) != 0 && errno != ENOENT) file.name = name;
  return file;
}

void FailOffload(const std::string& text) {
  TVM_FFI_THROW(OffloadError) << text;
  throw;  // not reached: the line above throws
}

void CheckFolder(const std::string& folder) {
  struct stat status;
  if (stat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    FailOffload("offload_to names " + folder + ", which is no folder; make it first.");
  }
  RemoveLeftovers(folder);
}

int ReserveFile(int descriptor, int64_t bytes) {
  if (FailsNow()) return Number();
#ifdef __linux__
  if (fallocate(descriptor, 0, 0, bytes) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
#endif
  return ftruncate(descriptor, bytes) == 0 ? 0 : errno;
}

int64_t WriteAt(int descriptor, const char* from, int64_t bytes, int64_t offset) {
  if (FailsNow()) {
    switch (fault.load()) {
      case Fault::kShort:
        return pwrite(descriptor, from, bytes / 2, offset);
      case Fault::kEnd:
        return 0;
      case Fault::kChanged: {
        char* first = const_cast<char*>(from);  // in place, since the memory must be aligned
        *first ^= 1;
        const int64_t written = pwrite(descriptor, from, bytes, offset);
        *first ^= 1;
        return written;
      }
      default:
        errno = Number();
        return -1;
    }
  }
  return pwrite(descriptor, from, bytes, offset);
}

int64_t ReadAt(int descriptor, char* to, int64_t bytes, int64_t offset) {
  if (FailsNow()) {
    switch (fault.load()) {
      case Fault::kShort:
        return pread(descriptor, to, bytes / 2, offset);
      case Fault::kEnd:
        return 0;
      case Fault::kChanged:
        std::memset(to, 0x5A, bytes);
        return bytes;
      default:
        errno = Number();
        return -1;
    }
  }
  return pread(descriptor, to, bytes, offset);
}

char* MapFile(int descriptor, int64_t bytes, int64_t offset) {
  if (FailsNow()) {
    errno = Number();
    return nullptr;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, offset);
  if (memory == MAP_FAILED) return nullptr;
#ifdef MADV_DONTFORK
  // A child that goes on training would write into its parent's tensors.
  madvise(memory, bytes, MADV_DONTFORK);
#endif
  return static_cast<char*>(memory);
}

int BringPages(char* memory, int64_t bytes) {
  const bool fails = FailsNow(), is_changed = fails && fault.load() == Fault::kChanged;
  if (fails && !is_changed) return Number();
#ifdef MADV_POPULATE_WRITE
  while (madvise(memory, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) break;  // Linux before 5.14: the first touch brings each page
    if (errno == EFAULT) return EIO;
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
#endif
  if (is_changed) memory[0] ^= 1;
  return 0;
}

int PutPagesAway(char* memory, int64_t bytes) {
  if (FailsNow()) {
    if (fault.load() != Fault::kChanged) return Number();
    memory[0] ^= 1;
  }
  if (msync(memory, bytes, MS_SYNC) != 0) return errno;
  return madvise(memory, bytes, MADV_DONTNEED) == 0 ? 0 : errno;
}

bool HasPages(const char* memory, int64_t bytes) {
#ifdef __linux__
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return true;
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory)) / page;
  const int64_t count = (bytes + page - 1) / page;
  std::vector<uint64_t> entries(std::min<int64_t>(count, 8192));
  bool found = false;
  for (int64_t done = 0; done < count && !found;) {
    const int64_t some = std::min<int64_t>(count - done, entries.size());
    const int64_t size = some * sizeof(uint64_t);
    found = pread(map, entries.data(), size, (first + done) * sizeof(uint64_t)) != size;
    for (int64_t i = 0; i < some && !found; ++i) found = entries[i] >> 63 != 0;  // in memory
    done += some;
  }
  close(map);
  return found;
#else
  return true;
#endif
}

uint64_t Checksum(const char* data, int64_t bytes, uint64_t seed) {
  // Four sums side by side, as the processor multiplies; each word counts with its place.
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;
  uint64_t sums[4] = {seed, seed + 1, seed + 2, seed + 3};
  int64_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    uint64_t words[4];
    std::memcpy(words, data + at, 32);
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] = (sums[lane] ^ words[lane]) * kFactor;
      sums[lane] ^= sums[lane] >> 29;
    }
  }
  uint64_t result = static_cast<uint64_t>(bytes);
  for (; at < bytes; ++at) result = (result ^ static_cast<unsigned char>(data[at])) * kFactor;
  for (uint64_t sum : sums) result = (result ^ sum ^ (sum >> 31)) * kFactor;
  return result;
}

}  // namespace relax_disc
