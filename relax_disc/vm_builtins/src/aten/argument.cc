#include "aten/argument.h"

#include <ATen/ops/view_as_complex.h>

#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "aten/memory.h"

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

c10::ScalarType NamedType(const std::string& name) {
  static const std::unordered_map<std::string, c10::ScalarType> types = {
      {"float64", c10::kDouble},         {"float32", c10::kFloat}, {"float16", c10::kHalf},
      {"bfloat16", c10::kBFloat16},      {"int64", c10::kLong},    {"int32", c10::kInt},
      {"int16", c10::kShort},            {"int8", c10::kChar},     {"uint8", c10::kByte},
      {"bool", c10::kBool},              {"complex32", c10::kComplexHalf},
      {"complex64", c10::kComplexFloat}, {"complex128", c10::kComplexDouble}};
  return types.at(name);
}

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

}  // namespace

at::Tensor TensorOf(const ffi::AnyView& value, bool channels_last) {
  const ffi::TensorView view = value.cast<ffi::TensorView>();
  return channels_last && view.ndim() > 3 ? ChannelsFirst(view) : AtenView(view);
}

c10::IValue RecipeArgument::Value(const Given& given) const {
  switch (kind) {
    case kConstant:
      return constant;
    case kTensor: {
      c10::IValue value = given.Operand(operand);
      const bool is_float = value.isInt() && type->kind() == c10::TypeKind::FloatType;
      return is_float ? c10::IValue(static_cast<double>(value.toInt())) : value;
    }
    case kComplex:
      return at::view_as_complex(given.Operand(operand).toTensor());
    case kScalar:
      return given.Operand(operand).toTensor().item();
    case kResult:
      return given.results.at(operand);
    case kDevice:
      return given.results.at(0).device();
    case kList: {
      std::vector<c10::IValue> values;
      for (const RecipeArgument& item : items) values.push_back(item.Value(given));
      return MakeList(type, values);
    }
  }
  return {};
}

RecipeArgument ParseArgument(const json::Array& encoded, c10::TypePtr type) {
  RecipeArgument result;
  result.type = type = WithoutOptional(std::move(type));
  const std::string kind(encoded[0].cast<ffi::String>());
  auto list = type->cast<c10::ListType>();
  if (list && kind != "list" && kind != "none") {  // one number stands for all
    result.kind = RecipeArgument::kList;
    result.type = list->getElementType();
    result.items.push_back(ParseArgument(encoded, result.type));
    return result;
  }
  auto text = [&] { return std::string(encoded[1].cast<ffi::String>()); };
  const bool is_float = type->kind() == c10::TypeKind::FloatType;
  static const std::unordered_map<std::string, RecipeArgument::Kind> by_place = {
      {"operand", RecipeArgument::kTensor},
      {"complex", RecipeArgument::kComplex},
      {"scalar", RecipeArgument::kScalar},
      {"result", RecipeArgument::kResult}};
  if (auto known = by_place.find(kind); known != by_place.end()) {
    result.kind = known->second;
    result.operand = encoded[1].cast<int64_t>();
  } else if (kind == "device") {
    result.kind = RecipeArgument::kDevice;
  } else if (kind == "list") {
    result.kind = RecipeArgument::kList;
    result.type = list ? list->getElementType() : type;
    for (const ffi::Any& item : encoded[1].cast<json::Array>()) {
      // An element may be optional: only then is it told apart from a plain one.
      RecipeArgument parsed = ParseArgument(item.cast<json::Array>(), result.type);
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

}  // namespace relax_disc
