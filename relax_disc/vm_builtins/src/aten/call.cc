// relax_disc.aten.call: one of PyTorch's operators on planned memory, by a recipe (ops/aten.py).
//
// The recipe is read once.  The call goes through PyTorch's dispatcher, so that it runs on the
// device where its operands are; it sees neither autograd nor autocast.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <string>
#include <vector>

#include "aten/argument.h"
#include "aten/memory.h"
#include "aten/stream.h"

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

constexpr int64_t kVersion = 2;

/*! \brief The operands of a call. */
class CallOperands final : public Given {
 public:
  CallOperands(const ffi::PackedArgs& operands, const std::vector<at::Tensor>& results,
               bool channels_last)
      : Given(results), operands_(operands), channels_last_(channels_last) {}
  c10::IValue Operand(int64_t k) const final {
    const ffi::AnyView value = operands_[k];
    if (value.type_index() == ffi::TypeIndex::kTVMFFIInt) return value.cast<int64_t>();
    return TensorOf(value, channels_last_);
  }

 private:
  const ffi::PackedArgs& operands_;
  bool channels_last_;
};

/*! \brief An operator with its arguments, read from a recipe. */
class Recipe {
 public:
  explicit Recipe(const ffi::String& text) {
    json::Object object = json::Parse(text).cast<json::Object>();
    if (object.at(ffi::String("version")).cast<int64_t>() != kVersion) {
      TVM_FFI_THROW(ArtefactError) << "a recipe of another version than " << kVersion
                                   << ": compile the module again";
    }
    name_ = object.at(ffi::String("operator")).cast<ffi::String>();
    const ffi::Any out = object.at(ffi::String("out"));
    writes_results_ = out.type_index() != ffi::TypeIndex::kTVMFFINone;
    channels_last_ = object.at(ffi::String("channels_last")).cast<bool>();
    const std::string overload(
        (writes_results_ ? out : object.at(ffi::String("overload"))).cast<ffi::String>());
    handle_ = c10::Dispatcher::singleton().findSchemaOrThrow(name_.c_str(), overload.c_str());
    const auto& parameters = handle_->schema().arguments();
    json::Array encoded = object.at(ffi::String("arguments")).cast<json::Array>();
    for (size_t i = 0; i < encoded.size(); ++i) {
      arguments_.push_back(ParseArgument(encoded[i].cast<json::Array>(), parameters.at(i).type()));
    }
    for (const ffi::Any& place : object.at(ffi::String("results")).cast<json::Array>()) {
      places_.push_back(place.cast<int64_t>());
      count_ = std::max(count_, places_.back() + 1);
    }
  }

  /*! \brief Run on operands, of which the results are the last, and so many bytes of scratch. */
  void Run(int64_t bytes, const ffi::PackedArgs& operands) const {
    c10::InferenceMode without_gradients;
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    std::vector<at::Tensor> results;
    for (int64_t i = operands.size() - count_; i < operands.size(); ++i) {
      results.push_back(TensorOf(operands[i], channels_last_));
    }
    const c10::Device device = results.at(0).device();
    OnStream stream(device);
    // What is returned may be made where its one result shall be; nothing else may.
    const bool in_place = !writes_results_ && results.size() == 1 && device.is_cpu();
    std::optional<AtenScope> scope;
    if (device.is_cpu()) scope.emplace(bytes, in_place ? results[0] : at::empty({0}));
    torch::jit::Stack stack;
    stack.reserve(arguments_.size() + results.size());
    const CallOperands given(operands, results, channels_last_);
    for (const RecipeArgument& argument : arguments_) stack.push_back(argument.Value(given));
    if (writes_results_) stack.insert(stack.end(), results.begin(), results.end());
    handle_->callBoxed(stack);
    if (!writes_results_) Deliver(stack, results);
  }

  const std::string& name() const { return name_; }

 private:
  void Deliver(const torch::jit::Stack& stack, const std::vector<at::Tensor>& results) const {
    size_t next = 0;
    auto deliver = [&](const c10::IValue& value) {
      const int64_t place = places_.at(next++);
      if (place < 0) return;
      at::Tensor tensor = value.toTensor();
      relax_disc::Deliver(tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor,
                          results[place]);
    };
    for (const c10::IValue& value : stack) {
      if (value.isTensorList()) {
        for (const at::Tensor& item : value.toTensorVector()) deliver(item);
      } else {
        deliver(value);
      }
    }
  }

  std::string name_;
  std::optional<c10::OperatorHandle> handle_;
  bool writes_results_ = false, channels_last_ = false;
  std::vector<RecipeArgument> arguments_;
  std::vector<int64_t> places_;
  int64_t count_ = 0;
};

void Call(ffi::PackedArgs arguments, ffi::Any* nothing) {
  const Recipe& recipe = Known<Recipe>(arguments[0].cast<ffi::String>());
  AsEager(recipe.name(),
          [&] { recipe.Run(arguments[1].cast<int64_t>(), arguments.Slice(2)); });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("relax_disc.aten.call", Call);
}

}  // namespace relax_disc
