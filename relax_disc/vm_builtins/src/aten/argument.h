/*!
 * \file argument.h
 * \brief Arguments of PyTorch's operators as recipes write them (ops/aten.py).
 */
#ifndef RELAX_DISC_VM_BUILTINS_ATEN_ARGUMENT_H_
#define RELAX_DISC_VM_BUILTINS_ATEN_ARGUMENT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/tvm_ffi.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace relax_disc {

/*! \brief An operand as ATen sees it; channels last: see `ChannelsFirst`. */
at::Tensor TensorOf(const tvm::ffi::AnyView& value, bool channels_last);

/*! \brief What a call is made with. */
struct Given {
  explicit Given(const std::vector<at::Tensor>& results) : results(results) {}
  virtual ~Given() = default;
  /*! \brief The k-th operand, a tensor or an integer. */
  virtual c10::IValue Operand(int64_t k) const = 0;

  const std::vector<at::Tensor>& results;
};

/*! \brief What an argument of the operator is made of. */
struct RecipeArgument {
  enum Kind { kConstant, kTensor, kComplex, kScalar, kResult, kDevice, kList };
  Kind kind = kConstant;
  int64_t operand = 0;
  c10::IValue constant;
  std::vector<RecipeArgument> items;
  c10::TypePtr type;  // of the parameter, or of a list's elements

  c10::IValue Value(const Given& given) const;
};

/*! \brief Read an argument for a parameter of a type. */
RecipeArgument ParseArgument(const tvm::ffi::json::Array& encoded, c10::TypePtr type);

/*! \brief What a text describes, which is read once in a process. */
template <typename T>
const T& Known(const tvm::ffi::String& text) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::unique_ptr<T>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<T>& found = (*known)[std::string(text)];
  if (found == nullptr) found = std::make_unique<T>(text);
  return *found;
}

/*! \brief Call `run`; what PyTorch raises becomes the exception that eager PyTorch's user sees. */
template <typename Run>
void AsEager(const std::string& name, Run run) {
  auto raise = [&](const char* kind, const c10::Error& error) {
    throw tvm::ffi::Error(kind, name + ": " + error.what_without_backtrace(), "");
  };
  try {
    run();
  } catch (const c10::LinAlgError& error) {
    raise("LinAlgError", error);
  } catch (const c10::IndexError& error) {
    raise("IndexError", error);
  } catch (const c10::ValueError& error) {
    raise("ValueError", error);
  } catch (const c10::Error& error) {
    raise("RuntimeError", error);
  }
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_ATEN_ARGUMENT_H_
