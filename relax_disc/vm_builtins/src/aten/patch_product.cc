#include "aten/patch_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

#include "aten/onednn.h"
#include "aten/product.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

constexpr int64_t kElement = 2;
/*! \brief Of smaller windows oneDNN's copies are small, and its products two to three times as fast. */
constexpr int64_t kLeastTaps = 64;
/*! \brief Patches that are copied at a time, as far as they are whole samples. */
constexpr int64_t kChunkBytes = 1 << 20;

struct Form {
  explicit Form(const ConvolutionSizes& s)
      : positions(Volume(s.outer)), columns(s.inner_channels * Volume(s.kernel)) {
    const int64_t sample = std::max<int64_t>(kElement * positions * columns, 1);
    samples = std::clamp<int64_t>(kChunkBytes / sample, 1, std::max<int64_t>(s.batch, 1));
  }
  int64_t positions, columns, samples;
};

/*! \brief Axes of channels behind those of a window, or back. */
std::vector<int64_t> Rotated(int64_t rank, bool back) {
  std::vector<int64_t> order{0};
  if (back) order.push_back(rank + 1);
  for (int64_t axis = 0; axis < rank; ++axis) order.push_back(axis + (back ? 1 : 2));
  if (!back) order.push_back(1);
  return order;
}

/*! \brief Rows of patches, `[samples * positions, taps * channels]`: a copy. */
at::Tensor Patches(const ConvolutionSizes& s, const at::Tensor& inner, const Form& form) {
  std::vector<int64_t> sizes{inner.size(0)}, strides{inner.stride(0)};
  const int64_t rank = static_cast<int64_t>(s.inner.size());
  for (int64_t axis = 0; axis < rank; ++axis) {
    sizes.push_back(s.outer[axis]);
    strides.push_back(inner.stride(axis + 2) * s.stride[axis]);
  }
  for (int64_t axis = 0; axis < rank; ++axis) {
    sizes.push_back(s.kernel[axis]);
    strides.push_back(inner.stride(axis + 2) * s.dilation[axis]);
  }
  sizes.push_back(s.inner_channels);
  strides.push_back(inner.stride(1));
  return inner.as_strided(sizes, strides)
      .clone(at::MemoryFormat::Contiguous)
      .view({inner.size(0) * form.positions, form.columns});
}

/*! \brief Positions as rows of channels: no copy. */
at::Tensor Rows(const at::Tensor& outer) {
  std::vector<int64_t> order{0};
  for (int64_t axis = 2; axis < outer.dim(); ++axis) order.push_back(axis);
  order.push_back(1);
  return outer.permute(order).view({-1, outer.size(1)});
}

}  // namespace

bool IsPatchProduct(const ConvolutionSizes& s, int64_t which, int64_t element, bool is_half) {
  if (element != kElement || is_half || !OneDnnHasTiles()) return false;
  const auto is_zero = [](int64_t padding) { return padding == 0; };
  const int64_t taps = Volume(s.kernel), positions = Volume(s.outer);
  return which != 1 && s.groups == 1 && taps >= kLeastTaps && s.batch * positions * s.inner_channels > 0 &&
         s.outer_channels > 0 && std::all_of(s.padding.begin(), s.padding.end(), is_zero) &&
         positions * taps <= Volume(s.inner);
}

int64_t PatchProductBytes(const ConvolutionSizes& s, int64_t which, int64_t threads) {
  const Form form(s);
  const int64_t samples = which == 0 ? form.samples : s.batch;
  const int64_t rows = samples * form.positions, weight = s.outer_channels * form.columns;
  const int64_t product =
      which == 0
          ? AtenProductBytes({1, rows, s.outer_channels, form.columns, kElement, true}, threads)
          : AtenProductBytes({1, s.outer_channels, form.columns, rows, kElement, true}, threads);
  return PieceBytes(kElement * rows * form.columns) + 2 * PieceBytes(kElement * weight) + product;
}

void PatchProduct(const ConvolutionSizes& s, int64_t which, const at::Tensor& inner,
                  const at::Tensor& outer, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const Form form(s);
  const int64_t rank = static_cast<int64_t>(s.inner.size());
  at::Tensor rows = Rows(outer);
  if (which == 2) {
    const at::Tensor product = at::mm(rows.t(), Patches(s, inner, form));
    std::vector<int64_t> by_taps{s.outer_channels};
    by_taps.insert(by_taps.end(), s.kernel.begin(), s.kernel.end());
    by_taps.push_back(s.inner_channels);
    weight.copy_(product.view(by_taps).permute(Rotated(rank, true)));
    return;
  }
  const at::Tensor columns = weight.permute(Rotated(rank, false))
                                 .clone(at::MemoryFormat::Contiguous)
                                 .view({s.outer_channels, form.columns})
                                 .t();
  for (int64_t first = 0; first < s.batch; first += form.samples) {
    const int64_t samples = std::min(form.samples, s.batch - first);
    const at::Tensor patches = Patches(s, inner.narrow(0, first, samples), form);
    at::Tensor target = rows.narrow(0, first * form.positions, samples * form.positions);
    if (bias) {
      at::addmm_out(target, *bias, patches, columns);
    } else {
      at::mm_out(target, patches, columns);
    }
  }
}

}  // namespace relax_disc
