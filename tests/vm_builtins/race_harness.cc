// Runs the parallel library kernels on plain threads, for ThreadSanitizer to watch.
//
// OpenMP is not instrumented, so that its own synchronisation would look like races; here every
// parallel region starts and joins its threads.  Built and run by `test_races.py`.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "aten/convolution.h"
#include "aten/product.h"
#include "kernels/parallel.h"
#include "offload/file_tier.h"

namespace ffi = tvm::ffi;

constexpr int kThreads = 4;

namespace relax_disc {

int NumThreads() { return kThreads; }

int LoopThreads() { return kThreads; }

void LaunchTasks(void (*body)(void*, int, int), void* data, int tasks) {
  std::vector<std::thread> threads;
  for (int i = 1; i < tasks; ++i) threads.emplace_back([=] { body(data, i, tasks); });
  body(data, 0, tasks);
  for (std::thread& thread : threads) thread.join();
}

// Convolutions and some products are PyTorch's, which is not watched here; asking for one is an
// error of the harness.
int64_t AtenProductBytes(const AtenProduct&, int64_t) { std::abort(); }
ConvolutionSizes ConvolutionSizes::Read(const std::vector<int64_t>&, std::size_t) { std::abort(); }
int64_t ConvolutionBytes(const ConvolutionSizes&, int64_t, int64_t, bool, int64_t) {
  std::abort();
}

}  // namespace relax_disc

struct Memory {
  void AllocData(DLTensor* tensor) {
    int64_t bytes = tensor->dtype.bits / 8;
    for (int i = 0; i < tensor->ndim; ++i) bytes *= tensor->shape[i];
    tensor->data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    // Small values that are no constant; as integers they are 0.
    auto* floats = static_cast<float*>(tensor->data);
    for (int64_t i = 0; i < bytes / 4; ++i) {
      floats[i] = tensor->dtype.code == kDLFloat ? static_cast<float>(i % 17 - 8) / 16 : 0;
    }
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor Make(std::vector<int64_t> shape, int code = kDLFloat, int bits = 32) {
  return ffi::Tensor::FromNDAlloc(Memory{}, ffi::ShapeView(shape.data(), shape.size()),
                                  {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1},
                                  {kDLCPU, 0});
}

template <typename... Args>
void Call(const std::string& name, Args... arguments) {
  ffi::Function::GetGlobalRequired("relax_disc.cpu." + name)(arguments...);
  std::printf("%s\n", name.c_str());
}

void Matmuls() {
  // Wide, deep (two blocks of B in turn), tall, transposed; then batches on one and on all threads.
  struct {
    int64_t m, n, k;
  } sizes[] = {{200, 700, 300}, {90, 1500, 1800}, {900, 64, 200}, {64, 64, 3000}};
  for (auto [m, n, k] : sizes) {
    Call("matmul", Make({m, k}), Make({k, n}), 1, 1, 0, 0, Make({m, n}));
    Call("matmul", Make({k, m}), Make({n, k}), 1, 1, 1, 1, Make({m, n}));
    ffi::Tensor sum = Make({m, n});
    Call("matmul_add", Make({m, k}), Make({k, n}), sum, 1, 1, 0, 0, sum);  // in place
  }
  const int64_t plain = 0x012;
  for (int64_t count : {2, 17}) {
    Call("batch_matmul", Make({count, 90, 200}), Make({count, 200, 130}), plain, plain, plain,
         Make({count, 90, 130}));
  }
}

void Attentions() {
  const int64_t b = 2, h = 4, g = 2, t = 500, d = 32;
  for (int64_t causal : {0, 1}) {
    ffi::Tensor q = Make({b, h, t, d}), k = Make({b, g, t, d}), v = Make({b, g, t, d});
    ffi::Tensor out = Make({b, h, t, d}), lse = Make({b, h, t});
    Call("attention", q, k, v, 0.2, causal, 0, out, lse);
    Call("attention_backward", Make({b, h, t, d}), q, k, v, out, lse, 0.2, causal, 0,
         Make({b, h, t, d}), Make({b, g, t, d}), Make({b, g, t, d}));
  }
}

void Recurrences() {
  const int64_t t = 9, b = 30, h = 70;
  struct {
    int64_t kind, gates, states, reserved, parts;
  } cells[] = {{0, 1, 1, 0, 1}, {2, 3, 1, 4, 4}, {3, 4, 2, 5, 4}};  // of recurrence.h
  for (auto [kind, gates, states, reserved, parts] : cells) {
    ffi::Tensor state = Make({states, b, h}), weight = Make({gates * h, h});
    ffi::Tensor out = Make({t, b, h}), reserve = Make({t, b, reserved * h});
    Call("recurrence", Make({t, b, gates * h}), state, weight, Make({gates * h}), kind, 0, 0, out,
         Make({states, b, h}), reserve);
    Call("recurrence_backward", Make({t, b, h}), Make({states, b, h}), state, weight, out, reserve,
         kind, 0, 0, Make({t, b, parts * h}), Make({states, b, h}));
  }
}

void Others() {
  ffi::Tensor ids = Make({3000}, kDLInt, 64);  // all the same row
  Call("embedding_backward", Make({3000, 256}), ids, -1, Make({50, 256}));
  ffi::Tensor sum = Make({50, 256});
  Call("embedding_backward_add", Make({3000, 256}), ids, sum, -1, sum);
  const int64_t rows = 300, classes = 900, width = 64;
  Call("vocabulary_head_bias", Make({rows, width}), Make({classes, width}),
       Make({rows}, kDLInt, 64), Make({}), Make({classes}), -100, 0.1, 1, Make({}),
       Make({rows, width}), Make({classes}), Make({classes, width}),
       Make({64, classes + 2 * width + 9}));
  Call("vocabulary_head_z", Make({rows, width}), Make({classes, width}), Make({rows}, kDLInt, 64),
       Make({}), Make({rows}), 0, 0.1, 1, Make({}), Make({rows, width}), Make({rows}),
       Make({classes, width}), Make({64, classes + 2 * width + 9}));
}

/*! \brief A race on purpose: that it is seen shows that the others would be. */
void Race() {
  int sum = 0;
  relax_disc::LaunchTasks([](void* data, int, int) { ++*static_cast<int*>(data); }, &sum, 2);
}

// Two callers share a tier: what each reads back is what it wrote, before the place is used again.
void Offload() {
  auto tier = ffi::make_object<relax_disc::FileTier>(relax_disc::TierOptions{"."});
  tier->Figures();
  const auto caller = [&](int seed) {
    for (int round = 0; round < 20; ++round) {
      auto call = tier->Begin(1 << 20);
      std::vector<char> data(100'000, static_cast<char>(seed + round));
      const std::vector<char> before = data;
      const int64_t size = static_cast<int64_t>(data.size());
      call->Wait(call->Write(data.data(), size, 4096 * round));
      std::fill(data.begin(), data.end(), 0);
      const int64_t back = call->Read(data.data(), size, 4096 * round);
      if (round % 2 == 0) call->Wait(back);
      call = nullptr;
      if (data != before) std::abort();
    }
  };
  std::thread first(caller, 1), second(caller, 77);
  first.join();
  second.join();
}

int main(int count, char**) {
  if (count > 1) Race();
  Offload();
  Matmuls();
  Attentions();
  Recurrences();
  Others();
  std::printf("done\n");
  return 0;
}
