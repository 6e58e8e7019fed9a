#include "runtime/metadata.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/json.h>

#include <algorithm>

#include "runtime/lists.h"

namespace relax_disc {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

namespace {

constexpr int64_t kVersion = 10;

ffi::Any Field(const json::Object& object, const char* name) {
  auto found = object.find(ffi::String(name));
  if (found == object.end()) TVM_FFI_THROW(ArtefactError) << "plan metadata lack " << name;
  return (*found).second;
}

DLDataType DType(const ffi::Any& value) {
  return ffi::StringToDLDataType(value.cast<ffi::String>());
}

Argument ParseArgument(const ffi::Any& value) {
  List pair = ListOf(value);
  std::string kind = pair[0].cast<ffi::String>();
  ffi::Any operand = pair[1];
  Argument result;
  if (kind == "view" || kind == "integer") {
    result.kind = kind == "view" ? ArgumentKind::kView : ArgumentKind::kInteger;
    result.index = static_cast<int32_t>(operand.cast<int64_t>());
  } else if (kind == "shape") {
    result.kind = ArgumentKind::kShape;
    result.items = Integers(operand);
  } else {
    result.kind = ArgumentKind::kConstant;
    if (kind == "dtype") {
      result.constant = DType(operand);
    } else if (kind == "float") {
      result.constant = operand.cast<double>();
    } else {
      result.constant = operand;
    }
  }
  return result;
}

KernelEntry ParseKernel(const ffi::Any& value) {
  json::Object object = value.cast<json::Object>();
  KernelEntry result;
  result.name = std::string(Field(object, "name").cast<ffi::String>());
  result.source = std::string(Field(object, "source").cast<ffi::String>());
  for (const ffi::Any& item : ListOf(Field(object, "arguments"))) {
    result.arguments.push_back(ParseArgument(item));
  }
  result.inputs = Integers(Field(object, "inputs"));
  result.outputs = Integers(Field(object, "outputs"));
  result.inplace = Pairs(Field(object, "inplace"));
  result.copies = Pairs(Field(object, "copies"));
  result.flops = static_cast<int32_t>(Field(object, "flops").cast<int64_t>());
  result.moved_bytes = static_cast<int32_t>(Field(object, "moved_bytes").cast<int64_t>());
  result.recomputable = Field(object, "recomputable").cast<bool>();
  result.counts = static_cast<int32_t>(Field(object, "counts").cast<int64_t>());
  List workspace = ListOf(Field(object, "workspace"));
  result.workspace = std::string(workspace[0].cast<ffi::String>());
  result.workspace_numbers = Integers(workspace[1]);
  return result;
}

int64_t FloorDiv(int64_t a, int64_t b) {
  if (b == 0) TVM_FFI_THROW(ShapeRangeError) << "a size of this shape divides by zero";
  int64_t quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}

int64_t Run(const std::vector<int64_t>& program, const std::vector<int64_t>& dims,
            std::vector<int64_t>* stack) {
  stack->clear();
  for (size_t at = 0; at < program.size(); ++at) {
    int64_t code = program[at];
    if (code == 0) {
      stack->push_back(program[++at]);
    } else if (code == 1) {
      stack->push_back(dims[program[++at]]);
    } else {
      int64_t b = stack->back();
      stack->pop_back();
      int64_t& a = stack->back();
      switch (code) {
        case 2: a = a + b; break;
        case 3: a = a - b; break;
        case 4: a = a * b; break;
        case 5: a = FloorDiv(a, b); break;
        case 6: a = a - FloorDiv(a, b) * b; break;
        case 7: a = std::min(a, b); break;
        case 8: a = std::max(a, b); break;
        default: TVM_FFI_THROW(ArtefactError) << "unknown code " << code << " in plan metadata";
      }
    }
  }
  return stack->back();
}

}  // namespace

Metadata Metadata::Parse(const ffi::String& text) {
  json::Object object = json::Parse(text).cast<json::Object>();
  if (Field(object, "version").cast<int64_t>() != kVersion) {
    TVM_FFI_THROW(ArtefactError) << "plan metadata of another version than " << kVersion
                                 << ": compile the module again";
  }
  Metadata result;
  result.function = std::string(Field(object, "function").cast<ffi::String>());
  for (const ffi::Any& item : ListOf(Field(object, "dims"))) {
    result.dims.emplace_back(item.cast<ffi::String>());
  }
  for (const ffi::Any& item : ListOf(Field(object, "programs"))) {
    result.programs.push_back(Integers<int64_t>(item));
  }
  for (const ffi::Any& item : ListOf(Field(object, "tensors"))) {
    List row = ListOf(item);
    result.tensors.push_back({std::string(row[0].cast<ffi::String>()),
                              static_cast<int32_t>(row[1].cast<int64_t>()),
                              static_cast<Storage>(row[2].cast<int64_t>()),
                              static_cast<int32_t>(row[3].cast<int64_t>()),
                              row[4].cast<int64_t>()});
    result.given_count = std::max(result.given_count, result.tensors.back().given + 1);
  }
  for (const ffi::Any& item : ListOf(Field(object, "views"))) {
    List row = ListOf(item);
    result.views.push_back(
        {static_cast<int32_t>(row[0].cast<int64_t>()), DType(row[1]), Integers(row[2])});
  }
  for (const ffi::Any& item : ListOf(Field(object, "kernels"))) {
    result.kernels.push_back(ParseKernel(item));
    KernelEntry& kernel = result.kernels.back();
    for (int32_t tensor : kernel.outputs) {
      kernel.overwrites |= result.tensors[tensor].storage == Storage::kOverwrite;
    }
  }
  result.outputs = Integers(Field(object, "outputs"));
  for (const ffi::Any& item : ListOf(Field(object, "count_checks"))) {
    auto check = item.cast<json::Object>();
    result.count_checks.push_back(
        {static_cast<int32_t>(Field(check, "size").cast<int64_t>()),
         static_cast<int32_t>(Field(check, "limit").cast<int64_t>()),
         std::string(Field(check, "relation").cast<ffi::String>()) == "!=",
         Integers(Field(check, "dims")), std::string(Field(check, "message").cast<ffi::String>())});
  }
  auto machine = Field(object, "machine").cast<json::Object>();
  result.machine = {Field(machine, "alignment").cast<int64_t>(),
                    Field(machine, "flops_per_ns").cast<double>(),
                    Field(machine, "bytes_per_ns").cast<double>(),
                    Field(machine, "overhead_ns").cast<double>(),
                    Field(machine, "library_bytes").cast<int64_t>(),
                    Field(machine, "host_bytes_per_ns").cast<double>() == 0};
  return result;
}

std::vector<int64_t> Metadata::Evaluate(const std::vector<int64_t>& dims) const {
  std::vector<int64_t> stack, result;
  result.reserve(programs.size());
  for (const std::vector<int64_t>& program : programs) {
    result.push_back(Run(program, dims, &stack));
  }
  return result;
}

}  // namespace relax_disc
