// SPDX-License-Identifier: Apache-2.0
// tests/core/gpu_harness.h: a trainer on a GPU, over the double of the CUDA runtime: the steps of
// engine_harness.h, computed by the CPU on copies that a stream of the trainer's own makes.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "base/error.h"
#include "tests/core/engine_harness.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/environment_number.h"

namespace ziggurat::testing {

/// A call of the trainer's own that failed: no error of the engine's.
struct TrainerError : Error {
  using Error::Error;
};

inline void require(int index, const char* call, cudaError_t result) {
  if (result == cudaSuccess) return;
  throw TrainerError(ErrorCode::kUnavailable, fmt::format("cuda{}: the trainer's {}: {}", index,
                                                          call, cudaGetErrorName(result)));
}

/// A trainer's own stream, and pinned memory: the bytes of GPU `index` for a test that computes on
/// the CPU.
class Gpu {
 public:
  explicit Gpu(std::size_t bytes_max, int index = 0) : index_(index) {
    void* memory = nullptr;
    require(index, "cudaSetDevice", cudaSetDevice(index));
    require(index_, "cudaHostAlloc", cudaHostAlloc(&memory, bytes_max, cudaHostAllocDefault));
    pinned_ = {static_cast<std::byte*>(memory), bytes_max};
    const cudaError_t made = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    if (made != cudaSuccess) cudaFreeHost(memory);
    require(index_, "cudaStreamCreateWithFlags", made);
  }
  ~Gpu() {
    cudaStreamDestroy(stream_);
    cudaFreeHost(pinned_.data());
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  std::vector<std::byte> read(DeviceSpan<const std::byte> bytes) {
    copy(pinned_.data(), reinterpret_cast<const void*>(bytes.address()), bytes.size(),
         cudaMemcpyDeviceToHost);
    return {pinned_.begin(), pinned_.begin() + static_cast<std::ptrdiff_t>(bytes.size())};
  }
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) {
    std::memcpy(pinned_.data(), bytes.data(), bytes.size());
    copy(reinterpret_cast<void*>(to.address()), pinned_.data(), bytes.size(),
         cudaMemcpyHostToDevice);
  }

 private:
  void copy(void* to, const void* from, std::size_t size_bytes, cudaMemcpyKind kind) {
    const cudaError_t queued = cudaMemcpyAsync(to, from, size_bytes, kind, stream_);
    require(index_, "cudaMemcpyAsync", queued);
    cudaError_t ended = cudaStreamSynchronize(stream_);
    const bool of_the_wait = ended != cudaSuccess && !cuda_double::is_sticky(ended);
    if (of_the_wait) static_cast<void>(cudaStreamSynchronize(stream_));  // the copy goes on
    require(index_, "cudaStreamSynchronize", ended);
  }

  int index_;
  std::span<std::byte> pinned_;
  cudaStream_t stream_ = nullptr;
};

/// One pass of the trainer of engine_harness.h on the GPU's memory; the gradients of the last pass
/// of a step are finished.
inline void pass_on(Gpu& gpu, Engine& engine, const ModelSpec& model, std::uint64_t step, int rank,
                    float scale, bool last) {
  const auto units = static_cast<UnitId>(model.units.size());
  for (UnitId u = 0; u < units; ++u) {
    engine.acquire(u);
    engine.release(u);
  }
  for (UnitId u = units; u-- > 0;) {
    const TypedDeviceSpan<const std::byte> on_gpu = engine.acquire(u);
    const std::vector<std::byte> bytes = gpu.read(on_gpu.bytes);
    const TypedSpan<const std::byte> params{on_gpu.dtype, bytes};
    const DeviceSpan<float> accumulator = engine.gradient(u);
    std::vector<std::byte> sums = gpu.read(accumulator.as<std::byte>());
    const std::span<float> gradient(reinterpret_cast<float*>(sums.data()), params.count());
    for (std::size_t i = 0; i < params.count(); ++i)
      gradient[i] += scale * gradient_of(value_at(params, i), u, i, step, rank);
    gpu.write(accumulator.as<std::byte>(), sums);
    engine.release(u);
    if (last) engine.finish_gradient(u);
  }
}

/// train_step() with the GPU's memory.
inline StepResult train_on(Gpu& gpu, Engine& engine, const ModelSpec& model, std::uint64_t step,
                           float learning_rate, int rank = 0) {
  engine.prepare_step({.learning_rate = learning_rate, .blob = {}});
  pass_on(gpu, engine, model, step, rank, 1.0F, true);
  return engine.step({.learning_rate = learning_rate, .blob = {}});
}

/// Bits of all parameters of `engine`, on its GPU, equal `plain`'s.
inline bool same_params(Gpu& gpu, Engine& engine, const PlainTraining& plain,
                        const ModelSpec& model) {
  bool same = true;
  for (UnitId u = 0; u < model.units.size(); ++u) {
    const std::vector<std::byte> got = gpu.read(engine.acquire(u).bytes);
    same = same && std::ranges::equal(got, plain.params(u).bytes);
    engine.release(u);
  }
  return same;
}

}  // namespace ziggurat::testing
