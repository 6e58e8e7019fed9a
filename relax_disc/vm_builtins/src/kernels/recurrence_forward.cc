// relax_disc.cpu.recurrence: the recurrent part of an RNN, GRU or LSTM layer, one direction.
//
// The threads share out the sequences of the batch and never meet; each step is one product of the
// hidden states with the weights, packed once, and one pass over the gates. See
// libraries/install.py for the arguments and recurrence_steps.py for the formulas.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include "kernels/recurrence.h"

namespace relax_disc {
namespace {

/*! \brief The rows of one sequence at one step. */
template <typename T>
struct ForwardRow {
  const T* projected;
  const T* product;  // of the hidden state and the weights
  const T* bias;
  const T* hidden;  // before the step
  const T* cell;    // before the step, LSTM only
  T* out;
  T* reserve;
};

template <Cell kCell, typename T>
void RunRow(const ForwardRow<T>& row, int64_t width) {
  typedef typename Vector<T>::Type V;
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const int64_t count = width - j;
    auto recurrent = [&](int64_t part) {
      int64_t at = part * width + j;
      return LoadLanes(row.product + at, count) + LoadLanes(row.bias + at, count);
    };
    auto input = [&](int64_t part) { return LoadLanes(row.projected + part * width + j, count); };
    auto keep = [&](int64_t part, V value) {
      StoreLanes(row.reserve + part * width + j, value, count);
    };
    V hidden;
    if constexpr (kCell == Cell::kLstm) {
      V i = Sigmoid<T>(input(0) + recurrent(0)), f = Sigmoid<T>(input(1) + recurrent(1));
      V g = Tanh<T>(input(2) + recurrent(2)), o = Sigmoid<T>(input(3) + recurrent(3));
      V cell = f * LoadLanes(row.cell + j, count) + i * g;
      hidden = o * Tanh<T>(cell);
      keep(0, i);
      keep(1, f);
      keep(2, g);
      keep(3, o);
      keep(4, cell);
    } else if constexpr (kCell == Cell::kGru) {
      V r = Sigmoid<T>(input(0) + recurrent(0)), z = Sigmoid<T>(input(1) + recurrent(1));
      V q = recurrent(2), n = Tanh<T>(input(2) + r * q);
      hidden = n + z * (LoadLanes(row.hidden + j, count) - n);
      keep(0, r);
      keep(1, z);
      keep(2, n);
      keep(3, q);
    } else {
      V value = input(0) + recurrent(0);
      hidden = kCell == Cell::kTanh ? Tanh<T>(value) : value < V{} ? V{} : value;
    }
    StoreLanes(row.out + j, hidden, count);
  }
}

template <Cell kCell, typename T>
void Forward(TensorView projected_view, TensorView state_view, TensorView weight_view,
             TensorView bias_view, int64_t batch_first, int64_t reverse, TensorView out_view,
             TensorView last_view, TensorView reserve_view) {
  Tensor<T> projected(projected_view), state(state_view), weight(weight_view), bias(bias_view),
      out(out_view), last(last_view), reserve(reserve_view);
  constexpr int64_t kGates = Gates(kCell), kReserved = Reserved(kCell);
  const Steps s = CheckedSteps<kCell>(projected, kGates, state, weight, batch_first, reverse);
  const int64_t width = s.width, columns = kGates * width, states = s.batch * width;
  TVM_FFI_CHECK(bias.Size(0, bias.ndim) == columns, ValueError)
      << "recurrence: a bias of " << bias.Size(0, bias.ndim) << " for " << columns << " gates";

  typedef PackedMatrix<T> Packed;
  const int64_t threads = RecurrentThreads(s, columns * width);
  const int64_t most = (s.batch + threads - 1) / threads, pitch = Packed::Pitch(columns);
  const int64_t room = Packed::kWorkspace + most * pitch;
  WorkspaceScope scope;
  T* memory = scope.Take<T>(Packed::Size(width, columns) + threads * room);
  const Packed packed(Matrix<T>{weight.data, 1, width}, width, columns, memory);
  T* rooms = memory + Packed::Size(width, columns);

  ParallelFor(threads, [&](int64_t part) {
    auto [first, end] = Share(s.batch, 1, threads, part);
    T* workspace = rooms + part * room;
    T* product = workspace + Packed::kWorkspace;
    for (int64_t k = 0; k < s.length; ++k) {
      const int64_t t = s.Time(k), before = k > 0 ? s.Time(k - 1) : 0;
      auto hidden = [&](int64_t b) {
        return k > 0 ? out.data + s.Row(before, b, 1) : state.data + b * width;
      };
      packed.Multiply(hidden(first), k > 0 ? s.Pitch(1) : width, end - first, product, workspace);
      for (int64_t b = first; b < end; ++b) {
        const T* cell = k > 0 ? reserve.data + s.Row(before, b, kReserved) + 4 * width
                              : state.data + states + b * width;
        ForwardRow<T> row{projected.data + s.Row(t, b, kGates),
                          product + (b - first) * pitch,
                          bias.data,
                          hidden(b),
                          kCell == Cell::kLstm ? cell : nullptr,
                          out.data + s.Row(t, b, 1),
                          reserve.data + s.Row(t, b, kReserved)};
        RunRow<kCell>(row, width);
      }
    }
    const int64_t bytes = width * sizeof(T), t = s.Time(s.length - 1);
    for (int64_t b = first; b < end; ++b) {
      const bool ran = s.length > 0;
      const T* hidden = ran ? out.data + s.Row(t, b, 1) : state.data + b * width;
      std::memcpy(last.data + b * width, hidden, bytes);
      if constexpr (kCell == Cell::kLstm) {
        const T* cell = ran ? reserve.data + s.Row(t, b, kReserved) + 4 * width
                            : state.data + states + b * width;
        std::memcpy(last.data + states + b * width, cell, bytes);
      }
    }
  });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def(
      "relax_disc.cpu.recurrence",
      [](TensorView projected, TensorView state, TensorView weight, TensorView bias, int64_t kind,
         int64_t batch_first, int64_t reverse, TensorView out, TensorView last,
         TensorView reserve) {
        WithCell(kind, [&](auto cell) {
          auto run = IsDouble(out) ? &Forward<cell(), double> : &Forward<cell(), float>;
          run(projected, state, weight, bias, batch_first, reverse, out, last, reserve);
        });
      });
}

}  // namespace relax_disc
