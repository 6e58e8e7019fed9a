#include "kernels/workspace.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

#include "aten/convolution.h"
#include "aten/product.h"
#include "kernels/attention/attention_workspace.h"
#include "kernels/product/gemm.h"
#include "kernels/product/packed_matrix.h"
#include "kernels/parallel.h"
#include "kernels/product/product_choice.h"
#include "runtime/memory.h"
#include "kernels/vocabulary_head/head_tiles.h"
#include "kernels/vocabulary_head/head_vectors.h"

namespace relax_disc {

namespace {

std::atomic<int64_t> own_bytes{0};

/*! \brief Pieces of memory that a thread keeps for kernels that nobody lent anything to. */
struct OwnPieces {
  struct Piece {
    void* data;
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  ~OwnPieces() {
    for (const Piece& piece : pieces) {
      std::free(piece.data);
      own_bytes -= piece.bytes;
    }
  }
  void* At(size_t index, int64_t bytes) {
    if (index == pieces.size()) pieces.push_back({nullptr, 0});
    Piece& piece = pieces[index];
    if (piece.bytes < bytes) {
      std::free(piece.data);
      own_bytes -= piece.bytes;
      piece = {std::aligned_alloc(64, bytes), 0};
      if (piece.data == nullptr) throw std::bad_alloc();
      own_bytes += piece.bytes = bytes;
    }
    return piece.data;
  }
};

thread_local int64_t overflow = 0;

struct ThreadState {
  bool is_lent = false;
  char* lent = nullptr;
  int64_t bytes = 0;
  int64_t used = 0;  // bytes of what is lent, or pieces of the thread's own
  OwnPieces own;
};

ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

/*! \brief Products one after the other on all threads, or each on one of them. */
template <typename T>
int64_t BatchMatmulBytes(int64_t count, int64_t m, int64_t n, int64_t k, int64_t threads) {
  const int64_t serial = std::clamp<int64_t>(count / 2, 1, threads);
  return std::max(GemmBytes<T>(m, n, k, threads), serial * PieceBytes(GemmBytes<T>(m, n, k, 1)));
}

int64_t HeadBytes(int64_t rows, int64_t room, int64_t classes, int64_t width, int64_t threads) {
  int64_t products = HeadVectors::Bytes(room, classes, width, threads);
  if (HeadTiles::MayMultiply(width)) {
    products = std::max(
        products, HeadTiles::Bytes(MostChunkRows(rows, room), classes, width, threads));
  }
  return 2 * PieceBytes(rows * 8) + PieceBytes(rows * 4) + products;
}

/*! \brief The packed weight, and room for the rows of each thread, which share out the batch. */
template <typename T>
int64_t RecurrenceBytes(int64_t batch, int64_t depth, int64_t columns, int64_t extra,
                        int64_t threads) {
  typedef PackedMatrix<T> Packed;
  const int64_t row = Packed::Pitch(columns) + extra;
  const int64_t rooms = threads * Packed::kWorkspace + (batch + threads) * row;
  return PieceBytes((Packed::Size(depth, columns) + rooms) * static_cast<int64_t>(sizeof(T)));
}

template <typename T>
int64_t BytesOf(const std::string& kind, const std::vector<int64_t>& n, int64_t threads) {
  if (kind == "grouped_matmul" || kind == "matmul") {
    return GemmBytes<T>(n.at(1), n.at(2), n.at(3), threads);
  }
  if (kind == "batch_matmul") {
    return BatchMatmulBytes<T>(n.at(1), n.at(2), n.at(3), n.at(4), threads);
  }
  if (kind == "aten_matmul") {
    const bool is_bfloat = n.size() > 4 && n.at(4) != 0;
    return AtenProductBytes({1, n.at(1), n.at(2), n.at(3), n.at(0), is_bfloat}, threads);
  }
  if (kind == "aten_batch_matmul") {
    const bool is_bfloat = n.size() > 5 && n.at(5) != 0;
    return AtenProductBytes({n.at(1), n.at(2), n.at(3), n.at(4), n.at(0), is_bfloat}, threads);
  }
  if (kind == "vocabulary_head") {
    return HeadBytes(n.at(1), n.at(2), n.at(3), n.at(4), threads);
  }
  if (kind == "recurrence") {
    return RecurrenceBytes<T>(n.at(1), n.at(2), n.at(3), 0, threads);
  }
  if (kind == "aten" || kind == "aten_at_least") return PieceBytes(n.at(1));  // measured: frontend/aten_workspace.py
  if (kind == "convolution") {
    return ConvolutionBytes(ConvolutionSizes::Read(n, 3), n.at(1), n.at(0), n.at(2) != 0, threads);
  }
  if (kind == "ctc_loss_backward") {
    return PieceBytes(threads * (2 * n.at(1) + 1) * static_cast<int64_t>(sizeof(T)));
  }
  if (kind == "recurrence_backward") {
    return RecurrenceBytes<T>(n.at(1), n.at(3), n.at(2), n.at(2), threads);
  }
  const int64_t element = sizeof(T);
  if (kind == "attention") {
    return threads * PieceBytes(AttentionElements<T>(n.at(1), n.at(2)) * element);
  }
  if (kind == "attention_backward") {
    return threads * PieceBytes(AttentionBackwardElements<T>(n.at(1), n.at(2)) * element);
  }
  TVM_FFI_THROW(ArtefactError) << "unknown workspace formula " << kind << " in plan metadata";
  throw;  // not reached: the line above throws
}

}  // namespace

void CountOverflow(int64_t bytes) { overflow = std::max(overflow, bytes); }
int64_t TakeOverflow() { return std::exchange(overflow, 0); }

WorkspaceScope::WorkspaceScope() : used_(State().used) {}
WorkspaceScope::~WorkspaceScope() { State().used = used_; }

void* WorkspaceScope::TakeBytes(int64_t bytes) {
  ThreadState& state = State();
  bytes = PieceBytes(bytes);
  if (!state.is_lent) return state.own.At(state.used++, bytes);
  if (state.used + bytes > state.bytes) {
    TVM_FFI_THROW(InternalError) << "a kernel takes " << state.used + bytes
                                 << " bytes of workspace, planned were " << state.bytes;
  }
  char* result = state.lent + state.used;
  state.used += bytes;
  return result;
}

LentWorkspace::LentWorkspace(char* data, int64_t bytes) {
  ThreadState& state = State();
  was_lent_ = state.is_lent;
  data_ = state.lent;
  bytes_ = state.bytes;
  used_ = state.used;
  state.is_lent = true;
  state.lent = data;
  state.bytes = bytes;
  state.used = 0;
}

LentWorkspace::~LentWorkspace() {
  ThreadState& state = State();
  state.is_lent = was_lent_;
  state.lent = data_;
  state.bytes = bytes_;
  state.used = used_;
}

int64_t WorkspaceBytes(const std::string& kind, const std::vector<int64_t>& numbers,
                       int64_t threads) {
  return numbers.at(0) == 8 ? BytesOf<double>(kind, numbers, threads)
                            : BytesOf<float>(kind, numbers, threads);
}

int64_t LibraryBytes(const std::string& kind, const std::vector<int64_t>& numbers, bool or_smaller,
                     int64_t threads) {
  const std::vector<int64_t>& n = numbers;
  if (n.at(0) != 4) return 0;
  if (kind == "matmul") {
    return ChosenProductBytes({1, n.at(1), n.at(2), n.at(3)}, or_smaller, threads);
  }
  if (kind == "batch_matmul") {
    return ChosenProductBytes({n.at(1), n.at(2), n.at(3), n.at(4)}, or_smaller, threads);
  }
  return 0;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.num_threads", []() -> int64_t { return NumThreads(); })
      .def("relax_disc.cpu.workspace_bytes",
           [](const tvm::ffi::String& kind, const tvm::ffi::Shape& numbers) {
             return WorkspaceBytes(kind, {numbers.begin(), numbers.end()}, NumThreads());
           })
      .def("relax_disc.cpu.library_bytes",
           [](const tvm::ffi::String& kind, const tvm::ffi::Shape& numbers, bool or_smaller) {
             return LibraryBytes(kind, {numbers.begin(), numbers.end()}, or_smaller, NumThreads());
           })
      .def_packed("relax_disc.cpu.call_with_workspace",  // as the run time calls a kernel; for tests
                  [](tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
                    BlockPtr block = MemoryBlock::Allocate({kDLCPU, 0}, args[0].cast<int64_t>(),
                                                           Backing::kReal);
                    LentWorkspace lent(block->base(), block->bytes());
                    args[1].cast<tvm::ffi::Function>().CallPacked(args.Slice(2), result);
                  })
      .def("relax_disc.cpu.take_overflow", []() -> int64_t { return TakeOverflow(); })
      .def("relax_disc.cpu.own_workspace_bytes", []() -> int64_t { return own_bytes; });
}

}  // namespace relax_disc
