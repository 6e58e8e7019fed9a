/*!
 * \file file_calls.h
 * \brief The system calls on a tier's file, each of which tests can let go wrong.
 */
#ifndef RELAX_DISC_VM_BUILTINS_OFFLOAD_FILE_CALLS_H_
#define RELAX_DISC_VM_BUILTINS_OFFLOAD_FILE_CALLS_H_

#include <cstdint>
#include <string>

namespace relax_disc {

/*! \brief Throw an OffloadError. */
[[noreturn]] void FailOffload(const std::string& text);
/*!
 * \brief See that a folder is there, and remove what processes left in it that have ended.
 * \throws OffloadError if it is not.
 */
void CheckFolder(const std::string& folder);

/*! \brief A new file without a name. */
struct NamelessFile {
  int descriptor = -1;  // negative: errno says why
  bool direct = false;  // past the page cache
  std::string name;     // where it could not lose its name
};

/*! \param direct Whether it goes past the page cache, where that works. */
NamelessFile OpenNameless(const std::string& folder, bool direct);
/*! \brief Have blocks for so many bytes; an error number, or 0. */
int ReserveFile(int descriptor, int64_t bytes);
/*! \brief Bytes moved, which may be fewer; negative: errno says why. */
int64_t WriteAt(int descriptor, const char* from, int64_t bytes, int64_t offset);
int64_t ReadAt(int descriptor, char* to, int64_t bytes, int64_t offset);

/*! \brief Pages of a file as memory, which a forked process does not have; null: errno says why. */
char* MapFile(int descriptor, int64_t bytes, int64_t offset);
/*! \brief Have the pages of a mapping in memory, so that using them cannot fail; or an error number. */
int BringPages(char* memory, int64_t bytes);
/*! \brief Write the pages of a mapping to the disk and let go of their memory; or an error number. */
int PutPagesAway(char* memory, int64_t bytes);
/*! \brief Whether this process may have used a mapping since its pages were put away. */
bool HasPages(const char* memory, int64_t bytes);

/*! \brief What tells other bytes from these; of several pieces, `seed` is that of those before. */
uint64_t Checksum(const char* data, int64_t bytes, uint64_t seed);

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_OFFLOAD_FILE_CALLS_H_
