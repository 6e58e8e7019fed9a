// A CUDA device in host memory: TVM's interface of devices, and launches that watch what kernels do.
//
// Blocks run one after another and threads as fibres, both in shuffled order, so what is right here does not lean on an
// order.  Races are found by the rules and not by chance: between two accesses to an address, one of them a write,
// there must be a barrier of the block; threads of two blocks have none.
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "emulator.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

using emu::Region;
constexpr int kWarp = 32;
constexpr int kSector = 32;

// ---- findings ---------------------------------------------------------------------------------------

std::map<std::tuple<std::string, int, std::string>, std::pair<int64_t, std::string>> findings;
std::string kernel;  // that runs

void Report(int line, const std::string& what, const std::string& detail) {
  auto [entry, fresh] = findings.try_emplace({kernel, line, what}, 0, detail);
  ++entry->second.first;
}

// ---- who has touched an address ---------------------------------------------------------------------

struct Touch {
  int block = -1, thread = 0, epoch = 0;  // block -1: nobody
  bool atomic = false;
};
struct Cell {
  Touch writer, reader, second;  // second: a reader of the same block and epoch that is another thread
  int earlier_reader = -1;       // block of a reader before those
};

constexpr int kPageCells = 256;
using Page = std::array<Cell, kPageCells>;
std::unordered_map<uint64_t, std::unique_ptr<Page>> global_cells, shared_cells;
int granule = 4;  // bytes of a cell: the smallest element that the kernel touches

int block_number, thread_number, epoch;

Cell& CellOf(bool shared, uint64_t address) {
  const uint64_t cell = address / granule;
  auto& page = (shared ? shared_cells : global_cells)[cell / kPageCells];
  if (page == nullptr) page = std::make_unique<Page>();
  return (*page)[cell % kPageCells];
}

bool Conflicts(const Touch& other) {
  if (other.block < 0) return false;
  return other.block != block_number || (other.thread != thread_number && other.epoch == epoch);
}

/*! Note an access; the one that it races with, or null. */
const Touch* Update(Cell* cell, emu::Kind kind) {
  static Touch found;
  const Touch self{block_number, thread_number, epoch, kind == emu::kAtomic};
  const Touch* bad = nullptr;
  if (Conflicts(cell->writer) && !(self.atomic && cell->writer.atomic)) bad = &cell->writer;
  if (kind == emu::kRead) {
    if (cell->reader.block >= 0 && cell->reader.block != block_number) cell->earlier_reader = cell->reader.block;
    const bool same = cell->reader.block == block_number && cell->reader.epoch == epoch;
    if (!same) {
      cell->reader = self;
      cell->second = {};
    } else if (cell->reader.thread != thread_number) {
      cell->second = self;
    }
  } else {
    for (const Touch* reader : {&cell->reader, &cell->second}) {
      if (bad == nullptr && Conflicts(*reader)) bad = reader;
    }
    if (bad == nullptr && cell->earlier_reader >= 0 && cell->earlier_reader != block_number) {
      found = {cell->earlier_reader, 0, 0};
      return cell->writer = self, &found;
    }
    if (bad != nullptr) found = *bad, bad = &found;
    cell->writer = self;
  }
  return bad;
}

// ---- traffic ----------------------------------------------------------------------------------------

struct Traffic {  // by reads and writes
  double requested[2] = {0, 0};
  std::unordered_set<uint64_t> touched[2];
};
std::map<const Region*, Traffic> traffic;  // of the present call
double blocks_told_for = 1;  // by each block that runs
std::unordered_set<uint64_t> block_sectors;  // that this block has touched: they are in its cache

void Count(const Region* region, uint64_t address, int bytes, emu::Kind kind) {
  const int write = kind != emu::kRead;
  Traffic& of = traffic[region];
  for (uint64_t s = address / kSector; s <= (address + bytes - 1) / kSector; ++s) {
    of.touched[write].insert(s);
    if (block_sectors.insert(s * 2 + write).second) of.requested[write] += blocks_told_for;
  }
}

// ---- a sample of the blocks, counted for a model of times -------------------------------------------

int64_t most_blocks = 0;  // of a launch that run; 0: all, and races are looked for
struct {
  double instructions, sectors;  // of the warps: loads and stores of global memory, and the sectors that each asks for
  int64_t longest;               // loads and stores of the thread that has most of them
} counted;
std::unordered_map<uint64_t, int64_t> executed;                  // by thread and line, of this block
std::unordered_map<uint64_t, std::vector<uint64_t>> of_a_warp;  // sectors, by warp, line and how often executed
std::vector<int64_t> of_a_thread;

/*! Note an access.  Lanes of a warp that are at a line for the same time execute one instruction together. */
void CountInstruction(uint64_t address, int bytes, int line) {
  counted.longest = std::max(counted.longest, ++of_a_thread[thread_number]);
  const int64_t turn = executed[uint64_t(thread_number) << 32 | line]++;
  auto& sectors = of_a_warp[uint64_t(turn) << 32 | uint64_t(thread_number / kWarp) << 24 | line];
  if (sectors.empty()) counted.instructions += blocks_told_for;
  for (uint64_t s = address / kSector; s <= (address + bytes - 1) / kSector; ++s) {
    if (std::find(sectors.begin(), sectors.end(), s) != sectors.end()) continue;
    sectors.push_back(s);
    counted.sectors += blocks_told_for;
  }
}

// ---- arguments and shared arrays --------------------------------------------------------------------

std::vector<std::unique_ptr<Region>> arguments;  // of the present call of a host function
std::vector<std::unique_ptr<Region>> shared_arrays;
int64_t dynamic_shared_bytes, shared_bytes;
std::map<void*, size_t> allocated;  // by TVM, for scratch memory of a host function

// ---- fibres -----------------------------------------------------------------------------------------

// swapcontext asks the kernel for the mask of signals each time, which takes microseconds; this does not.
#if defined(__x86_64__)
struct Fibre { void* top = nullptr; };
extern "C" void emu_switch(void** from, void* to);
asm(R"(
.globl emu_switch
.hidden emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void Switch(Fibre* from, Fibre* to) { emu_switch(&from->top, to->top); }
void Prepare(Fibre* fibre, char* stack, size_t bytes, void (*function)()) {
  void** top = reinterpret_cast<void**>(uintptr_t(stack + bytes) / 16 * 16);
  *--top = nullptr;  // so that the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(function);
  fibre->top = top - 6;  // of the registers that are popped
}
#else
struct Fibre { ucontext_t context; };
void Switch(Fibre* from, Fibre* to) { swapcontext(&from->context, &to->context); }
void Prepare(Fibre* fibre, char* stack, size_t bytes, void (*function)()) {
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = stack;
  fibre->context.uc_stack.ss_size = bytes;
  makecontext(&fibre->context, function, 0);
}
#endif

enum class State { kFresh, kReady, kBarrier, kExchange, kDone };

struct Thread {
  State state = State::kFresh;
  dim3 index{};
  int line = 0;           // of the barrier or the shuffle at which it waits
  unsigned mask = 0;      // of the shuffle
  uint64_t posted[2]{};   // its last two values: a lane is at most one shuffle ahead of another
  unsigned exchanges = 0;
  unsigned partners = 0;  // lanes that take part in the shuffle
  Fibre fibre;
  char* stack = nullptr;
};

constexpr size_t kStackBytes = 1 << 16;
std::vector<Thread> threads;
std::vector<char*> free_stacks;
Fibre scheduler;
void (*entry)(void**);
void** launch_arguments;

void Wait(State state, int line) {
  Thread& self = threads[thread_number];
  self.state = state;
  self.line = line;
  Switch(&self.fibre, &scheduler);
}

void RunFibre() {
  entry(launch_arguments);
  Wait(State::kDone, 0);
}

void Resume(int number) {
  Thread& thread = threads[number];
  if (thread.state == State::kFresh) {
    if (free_stacks.empty()) free_stacks.push_back(new char[kStackBytes]);
    thread.stack = free_stacks.back();
    free_stacks.pop_back();
    Prepare(&thread.fibre, thread.stack, kStackBytes, RunFibre);
  }
  thread_number = number;
  threadIdx = thread.index;
  thread.state = State::kReady;
  Switch(&scheduler, &thread.fibre);
  if (thread.state == State::kDone) free_stacks.push_back(thread.stack);
}

/*! Let the lanes go on whose shuffle is complete; whether there were any. */
bool ReleaseShuffles() {
  bool any = false;
  for (size_t first = 0; first < threads.size(); first += kWarp) {
    unsigned alive = 0, waiting = 0;
    const int lanes = std::min<int>(kWarp, threads.size() - first);
    for (int lane = 0; lane < lanes; ++lane) {
      const Thread& t = threads[first + lane];
      if (t.state != State::kDone) alive |= 1u << lane;
      if (t.state == State::kExchange) waiting |= 1u << lane;
    }
    for (int lane = 0; lane < lanes; ++lane) {
      Thread& t = threads[first + lane];
      const unsigned partners = t.mask & alive;
      if (t.state != State::kExchange || (partners & ~waiting) != 0) continue;
      if ((t.mask & ~alive) != 0) Report(t.line, "divergent shuffle", "the mask names lanes that have ended");
      bool same = true;
      for (int k = 0; k < lanes; ++k) {
        const Thread& other = threads[first + k];
        if (partners >> k & 1) same = same && other.line == t.line && (other.mask & alive) == partners;
      }
      if (!same) Report(t.line, "divergent shuffle", "lanes of one mask wait at shuffles that differ");
      for (int k = 0; k < lanes; ++k) {
        if (partners >> k & 1) threads[first + k].state = State::kReady, threads[first + k].partners = partners;
      }
      waiting &= ~partners;
      any = true;
    }
  }
  return any;
}

/*! Let all threads go on when all wait at a barrier; whether they do. */
bool ReleaseBarrier() {
  int line = 0, waiting = 0, ended = 0;
  bool same = true;
  for (const Thread& t : threads) {
    if (t.state == State::kDone) {
      ++ended;
    } else if (t.state == State::kBarrier) {
      same = same && (waiting == 0 || t.line == line);
      line = t.line;
      ++waiting;
    } else {
      return false;
    }
  }
  if (waiting == 0) return false;
  if (ended > 0) Report(line, "divergent barrier", std::to_string(ended) + " threads ended before it");
  if (!same) Report(line, "divergent barrier", "threads wait at barriers on different lines");
  for (Thread& t : threads) if (t.state == State::kBarrier) t.state = State::kReady;
  ++epoch;
  return true;
}

/*! Run a block; whether all its threads came to their end. */
bool RunBlock(bool has_fibres, std::mt19937* random) {
  shared_arrays.clear();
  shared_cells.clear();
  block_sectors.clear();
  executed.clear();
  of_a_warp.clear();
  of_a_thread.assign(threads.size(), 0);
  shared_bytes = 0;
  epoch = 0;
  int number = 0;
  for (Thread& t : threads) {
    t.state = State::kFresh;
    t.exchanges = 0;
    t.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / (blockDim.x * blockDim.y)};
    ++number;
  }
  std::vector<int> order(threads.size());
  std::iota(order.begin(), order.end(), 0);
  if (!has_fibres) {
    std::shuffle(order.begin(), order.end(), *random);
    for (int k : order) {
      thread_number = k;
      threadIdx = threads[k].index;
      entry(launch_arguments);
    }
    return true;
  }
  for (bool goes_on = true; goes_on;) {
    std::shuffle(order.begin(), order.end(), *random);
    goes_on = false;
    for (int k : order) {
      if (threads[k].state != State::kFresh && threads[k].state != State::kReady) continue;
      Resume(k);
      goes_on = true;
    }
    goes_on = ReleaseShuffles() || ReleaseBarrier() || goes_on;
  }
  return std::all_of(threads.begin(), threads.end(), [](const Thread& t) { return t.state == State::kDone; });
}

std::string Text(const Touch& t) {
  return "thread " + std::to_string(t.thread) + " of block " + std::to_string(t.block);
}

}  // namespace

// ---- what kernels call ------------------------------------------------------------------------------

extern "C" {

void emu_access(const Region* region, const void* where, int bytes, emu::Kind kind, int line) {
  const char* p = static_cast<const char*>(where);
  const uint64_t address = reinterpret_cast<uint64_t>(where);
  if (p < region->base || p + bytes > region->base + region->bytes) {
    Report(line, "out of bounds", std::string(region->name) + " has " + std::to_string(region->bytes) + " bytes, byte " +
                                      std::to_string(p - region->base) + (kind == emu::kRead ? " read" : " written"));
    return;
  }
  if (address % bytes != 0) Report(line, "misaligned", std::to_string(bytes) + " bytes of " + std::string(region->name));
  if (most_blocks > 0) {
    if (region->shared) return;
    CountInstruction(address, bytes, line);
    return Count(region, address, bytes, kind);
  }
  for (uint64_t byte = address; byte < address + bytes; byte += granule) {
    Cell& cell = CellOf(region->shared, byte);
    if (region->shared && kind != emu::kWrite && cell.writer.block < 0) {
      Report(line, "uninitialised shared memory", std::string(region->name) + " is read before anything wrote it");
    }
    if (const Touch* other = Update(&cell, kind)) {
      const Touch self{block_number, thread_number, epoch};
      Report(line, "race", std::string(region->name) + ": " + Text(self) + " and " + Text(*other));
      break;
    }
  }
  if (!region->shared) Count(region, address, bytes, kind);
}

const Region* emu_argument(const void* base) {
  const Region* found = nullptr;
  for (const auto& region : arguments) {
    if (region->base == base && (found == nullptr || found->bytes < region->bytes)) found = region.get();
  }
  if (found == nullptr) {
    const auto own = allocated.find(const_cast<void*>(base));
    const int64_t bytes = own == allocated.end() ? 0 : own->second;
    if (bytes == 0) Report(0, "unknown argument", "a pointer that the host function neither got nor allocated");
    arguments.push_back(std::make_unique<Region>(Region{"scratch", (char*)base, bytes, false}));
    found = arguments.back().get();
  }
  return found;
}

const Region* emu_shared_array(const char* name, int64_t bytes) {
  for (const auto& region : shared_arrays) if (region->name == name) return region.get();
  if (bytes < 0) bytes = dynamic_shared_bytes;
  shared_bytes += bytes;
  static char memory[1 << 18] __attribute__((aligned(128)));
  char* base = memory;
  for (const auto& region : shared_arrays) {
    base = std::max(base, region->base + (region->bytes + 127) / 128 * 128);
  }
  if (base + bytes > memory + sizeof memory) std::abort();
  std::memset(base, 0xff, bytes);  // NaN
  shared_arrays.push_back(std::make_unique<Region>(Region{name, base, bytes, true}));
  return shared_arrays.back().get();
}

void emu_barrier(int line) { Wait(State::kBarrier, line); }

int emu_lane(void) { return thread_number % kWarp; }

unsigned emu_active_lanes(void) {
  unsigned result = 0;
  const size_t first = thread_number / kWarp * kWarp;
  for (size_t lane = 0; lane < kWarp && first + lane < threads.size(); ++lane) {
    if (threads[first + lane].state != State::kDone) result |= 1u << lane;
  }
  return result;
}

uint64_t emu_exchange(unsigned mask, uint64_t value, int source, int line) {
  Thread& self = threads[thread_number];
  const int lane = emu_lane(), turn = self.exchanges++ % 2;
  if ((mask >> lane & 1) == 0) Report(line, "divergent shuffle", "a lane is not in its own mask");
  self.posted[turn] = value;
  self.mask = mask | 1u << lane;
  Wait(State::kExchange, line);
  if (self.partners >> source & 1) return threads[thread_number - lane + source].posted[turn];
  // The value of a lane that takes no part is undefined.  Reductions of 2, 4, 8 ... lanes drop it.
  const int count = __builtin_popcount(self.partners);
  if ((count & (count - 1)) != 0) {
    Report(line, "shuffle among lanes that are no power of two", std::to_string(count) + " lanes");
  }
  return 0x7f7f7f7f7f7f7f7f;
}

unsigned emu_ballot(unsigned mask, bool predicate, int line) {
  const int lane = emu_lane(), turn = threads[thread_number].exchanges % 2;
  emu_exchange(mask, predicate, lane, line);
  unsigned result = 0;
  for (int k = 0; k < kWarp; ++k) {
    if (threads[thread_number].partners >> k & 1) result |= unsigned(threads[thread_number - lane + k].posted[turn]) << k;
  }
  return result;
}

// ---- what emulator.py calls -------------------------------------------------------------------------

/*! Say what the next launches may touch. */
void emu_begin_call(int count, const char** names, void** bases, const int64_t* bytes) {
  arguments.clear();
  traffic.clear();
  for (int k = 0; k < count; ++k) {
    arguments.push_back(std::make_unique<Region>(Region{names[k], (char*)bases[k], bytes[k], false}));
  }
}

/*! \param extents of the grid and the block. */
void emu_launch(const char* name, void* function, void** values, const int* extents, int64_t dynamic_shared,
                int has_fibres, int smallest, unsigned seed) {
  kernel = name;
  gridDim = {unsigned(extents[0]), unsigned(extents[1]), unsigned(extents[2])};
  blockDim = {unsigned(extents[3]), unsigned(extents[4]), unsigned(extents[5])};
  const int64_t count = int64_t(blockDim.x) * blockDim.y * blockDim.z;
  const int64_t blocks = int64_t(gridDim.x) * gridDim.y * gridDim.z;
  if (blocks == 0 || count == 0 || count > 1024 || blockDim.z > 64 || gridDim.y > 65535 || gridDim.z > 65535) {
    Report(0, "launch that no device takes", std::to_string(blocks) + " blocks of " + std::to_string(count));
    return;
  }
  entry = reinterpret_cast<void (*)(void**)>(function);
  launch_arguments = values;
  dynamic_shared_bytes = dynamic_shared;
  granule = smallest;
  threads = std::vector<Thread>(count);
  global_cells.clear();
  std::mt19937 random(seed);
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  if (most_blocks > 0 && blocks > most_blocks) order.resize(most_blocks);
  blocks_told_for = double(blocks) / order.size();
  counted = {};
  for (int number : order) {
    block_number = number;
    blockIdx = {block_number % gridDim.x, block_number / gridDim.x % gridDim.y,
                block_number / (gridDim.x * gridDim.y)};
    if (!RunBlock(has_fibres != 0, &random)) {
      Report(0, "hang", "threads wait for each other for ever");
      threads.clear();
      return;
    }
    if (shared_bytes > (48 << 10) && dynamic_shared == 0) {
      Report(0, "launch that no device takes", std::to_string(shared_bytes) + " bytes of shared memory");
    }
  }
}

/*! Lines of kernel, line, what, detail, count; forgets them. */
const char* emu_take_findings(void) {
  static std::string text;
  text.clear();
  for (const auto& [key, value] : findings) {
    text += std::get<0>(key) + "\t" + std::to_string(std::get<1>(key)) + "\t" + std::get<2>(key) + "\t" +
            value.second + "\t" + std::to_string(value.first) + "\n";
  }
  findings.clear();
  return text.c_str();
}

/*! Run no more than so many blocks of a launch, drawn at random, and count for all; 0: all blocks. */
void emu_sample(int64_t most) { most_blocks = most; }

/*! Of the last launch: instructions and sectors of warps, accesses of the longest thread, bytes of shared memory. */
void emu_counted(double* values) {
  values[0] = counted.instructions;
  values[1] = counted.sectors;
  values[2] = counted.longest;
  values[3] = shared_bytes;
}

/*! Lines of argument, sectors read, written, and the least of both, since the call began. */
const char* emu_traffic(void) {
  static std::string text;
  text.clear();
  for (const auto& [region, of] : traffic) {
    text += region->name;
    for (double n : of.requested) text += "\t" + std::to_string(std::llround(n));
    for (const auto& set : of.touched) text += "\t" + std::to_string(set.size());
    text += "\n";
  }
  return text.c_str();
}

}  // extern "C"

// ---- the device, as TVM's run time sees it ----------------------------------------------------------

namespace {

using tvm::Device;
namespace ffi = tvm::ffi;

void Tell(const char* what) {
  ffi::Function::GetGlobalRequired("relax_disc.emulator.record")(what);
}

class HostMemoryDevice final : public tvm::runtime::DeviceAPI {
 public:
  void SetDevice(Device) final {}
  void GetAttr(Device, tvm::runtime::DeviceAttrKind kind, ffi::Any* result) final {
    if (kind == tvm::runtime::kExist) *result = 1;
  }
  void* AllocDataSpace(Device, size_t bytes, size_t, DLDataType) final {
    Tell("allocate");
    void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    allocated[p] = bytes;
    return p;
  }
  void FreeDataSpace(Device, void* p) final {
    allocated.erase(p);
    std::free(p);
  }
  void StreamSync(Device, TVMStreamHandle) final { Tell("synchronise"); }

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes, Device source,
                      Device target, DLDataType, TVMStreamHandle) final {
    Tell(source.device_type == target.device_type ? "copy" : "copy between host and device");
    std::memcpy(static_cast<char*>(to) + to_offset, static_cast<const char*>(from) + from_offset, bytes);
  }
};

TVM_FFI_STATIC_INIT_BLOCK() {
  static HostMemoryDevice device;
  tvm::ffi::reflection::GlobalDef().def("device_api.cuda", [] {
    return static_cast<void*>(static_cast<tvm::runtime::DeviceAPI*>(&device));
  });
}

}  // namespace
