/*!
 * \file metadata.h
 * \brief The table of kernels of one compiled function, as PlanArena wrote it (plan_metadata.py).
 *
 * Integers that depend on the shape are programs: postfix code over the dims, evaluated once for
 * each new shape.  Tensors, views and kernels name programs by index.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_METADATA_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_METADATA_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace relax_disc {

/*! \brief Where a tensor's bytes are. */
enum class Storage : int32_t {
  kArena = 0,     // at an offset of the arena that the plan chooses
  kGiven = 1,     // a parameter or constant that the caller passes
  kEscaping = 2,  // returned to the caller: allocated apart, at entry
  kOverwrite = 3  // the new value of a given tensor, written into its buffer
};

struct TensorEntry {
  std::string name;
  int32_t bytes = 0;  // program
  Storage storage = Storage::kArena;
  int32_t given = -1;  // index of the given tensor, for kGiven and kOverwrite
  int64_t begin = -1;  // byte of the given tensor at which this part of it begins; -1: it is all

  /*! \brief Whether it is some rows of a given tensor, which is there once more as a whole. */
  bool is_part() const { return begin >= 0; }
};

/*! \brief A tensor seen with a shape and a type; what kernels get as arguments. */
struct ViewEntry {
  int32_t tensor = 0;
  DLDataType dtype{};
  std::vector<int32_t> shape;  // programs
};

enum class ArgumentKind { kView, kInteger, kConstant, kShape };

struct Argument {
  ArgumentKind kind = ArgumentKind::kView;
  int32_t index = 0;           // view or program
  std::vector<int32_t> items;  // programs of a shape
  tvm::ffi::Any constant;      // number, text or type, given as it is
};

struct KernelEntry {
  std::string name, source;
  std::vector<Argument> arguments;
  std::vector<int32_t> inputs, outputs;              // tensors; workspace is an unread output
  std::vector<std::pair<int32_t, int32_t>> inplace;  // may share: (input, output)
  std::vector<std::pair<int32_t, int32_t>> copies;   // views copied before: (from, to)
  int32_t flops = 0, moved_bytes = 0;  // programs
  std::string workspace;                   // formula of `WorkspaceBytes`; empty: none
  std::vector<int32_t> workspace_numbers;  // programs
  bool recomputable = true;
  int32_t counts = -1;  // the dim whose size the kernel returns; negative: none
  bool overwrites = false;  // whether a given tensor's buffer is written
};

/*! \brief What dims must fulfil once the last of them has been counted. */
struct CountCheck {
  int32_t size, limit;        // programs
  bool is_inequality;         // they must differ; else the size must not be above the limit
  std::vector<int32_t> dims;  // that it mentions
  std::string message;        // what the model does or needs
};

/*! \brief What plans must know of the machine; a kernel's time before it has been measured. */
struct Machine {
  int64_t alignment = 64;  // bytes that every size and offset is a multiple of
  double flops_per_ns = 100.0, bytes_per_ns = 10.0, overhead_ns = 3000.0;
  int64_t library_bytes = 0;  // what libraries keep there all the time
  // Whether library kernels take their memory from the arena, which PyTorch's on a GPU do not.
  bool lends_memory = true;
};

struct Metadata {
  std::string function;
  std::vector<std::string> dims;
  std::vector<std::vector<int64_t>> programs;
  std::vector<TensorEntry> tensors;
  std::vector<ViewEntry> views;
  std::vector<KernelEntry> kernels;
  std::vector<int32_t> outputs;  // views, in the order of the flat result
  std::vector<CountCheck> count_checks;
  int32_t given_count = 0;
  Machine machine;

  /*! \brief Parse the JSON text of plan_metadata.py. */
  static Metadata Parse(const tvm::ffi::String& text);

  /*! \brief Value of every program at these dims. */
  std::vector<int64_t> Evaluate(const std::vector<int64_t>& dims) const;
};

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_METADATA_H_
