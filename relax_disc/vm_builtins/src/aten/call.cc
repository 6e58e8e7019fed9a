// relax_disc.aten.call: one of PyTorch's operators on planned memory, by a recipe (ops/aten.py).
//
// The recipe is read once.  The call goes through PyTorch's dispatcher, so that it runs on the
// device where its operands are; it sees neither autograd nor autocast.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "aten/memory.h"

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

constexpr int64_t kVersion = 2;

c10::ScalarType NamedType(const std::string& name) {
  static const std::unordered_map<std::string, c10::ScalarType> types = {
      {"float64", c10::kDouble},         {"float32", c10::kFloat}, {"float16", c10::kHalf},
      {"bfloat16", c10::kBFloat16},      {"int64", c10::kLong},    {"int32", c10::kInt},
      {"int16", c10::kShort},            {"int8", c10::kChar},     {"uint8", c10::kByte},
      {"bool", c10::kBool},              {"complex32", c10::kComplexHalf},
      {"complex64", c10::kComplexFloat}, {"complex128", c10::kComplexDouble}};
  return types.at(name);
}

at::Tensor TensorOf(const ffi::AnyView& value, bool channels_last) {
  const ffi::TensorView view = value.cast<ffi::TensorView>();
  return channels_last && view.ndim() > 3 ? ChannelsFirst(view) : AtenView(view);
}

/*! \brief Lets PyTorch's kernels use the stream of the virtual machine; the CPU has none. */
class OnStream {
 public:
  explicit OnStream(const c10::Device& device) {
    if (device.is_cpu()) return;
    void* raw = TVMFFIEnvGetStream(kDLCUDA, device.index());
    guard_.emplace(device.type());
    // PyTorch's id of a stream that it did not make is its address; 0 is the default stream.
    const c10::StreamId id = reinterpret_cast<c10::StreamId>(raw);
    before_ = guard_->exchangeStream(c10::Stream(c10::Stream::UNSAFE, device, id));
  }
  ~OnStream() {
    if (guard_) guard_->exchangeStream(*before_);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::optional<c10::Stream> before_;
};

/*! \brief What a call is made with. */
struct Given {
  const ffi::PackedArgs& operands;
  const std::vector<at::Tensor>& results;
  bool channels_last;

  at::Tensor Tensor(int64_t operand) const { return TensorOf(operands[operand], channels_last); }
};

/*! \brief What an argument of the operator is made of. */
struct Argument {
  enum Kind { kConstant, kTensor, kComplex, kScalar, kResult, kDevice, kList };
  Kind kind = kConstant;
  int64_t operand = 0;
  c10::IValue constant;
  std::vector<Argument> items;
  c10::TypePtr type;  // of the parameter, or of a list's elements

  c10::IValue Value(const Given& given) const;
};

c10::TypePtr WithoutOptional(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) return optional->getElementType();
  return type;
}

template <typename T, typename Convert>
c10::IValue ListOf(const std::vector<c10::IValue>& items, Convert convert) {
  c10::List<T> list;
  list.reserve(items.size());
  for (const c10::IValue& item : items) list.push_back(convert(item));
  return list;
}

c10::IValue MakeList(const c10::TypePtr& element, const std::vector<c10::IValue>& items) {
  const c10::TypeKind kind = element->kind();
  if (kind == c10::TypeKind::TensorType) {
    return ListOf<at::Tensor>(items, [](const c10::IValue& v) { return v.toTensor(); });
  }
  if (kind == c10::TypeKind::OptionalType) {
    return ListOf<std::optional<at::Tensor>>(items, [](const c10::IValue& v) {
      return v.isNone() ? std::nullopt : std::make_optional(v.toTensor());
    });
  }
  if (kind == c10::TypeKind::FloatType) {
    return ListOf<double>(items, [](const c10::IValue& v) { return v.toScalar().toDouble(); });
  }
  if (kind == c10::TypeKind::BoolType) {
    return ListOf<bool>(items, [](const c10::IValue& v) { return v.toBool(); });
  }
  if (kind == c10::TypeKind::NumberType) {
    return ListOf<c10::Scalar>(items, [](const c10::IValue& v) { return v.toScalar(); });
  }
  return ListOf<int64_t>(items, [](const c10::IValue& v) { return v.toInt(); });
}

c10::IValue Argument::Value(const Given& given) const {
  switch (kind) {
    case kConstant:
      return constant;
    case kTensor: {
      const ffi::AnyView value = given.operands[operand];
      if (value.type_index() != ffi::TypeIndex::kTVMFFIInt) return given.Tensor(operand);
      const int64_t number = value.cast<int64_t>();
      return type->kind() == c10::TypeKind::FloatType ? c10::IValue(static_cast<double>(number))
                                                      : c10::IValue(number);
    }
    case kComplex:
      return at::view_as_complex(given.Tensor(operand));
    case kScalar:
      return given.Tensor(operand).item();
    case kResult:
      return given.results.at(operand);
    case kDevice:
      return given.results.at(0).device();
    case kList: {
      std::vector<c10::IValue> values;
      for (const Argument& item : items) values.push_back(item.Value(given));
      return MakeList(type, values);
    }
  }
  return {};
}

Argument Parse(const json::Array& encoded, c10::TypePtr type) {
  Argument result;
  result.type = type = WithoutOptional(std::move(type));
  const std::string kind(encoded[0].cast<ffi::String>());
  auto list = type->cast<c10::ListType>();
  if (list && kind != "list" && kind != "none") {  // one number stands for all
    result.kind = Argument::kList;
    result.type = list->getElementType();
    result.items.push_back(Parse(encoded, result.type));
    return result;
  }
  auto text = [&] { return std::string(encoded[1].cast<ffi::String>()); };
  const bool is_float = type->kind() == c10::TypeKind::FloatType;
  static const std::unordered_map<std::string, Argument::Kind> by_place = {
      {"operand", Argument::kTensor},
      {"complex", Argument::kComplex},
      {"scalar", Argument::kScalar},
      {"result", Argument::kResult}};
  if (auto known = by_place.find(kind); known != by_place.end()) {
    result.kind = known->second;
    result.operand = encoded[1].cast<int64_t>();
  } else if (kind == "device") {
    result.kind = Argument::kDevice;
  } else if (kind == "list") {
    result.kind = Argument::kList;
    result.type = list ? list->getElementType() : type;
    for (const ffi::Any& item : encoded[1].cast<json::Array>()) {
      // An element may be optional: only then is it told apart from a plain one.
      Argument parsed = Parse(item.cast<json::Array>(), result.type);
      result.items.push_back(std::move(parsed));
    }
  } else if (kind == "int") {
    const int64_t value = encoded[1].cast<int64_t>();
    result.constant = is_float ? c10::IValue(static_cast<double>(value)) : c10::IValue(value);
  } else if (kind == "bool") {
    result.constant = encoded[1].cast<bool>();
  } else if (kind == "float") {
    result.constant = std::strtod(text().c_str(), nullptr);
  } else if (kind == "pair") {
    const std::string imaginary(encoded[2].cast<ffi::String>());
    result.constant = c10::complex<double>(std::strtod(text().c_str(), nullptr),
                                           std::strtod(imaginary.c_str(), nullptr));
  } else if (kind == "dtype") {
    result.constant = static_cast<int64_t>(NamedType(text()));
  } else if (kind == "text") {
    result.constant = text();
  } else if (kind != "none") {
    TVM_FFI_THROW(ArtefactError) << "unknown argument " << kind << " in the recipe of an operator";
  }
  return result;
}

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
      arguments_.push_back(Parse(encoded[i].cast<json::Array>(), parameters.at(i).type()));
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
    const Given given{operands, results, channels_last_};
    for (const Argument& argument : arguments_) stack.push_back(argument.Value(given));
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
  std::vector<Argument> arguments_;
  std::vector<int64_t> places_;
  int64_t count_ = 0;
};

const Recipe& Known(const ffi::String& text) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::unique_ptr<Recipe>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Recipe>& recipe = (*known)[std::string(text)];
  if (recipe == nullptr) recipe = std::make_unique<Recipe>(text);
  return *recipe;
}

/*! \brief Raise what PyTorch raised as the exception that eager PyTorch's user would see. */
[[noreturn]] void Raise(const char* kind, const std::string& name, const c10::Error& error) {
  throw ffi::Error(kind, name + ": " + error.what_without_backtrace(), "");
}

void Call(ffi::PackedArgs arguments, ffi::Any* nothing) {
  const Recipe& recipe = Known(arguments[0].cast<ffi::String>());
  try {
    recipe.Run(arguments[1].cast<int64_t>(), arguments.Slice(2));
  } catch (const c10::LinAlgError& error) {
    Raise("LinAlgError", recipe.name(), error);
  } catch (const c10::IndexError& error) {
    Raise("IndexError", recipe.name(), error);
  } catch (const c10::ValueError& error) {
    Raise("ValueError", recipe.name(), error);
  } catch (const c10::Error& error) {
    Raise("RuntimeError", recipe.name(), error);
  }
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("relax_disc.aten.call", Call);
}

}  // namespace relax_disc
