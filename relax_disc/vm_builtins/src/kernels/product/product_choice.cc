#include "kernels/product/product_choice.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <cmath>
#include <memory>

#include "kernels/product/amx_kernel.h"

namespace relax_disc {
namespace {

using Table = std::bitset<kProductClasses>;

constexpr int kLayouts = 3, kShapes = 7, kSteps = 13;
constexpr int64_t kThin = 4, kNarrow = 24;  // most of the smallest extent
constexpr int64_t kMany = 64;               // small products in a batch that share a call's cost
constexpr int kSmallOctaves = 20;           // what is small: the work is below 2^20 multiply-adds
constexpr int kMostThreads = 256;           // more have no table

const Table kOwn;
std::array<std::atomic<const Table*>, kMostThreads + 1> tables;
std::atomic<int> forced{-1};  // 0: own everywhere, 1: others everywhere
std::atomic<const OtherProducts*> offered{nullptr};

/*! \brief 0: wide; else which extent is the smallest, and whether it is thin or narrow. */
int ShapeOf(const ProductSizes& sizes) {
  const int64_t extents[3] = {sizes.n, sizes.m, sizes.k};
  const int least = static_cast<int>(std::min_element(extents, extents + 3) - extents);
  if (extents[least] > kNarrow) return 0;
  return 1 + 2 * least + (extents[least] > kThin ? 1 : 0);
}

/*! \brief The table of so many threads, which is empty for good if there was none. */
const Table& TableOf(int64_t threads) {
  if (threads < 1 || threads > kMostThreads) return kOwn;
  const Table* found = nullptr;
  if (tables[threads].compare_exchange_strong(found, &kOwn)) return kOwn;
  return *found;
}

/*! \brief Set a table unless there is one; false if another one stays. */
bool Choose(int64_t threads, const tvm::ffi::Shape& classes) {
  TVM_FFI_CHECK(threads >= 1, ValueError) << threads << " threads multiply nothing";
  if (threads > kMostThreads) return false;
  auto table = std::make_unique<Table>();
  for (int64_t index : classes) table->set(index);
  const Table* found = nullptr;
  if (tables[threads].compare_exchange_strong(found, table.get())) {
    table.release();  // lives as long as the process
    return true;
  }
  return *found == *table;
}

}  // namespace

int ProductClass(const ProductSizes& sizes, Operands operands) {
  // Steps of four in the work of one product: below 2^6 multiply-adds, ..., from 2^28 on.
  const double work = static_cast<double>(sizes.m) * static_cast<double>(sizes.n) *
                      static_cast<double>(sizes.k);
  const int octave = work < 1 ? 0 : static_cast<int>(std::ilogb(work));
  const int step = std::clamp((octave - 4) / 2, 0, kSteps - 1);
  const bool is_many = sizes.count >= kMany && octave < kSmallOctaves;
  const int kind = is_many ? 2 : sizes.count > 1 ? 1 : 0;
  return ((kind * kLayouts + static_cast<int>(operands)) * kShapes + ShapeOf(sizes)) * kSteps +
         step;
}

void OfferProducts(const OtherProducts& others) { offered = new OtherProducts(others); }

const OtherProducts* ChosenProducts(const ProductSizes& sizes, Operands operands,
                                    int64_t threads) {
  const OtherProducts* others = offered;
  // What has no depth is filled, not multiplied.
  if (others == nullptr || sizes.count * sizes.m * sizes.n * sizes.k == 0) return nullptr;
  const int force = forced;
  if (force >= 0) return force == 1 ? others : nullptr;
  return TableOf(threads).test(ProductClass(sizes, operands)) ? others : nullptr;
}

int64_t ChosenProductBytes(const ProductSizes& sizes, bool or_smaller, int64_t threads) {
  const OtherProducts* offer = offered;
  if (or_smaller && offer != nullptr && forced < 0 && TableOf(threads).any()) {
    return offer->bytes(sizes, threads);
  }
  for (Operands operands : {Operands::kPlain, Operands::kTransposedB, Operands::kTransposedA}) {
    const OtherProducts* others = ChosenProducts(sizes, operands, threads);
    if (others != nullptr) return others->bytes(sizes, threads);
  }
  return 0;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.has_other_products", []() -> bool { return offered != nullptr; })
      .def("relax_disc.cpu.has_matrix_tiles", HasAmx)
      .def("relax_disc.cpu.product_class",
           [](int64_t count, int64_t m, int64_t n, int64_t k, int64_t operands) -> int64_t {
             return ProductClass({count, m, n, k}, static_cast<Operands>(operands));
           })
      .def("relax_disc.cpu.choose_products", Choose)
      // 0: own kernels, 1: PyTorch's, -1: as the tables say; returns what held before
      .def("relax_disc.cpu.force_products",
           [](int64_t which) -> int64_t { return forced.exchange(static_cast<int>(which)); });
}

}  // namespace relax_disc
