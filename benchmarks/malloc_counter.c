/* Count the bytes that a process holds: preload this library, then read the counters.
 *
 * Counted are blocks of at least 4 KiB from malloc and its relatives (their usable size), and
 * writable anonymous mappings that are asked for directly. Smaller blocks are Python's objects. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

enum { SMALLEST_BLOCK = 4096, MOST_MAPPINGS = 1 << 14 };

static _Atomic long live, peak;

static void add(long bytes) {
  long now = atomic_fetch_add(&live, bytes) + bytes;
  long highest = atomic_load(&peak);
  while (now > highest && !atomic_compare_exchange_weak(&peak, &highest, now)) {
  }
}

static long counted_size(void *block) {
  long size = block ? (long)malloc_usable_size(block) : 0;
  return size < SMALLEST_BLOCK ? 0 : size;
}

static void *counted(void *block) {
  long size = counted_size(block);
  if (size) add(size);
  return block;
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
void *valloc(size_t size) { return memalign(4096, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
  void *made = memalign(alignment, size);
  if (!made) return ENOMEM;
  *block = made;
  return 0;
}

void free(void *block) {
  atomic_fetch_sub(&live, counted_size(block));
  __libc_free(block);
}

void *realloc(void *block, size_t size) {
  long before = counted_size(block);
  void *made = __libc_realloc(block, size);
  if (!made && size) return NULL; /* the old block is still there */
  atomic_fetch_sub(&live, before);
  return counted(made);
}

/* Mappings: what is unmapped may be a part of what was mapped, so their ranges are remembered. */
static struct { uintptr_t start, end; } mappings[MOST_MAPPINGS];
static int mapping_count;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void lock(void) { while (atomic_flag_test_and_set(&busy)) {} }
static void unlock(void) { atomic_flag_clear(&busy); }

static void remember(uintptr_t start, uintptr_t end) {
  if (start < end && mapping_count < MOST_MAPPINGS) {
    mappings[mapping_count].start = start;
    mappings[mapping_count++].end = end;
    add((long)(end - start));
  }
}

static void forget(uintptr_t start, uintptr_t end) {
  for (int i = mapping_count - 1; i >= 0; --i) {
    uintptr_t first = mappings[i].start, last = mappings[i].end;
    if (first >= end || last <= start) continue;
    atomic_fetch_sub(&live, (long)(last - first));
    mappings[i] = mappings[--mapping_count];
    long highest = atomic_load(&peak); /* putting the rest back is no new peak */
    remember(first, start < first ? first : start);
    remember(end > last ? last : end, last);
    atomic_store(&peak, highest);
  }
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  void *made = (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
  if (made == MAP_FAILED) return made;
  lock();
  if (flags & MAP_FIXED) forget((uintptr_t)made, (uintptr_t)made + size);
  if ((flags & MAP_ANONYMOUS) && (protection & PROT_WRITE))
    remember((uintptr_t)made, (uintptr_t)made + size);
  unlock();
  return made;
}

void *mmap64(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  return mmap(address, size, protection, flags, file, offset);
}

int munmap(void *address, size_t size) {
  int failed = (int)syscall(SYS_munmap, address, size);
  if (failed) return failed;
  lock();
  forget((uintptr_t)address, (uintptr_t)address + ((size + 4095) & ~(size_t)4095));
  unlock();
  return 0;
}

void *mremap(void *address, size_t size, size_t wanted, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  void *target = flags & MREMAP_FIXED ? va_arg(rest, void *) : NULL;
  va_end(rest);
  uintptr_t start = (uintptr_t)address;
  lock();
  int counted_before = 0;
  for (int i = 0; i < mapping_count; ++i)
    counted_before |= mappings[i].start < start + size && mappings[i].end > start;
  void *moved = (void *)syscall(SYS_mremap, address, size, wanted, flags, target);
  if (moved != MAP_FAILED && counted_before) {
    forget(start, start + size);
    remember((uintptr_t)moved, (uintptr_t)moved + wanted);
  }
  unlock();
  return moved;
}

long malloc_counter_live(void) { return atomic_load(&live); }
long malloc_counter_peak(void) { return atomic_load(&peak); }
void malloc_counter_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
