// relax_disc.cpu.recurrence_backward: gradients before the activations, and of the first state.
//
// Threads, products and layout as in recurrence_forward.cc, time the other way. The gradients of
// weights, biases and inputs are products over all steps and are left to the matrix library.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include "kernels/recurrence.h"

namespace relax_disc {
namespace {

/*! \brief The rows of one sequence at one step. */
template <typename T>
struct BackwardRow {
  const T* grad_out;
  const T* by_hidden;  // gradient of the hidden state after the step, through later steps
  const T* out;
  const T* reserve;
  const T* before;  // GRU: hidden state before the step; LSTM: cell before the step
  T* carried;  // GRU: gradient that passes the step by; LSTM: gradient of the cell
  T* gradients;
};

template <Cell kCell, typename T>
void RunRow(const BackwardRow<T>& row, int64_t width) {
  typedef typename Vector<T>::Type V;
  const V one = V{} + T(1);
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const int64_t count = width - j;
    auto kept = [&](int64_t part) { return LoadLanes(row.reserve + part * width + j, count); };
    auto give = [&](int64_t part, V value) {
      StoreLanes(row.gradients + part * width + j, value, count);
    };
    V by_hidden = LoadLanes(row.grad_out + j, count) + LoadLanes(row.by_hidden + j, count);
    if constexpr (kCell == Cell::kLstm) {
      const V i = kept(0), f = kept(1), g = kept(2), o = kept(3), bent = Tanh<T>(kept(4));
      const V by_cell =
          LoadLanes(row.carried + j, count) + by_hidden * o * (one - bent * bent);
      give(0, by_cell * g * i * (one - i));
      give(1, by_cell * LoadLanes(row.before + j, count) * f * (one - f));
      give(2, by_cell * i * (one - g * g));
      give(3, by_hidden * bent * o * (one - o));
      StoreLanes(row.carried + j, by_cell * f, count);
    } else if constexpr (kCell == Cell::kGru) {
      by_hidden += LoadLanes(row.carried + j, count);
      const V r = kept(0), z = kept(1), n = kept(2), q = kept(3);
      const V by_n = by_hidden * (one - z) * (one - n * n);
      give(0, by_n * q * r * (one - r));
      give(1, by_hidden * (LoadLanes(row.before + j, count) - n) * z * (one - z));
      give(2, by_n * r);
      give(3, by_n);
      StoreLanes(row.carried + j, by_hidden * z, count);
    } else {
      const V out = LoadLanes(row.out + j, count);
      give(0, kCell == Cell::kTanh ? by_hidden * (one - out * out)
                                   : out > V{} ? by_hidden : V{});
    }
  }
}

template <Cell kCell, typename T>
void Backward(TensorView grad_out_view, TensorView grad_last_view, TensorView state_view,
              TensorView weight_view, TensorView out_view, TensorView reserve_view,
              int64_t batch_first, int64_t reverse, TensorView gradients_view,
              TensorView grad_state_view) {
  Tensor<T> grad_out(grad_out_view), grad_last(grad_last_view), state(state_view),
      weight(weight_view), out(out_view), reserve(reserve_view), gradients(gradients_view),
      grad_state(grad_state_view);
  constexpr int64_t kReserved = Reserved(kCell), kParts = Gradients(kCell);
  const Steps s = CheckedSteps<kCell>(grad_out, 1, state, weight, batch_first, reverse);
  const int64_t width = s.width, depth = Gates(kCell) * width, states = s.batch * width;

  typedef PackedMatrix<T> Packed;
  const int64_t threads = RecurrentThreads(s, depth * width);
  const int64_t most = (s.batch + threads - 1) / threads, pitch = Packed::Pitch(width);
  const int64_t room = Packed::kWorkspace + most * (pitch + width);
  WorkspaceScope scope;
  T* memory = scope.Take<T>(Packed::Size(depth, width) + threads * room);
  const Packed packed(Matrix<T>{weight.data, width, 1}, depth, width, memory);
  T* rooms = memory + Packed::Size(depth, width);

  ParallelFor(threads, [&](int64_t part) {
    auto [first, end] = Share(s.batch, 1, threads, part);
    T* workspace = rooms + part * room;
    T* by_hidden = workspace + Packed::kWorkspace;
    T* carried = by_hidden + most * pitch;
    const int64_t bytes = width * sizeof(T);
    for (int64_t b = first; b < end; ++b) {
      std::memcpy(by_hidden + (b - first) * pitch, grad_last.data + b * width, bytes);
      T* start = carried + (b - first) * width;
      if constexpr (kCell == Cell::kLstm) {
        std::memcpy(start, grad_last.data + states + b * width, bytes);
      } else {
        std::memset(start, 0, bytes);
      }
    }
    for (int64_t k = s.length - 1; k >= 0; --k) {
      const int64_t t = s.Time(k), before = k > 0 ? s.Time(k - 1) : 0;
      for (int64_t b = first; b < end; ++b) {
        const T* earlier = nullptr;
        if constexpr (kCell == Cell::kLstm) {
          earlier = k > 0 ? reserve.data + s.Row(before, b, kReserved) + 4 * width
                          : state.data + states + b * width;
        } else if constexpr (kCell == Cell::kGru) {
          earlier = k > 0 ? out.data + s.Row(before, b, 1) : state.data + b * width;
        }
        BackwardRow<T> row{grad_out.data + s.Row(t, b, 1),
                           by_hidden + (b - first) * pitch,
                           out.data + s.Row(t, b, 1),
                           reserve.data + s.Row(t, b, kReserved),
                           earlier,
                           carried + (b - first) * width,
                           gradients.data + s.Row(t, b, kParts)};
        RunRow<kCell>(row, width);
      }
      packed.Multiply(gradients.data + s.Row(t, first, kParts), s.Pitch(kParts), end - first,
                      by_hidden, workspace);
    }
    for (int64_t b = first; b < end; ++b) {
      const T* hidden = by_hidden + (b - first) * pitch;
      const T* extra = carried + (b - first) * width;
      T* target = grad_state.data + b * width;
      for (int64_t j = 0; j < width; ++j) {
        target[j] = kCell == Cell::kGru ? hidden[j] + extra[j] : hidden[j];
      }
      if constexpr (kCell == Cell::kLstm) std::memcpy(target + states, extra, bytes);
    }
  });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def(
      "relax_disc.cpu.recurrence_backward",
      [](TensorView grad_out, TensorView grad_last, TensorView state, TensorView weight,
         TensorView out, TensorView reserve, int64_t kind, int64_t batch_first, int64_t reverse,
         TensorView gradients, TensorView grad_state) {
        WithCell(kind, [&](auto cell) {
          auto run = IsDouble(out) ? &Backward<cell(), double> : &Backward<cell(), float>;
          run(grad_out, grad_last, state, weight, out, reserve, batch_first, reverse, gradients,
              grad_state);
        });
      });
}

}  // namespace relax_disc
