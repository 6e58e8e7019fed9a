// relax_disc.aten.loop: the steps of a recurrence, by a recipe (ops/loop.py).
//
// A step is a flat list of PyTorch's operators.  Values stand in numbered slots; those of a step are
// freed where the recipe says so, so that a loop takes the memory of one step whatever its length.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aten/argument.h"
#include "aten/memory.h"
#include "aten/stream.h"

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

constexpr int64_t kVersion = 1;

json::Array ArrayAt(const json::Array& array, size_t index) {
  return array[index].cast<json::Array>();
}

int64_t IntAt(const json::Array& array, size_t index) { return array[index].cast<int64_t>(); }

/*! \brief An integer: a constant, or an operand that depends on sizes. */
struct Number {
  bool is_operand;
  int64_t value;

  static Number Read(const json::Array& encoded) {
    return {encoded[0].cast<ffi::String>() == "operand", IntAt(encoded, 1)};
  }
  int64_t Value(const ffi::PackedArgs& operands) const {
    return is_operand ? operands[value].cast<int64_t>() : value;
  }
};

/*! \brief `factor * t + offset` in the number t of a step, along an axis. */
struct Position {
  int64_t axis = 0;
  Number factor{false, 0}, offset{false, 0};

  static Position Read(const json::Array& encoded, size_t first) {
    return {IntAt(encoded, first), Number::Read(ArrayAt(encoded, first + 1)),
            Number::Read(ArrayAt(encoded, first + 2))};
  }
  int64_t At(int64_t step, const ffi::PackedArgs& operands) const {
    return factor.Value(operands) * step + offset.Value(operands);
  }
  at::Tensor Of(const at::Tensor& tensor, int64_t step, const ffi::PackedArgs& operands) const {
    return tensor.select(axis, At(step, operands));
  }
};

/*! \brief What a slot holds when a step begins. */
struct Input {
  enum Kind { kWhole, kStep, kCarry, kAt } kind;
  int64_t slot, operand = 0, next = 0;
  Position position;

  static Input Read(const json::Array& encoded) {
    const std::string kind(encoded[0].cast<ffi::String>());
    Input input{kWhole, IntAt(encoded, 1)};
    if (kind == "at") {
      input.kind = kAt;
      input.position = Position::Read(encoded, 2);
      return input;
    }
    input.operand = IntAt(encoded, 2);
    if (kind == "step") {
      input.kind = kStep;
      input.position = Position::Read(encoded, 3);
    } else if (kind == "carry") {
      input.kind = kCarry;
      input.next = IntAt(encoded, 3);
    }
    return input;
  }
};

/*! \brief What a result of the loop is made of. */
struct Result {
  enum Kind { kCarry, kBefore, kStack, kWrite, kLast, kSum, kScatter, kErased } kind;
  int64_t slot;          // or the number of the carry
  int64_t operand = -1;  // that the result begins with
  Position position;

  static Result Read(const json::Array& encoded) {
    static const std::unordered_map<std::string, Kind> kinds = {
        {"carry", kCarry}, {"before", kBefore}, {"stack", kStack},     {"write", kWrite},
        {"last", kLast},   {"sum", kSum},       {"scatter", kScatter}, {"erased", kErased}};
    const std::string name(encoded[0].cast<ffi::String>());
    auto kind = kinds.find(name);
    if (kind == kinds.end()) {
      TVM_FFI_THROW(ArtefactError) << "unknown result " << name << " in the recipe of a loop";
    }
    Result result{kind->second, IntAt(encoded, 1)};
    if (result.kind == kWrite || result.kind == kErased) result.operand = IntAt(encoded, 2);
    if (encoded.size() > 3) result.position = Position::Read(encoded, 3);
    return result;
  }
};

/*! \brief One operator of a step. */
struct StepCall {
  c10::OperatorHandle handle;
  std::vector<RecipeArgument> arguments;
  std::vector<int64_t> slots;  // of what it returns; -1: nothing reads it
  std::vector<int64_t> freed;  // slots that nothing reads afterwards

  static StepCall Read(const json::Object& object) {
    const std::string name(object.at(ffi::String("operator")).cast<ffi::String>());
    const std::string overload(object.at(ffi::String("overload")).cast<ffi::String>());
    StepCall call{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())};
    const auto& parameters = call.handle.schema().arguments();
    json::Array encoded = object.at(ffi::String("arguments")).cast<json::Array>();
    for (size_t i = 0; i < encoded.size(); ++i) {
      call.arguments.push_back(ParseArgument(ArrayAt(encoded, i), parameters.at(i).type()));
    }
    for (const ffi::Any& slot : object.at(ffi::String("slots")).cast<json::Array>()) {
      call.slots.push_back(slot.cast<int64_t>());
    }
    for (const ffi::Any& slot : object.at(ffi::String("freed")).cast<json::Array>()) {
      call.freed.push_back(slot.cast<int64_t>());
    }
    return call;
  }
};

/*! \brief The values of a step. */
class Slots final : public Given {
 public:
  Slots(int64_t count, const std::vector<at::Tensor>& results)
      : Given(results), values(static_cast<size_t>(count)) {}
  c10::IValue Operand(int64_t k) const final { return values.at(k); }

  std::vector<c10::IValue> values;
};

/*! \brief A loop, read from a recipe. */
class Loop {
 public:
  explicit Loop(const ffi::String& text) {
    json::Object object = json::Parse(text).cast<json::Object>();
    if (object.at(ffi::String("version")).cast<int64_t>() != kVersion) {
      TVM_FFI_THROW(ArtefactError) << "the recipe of a loop of another version than " << kVersion
                                   << ": compile the module again";
    }
    line_ = object.at(ffi::String("line")).cast<ffi::String>();
    count_ = Number::Read(object.at(ffi::String("count")).cast<json::Array>());
    reverse_ = object.at(ffi::String("reverse")).cast<bool>();
    slots_ = object.at(ffi::String("slots")).cast<int64_t>();
    for (const ffi::Any& item : object.at(ffi::String("inputs")).cast<json::Array>()) {
      inputs_.push_back(Input::Read(item.cast<json::Array>()));
    }
    for (const ffi::Any& item : object.at(ffi::String("calls")).cast<json::Array>()) {
      calls_.push_back(StepCall::Read(item.cast<json::Object>()));
    }
    for (const ffi::Any& item : object.at(ffi::String("results")).cast<json::Array>()) {
      results_.push_back(Result::Read(item.cast<json::Array>()));
    }
    for (const ffi::Any& slot : object.at(ffi::String("kept")).cast<json::Array>()) {
      kept_.push_back(slot.cast<int64_t>());
    }
  }

  /*! \brief Run on operands, of which the results are the last, and so many bytes of scratch. */
  void Run(int64_t bytes, const ffi::PackedArgs& operands) const {
    c10::InferenceMode without_gradients;
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    std::vector<at::Tensor> results;
    const int64_t first = operands.size() - static_cast<int64_t>(results_.size());
    for (int64_t i = first; i < operands.size(); ++i) results.push_back(TensorOf(operands[i], false));
    const c10::Device device = results.at(0).device();
    OnStream stream(device);
    std::optional<AtenScope> scope;
    if (device.is_cpu()) scope.emplace(bytes, at::empty({0}));
    std::vector<c10::IValue> given;  // tensors and integers, viewed once
    for (int64_t i = 0; i < first; ++i) {
      const ffi::AnyView value = operands[i];
      const bool is_number = value.type_index() == ffi::TypeIndex::kTVMFFIInt;
      given.push_back(is_number ? c10::IValue(value.cast<int64_t>()) : TensorOf(value, false));
    }
    Begin(given, results);
    Slots slots(slots_, results);
    std::vector<c10::IValue> carries;
    for (const Input& input : inputs_) {
      if (input.kind == Input::kCarry) carries.push_back(given[input.operand]);
      if (input.kind == Input::kWhole) slots.values[input.slot] = given[input.operand];
    }
    const int64_t count = count_.Value(operands);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t step = reverse_ ? count - 1 - k : k;
      Fill(&slots, given, carries, step, operands);
      Collect(true, slots, carries, step, k + 1 == count, operands);
      for (const StepCall& call : calls_) Make(call, &slots);
      Collect(false, slots, carries, step, k + 1 == count, operands);
      size_t place = 0;
      for (const Input& input : inputs_) {
        if (input.kind == Input::kCarry) carries[place++] = slots.values[input.next];
      }
      for (const int64_t slot : kept_) slots.values[slot] = c10::IValue();
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].kind == Result::kCarry) {
        results[i].copy_(carries.at(results_[i].slot).toTensor());
      }
    }
  }

  const std::string& line() const { return line_; }

 private:
  void Begin(const std::vector<c10::IValue>& given, const std::vector<at::Tensor>& results) const {
    for (size_t i = 0; i < results_.size(); ++i) {
      const Result& result = results_[i];
      if (result.operand >= 0) results[i].copy_(given.at(result.operand).toTensor());
      const bool grows = result.kind == Result::kSum || result.kind == Result::kScatter;
      if (grows || result.kind == Result::kLast) results[i].zero_();
    }
  }

  void Fill(Slots* slots, const std::vector<c10::IValue>& given,
            const std::vector<c10::IValue>& carries, int64_t step,
            const ffi::PackedArgs& operands) const {
    size_t place = 0;
    for (const Input& input : inputs_) {
      c10::IValue& slot = slots->values[input.slot];
      if (input.kind == Input::kCarry) slot = carries[place++];
      if (input.kind == Input::kAt) slot = input.position.At(step, operands);
      if (input.kind == Input::kStep) {
        slot = input.position.Of(given[input.operand].toTensor(), step, operands);
      }
    }
  }

  void Make(const StepCall& call, Slots* slots) const {
    torch::jit::Stack stack;
    stack.reserve(call.arguments.size());
    for (const RecipeArgument& argument : call.arguments) stack.push_back(argument.Value(*slots));
    call.handle.callBoxed(stack);
    size_t next = 0;
    auto deliver = [&](c10::IValue value) {
      const int64_t slot = call.slots.at(next++);
      if (slot >= 0) slots->values[slot] = std::move(value);
    };
    for (c10::IValue& value : stack) {
      if (value.isTensorList()) {
        for (const at::Tensor& item : value.toTensorVector()) deliver(item);
      } else {
        deliver(std::move(value));
      }
    }
    stack.clear();
    for (const int64_t slot : call.freed) slots->values[slot] = c10::IValue();
  }

  /*! \brief Write what a step gives to the results, before its operators or after them. */
  void Collect(bool before, const Slots& slots, const std::vector<c10::IValue>& carries,
               int64_t step, bool is_last, const ffi::PackedArgs& operands) const {
    for (size_t i = 0; i < results_.size(); ++i) {
      const Result& result = results_[i];
      const at::Tensor& whole = slots.results[i];
      if (before != (result.kind == Result::kBefore)) continue;
      auto value = [&] { return slots.values.at(result.slot).toTensor(); };
      switch (result.kind) {
        case Result::kBefore:
          whole.select(0, step).copy_(carries.at(result.slot).toTensor());
          break;
        case Result::kStack:
          whole.select(0, step).copy_(value());
          break;
        case Result::kWrite:
          result.position.Of(whole, step, operands).copy_(value());
          break;
        case Result::kLast:
          if (is_last) whole.copy_(value());
          break;
        case Result::kSum:
          whole.add_(value());
          break;
        case Result::kScatter:
          result.position.Of(whole, step, operands).add_(value());
          break;
        case Result::kErased:
          result.position.Of(whole, step, operands).zero_();
          break;
        case Result::kCarry:
          break;
      }
    }
  }

  std::string line_;
  Number count_{false, 0};
  bool reverse_ = false;
  int64_t slots_ = 0;
  std::vector<Input> inputs_;
  std::vector<StepCall> calls_;
  std::vector<Result> results_;
  std::vector<int64_t> kept_;  // slots that hold values until their step ends
};

void Call(ffi::PackedArgs arguments, ffi::Any* nothing) {
  const Loop& loop = Known<Loop>(arguments[0].cast<ffi::String>());
  AsEager(loop.line(), [&] { loop.Run(arguments[1].cast<int64_t>(), arguments.Slice(2)); });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("relax_disc.aten.loop", Call);
}

}  // namespace relax_disc
