// SPDX-License-Identifier: Apache-2.0
// tests/core/streamed_gpu.h: a trainer of streamed parameters on a GPU, over the double of the CUDA
// runtime: it uses each unit on another of its streams, and waits for none of them before the
// release.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/core/gpu_harness.h"
#include "tests/core/lent_kinds.h"
#include "tests/core/streamed_model.h"
#include "tests/cuda_double/cuda_double.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat::testing {

/// Streams of a trainer's own, used in turn, and pinned memory for what they copy.
class GpuStreams {
 public:
  struct One {
    cudaStream_t handle = nullptr;
    std::unique_ptr<StreamRef> ref{};
  };

  /// Makes streams of `device`, which is GPU `index`.
  GpuStreams(CudaDevice& device, std::size_t pinned_bytes, int index = 0) : streams_(3) {
    void* memory = nullptr;
    require(index, "cudaSetDevice", cudaSetDevice(index));
    require(0, "cudaHostAlloc", cudaHostAlloc(&memory, pinned_bytes, cudaHostAllocDefault));
    pinned_ = static_cast<std::byte*>(memory);
    try {
      for (One& its : streams_) {
        require(0, "cudaStreamCreateWithFlags",
                cudaStreamCreateWithFlags(&its.handle, cudaStreamNonBlocking));
        its.ref = device.caller_stream(its.handle);
      }
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~GpuStreams() { destroy(); }
  GpuStreams(const GpuStreams&) = delete;
  GpuStreams& operator=(const GpuStreams&) = delete;

  One& next() { return streams_[next_++ % streams_.size()]; }
  std::byte* pinned(std::size_t at) const { return pinned_ + at; }
  /// Queues a copy between pinned memory and the GPU.
  static void copy(const One& on, void* to, const void* from, std::size_t size_bytes,
                   cudaMemcpyKind kind) {
    require(0, "cudaMemcpyAsync", cudaMemcpyAsync(to, from, size_bytes, kind, on.handle));
  }
  void wait() {
    cudaError_t failed = cudaSuccess;
    for (const One& its : streams_) {
      cudaError_t ended = cudaStreamSynchronize(its.handle);
      if (ended == cudaSuccess) continue;
      failed = ended;
      // Only the wait has failed: the copies go on.
      if (!cuda_double::is_sticky(ended)) static_cast<void>(cudaStreamSynchronize(its.handle));
    }
    require(0, "cudaStreamSynchronize", failed);
  }

 private:
  void destroy() {
    for (One& its : streams_) {
      if (its.handle == nullptr) continue;
      static_cast<void>(cudaStreamSynchronize(its.handle));
      its.ref.reset();
      static_cast<void>(cudaStreamDestroy(its.handle));
    }
    static_cast<void>(cudaFreeHost(pinned_));
  }

  std::byte* pinned_ = nullptr;
  std::vector<One> streams_;
  std::size_t next_ = 0;
};

/// A trainer, and an engine on the GPU that streams some of its parameters.
class StreamedGpu {
 public:
  StreamedGpu(ModelSpec model, EngineConfig config, std::uint64_t device_bytes,
              std::optional<Rounding> rounding = {})
      : model_(std::move(model)),
        config_(std::move(config)),
        device_bytes_(device_bytes),
        trainer(model_, config_.optimizer.state, rounding) {
    config_.counts_steps = true;
    for (const TypedArray& values : trainer.params) {
      begins_.push_back(all_bytes_);
      all_bytes_ += round_up(values.bytes.size(), 64);
    }
  }
  ~StreamedGpu() { close(); }
  StreamedGpu(const StreamedGpu&) = delete;
  StreamedGpu& operator=(const StreamedGpu&) = delete;

  void open(std::size_t threads = 2) {
    close();
    runtime_ = runtime_of(threads);
    device = CudaDevice::create(runtime_->reactor, {.capacity_bytes = device_bytes_});
    streams = std::make_unique<GpuStreams>(*device, 2 * all_bytes_);
    engine = LentEngine::open(model_, config_, *runtime_, trainer.lent(), device.get());
    forget();
  }
  void close() {
    engine.reset();
    streams.reset();
    device.reset();
    runtime_.reset();
  }
  /// A streamed parameter's values here are nobody's, until fetch().
  void forget() {
    for (std::size_t p = 0; p < model_.units.size(); ++p)
      if (unit_of(p)) std::ranges::fill(trainer.params[p].bytes, std::byte{0x33});
  }

  /// Reads streamed parameters through the GPU.
  void fetch() {
    for (StreamedUnit u = 0; u < unit_count(); ++u) {
      GpuStreams::One& stream = streams->next();
      engine->acquire(u, *stream.ref);
      for_each_param(u, [&](ParamId p) {
        GpuStreams::copy(stream, streams->pinned(begins_[p]), place(p),
                         trainer.params[p].bytes.size(), cudaMemcpyDeviceToHost);
      });
      engine->release(u, *stream.ref);
    }
    streams->wait();
    for (ParamId p = 0; p < model_.units.size(); ++p) {
      std::vector<std::byte>& bytes = trainer.params[p].bytes;
      if (unit_of(p)) std::copy_n(streams->pinned(begins_[p]), bytes.size(), bytes.begin());
    }
    engine->wait_all_updated();
  }
  /// Makes a step in which streamed parameters are written on the GPU and brought home first.
  void step(const LentStep& its = {}) {
    if (!its.written.empty()) {
      fetch();
      for (const UnitId p : its.written)
        for (std::size_t i = 0; i < trainer.params[p].count(); i += 3)
          trainer.params[p].set(i, 0.125F);
      for (StreamedUnit u = 0; u < unit_count(); ++u) write_unit(u, its.written);
    }
    trainer.step(*engine, its);
  }
  /// Writes those of `written` that are in unit `u`.
  void write_unit(StreamedUnit u, const std::set<UnitId>& written) {
    GpuStreams::One& stream = streams->next();
    engine->acquire(u, *stream.ref);
    for_each_param(u, [&](ParamId p) {
      if (!written.contains(p)) return;
      const std::vector<std::byte>& bytes = trainer.params[p].bytes;
      std::byte* const source = streams->pinned(all_bytes_ + begins_[p]);
      std::ranges::copy(bytes, source);
      GpuStreams::copy(stream, place(p), source, bytes.size(), cudaMemcpyHostToDevice);
      engine->store_param(p, *stream.ref);
    });
    engine->release(u, *stream.ref);
  }
  void* place(ParamId param) const {
    return reinterpret_cast<void*>(engine->place(param).bytes.address());
  }

 private:
  const std::optional<StreamedUnit>& unit_of(std::size_t param) const {
    return model_.units[param].params[0].streamed;
  }
  StreamedUnit unit_count() const {
    StreamedUnit count = 0;
    for (std::size_t p = 0; p < model_.units.size(); ++p)
      if (unit_of(p)) count = std::max(count, *unit_of(p) + 1);
    return count;
  }
  template <class Use>
  void for_each_param(StreamedUnit unit, const Use& use) const {
    for (ParamId p = 0; p < model_.units.size(); ++p)
      if (unit_of(p) == unit) use(p);
  }

  ModelSpec model_;
  EngineConfig config_;
  std::uint64_t device_bytes_;
  std::vector<std::size_t> begins_;  // of each parameter in pinned memory, for reads; then writes
  std::size_t all_bytes_ = 0;
  std::unique_ptr<Runtime> runtime_;

 public:
  LentTrainer trainer;
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<GpuStreams> streams;
  std::unique_ptr<LentEngine> engine;
};

}  // namespace ziggurat::testing
