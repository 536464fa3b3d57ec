// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/cuda_machine.cc: runs the layers on a GPU, with the trainer's own stream
// and pinned memory.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "integrations/device_mlp/kernels.h"
#include "integrations/device_mlp/machine.h"
#include "tiers/device/cuda_context.h"

namespace ziggurat::device_mlp {
namespace {

void require(const char* call, cudaError_t result) {
  if (result == cudaSuccess) return;
  throw Error(
      ErrorCode::kUnavailable,
      fmt::format("{}: {} ({})", call, cudaGetErrorName(result), cudaGetErrorString(result)),
      static_cast<int>(result));
}

class CudaMachine final : public Machine {
 public:
  CudaMachine(CudaDevice& device, std::uint64_t bytes_max) {
    require("cudaSetDevice", cudaSetDevice(device.context().index()));
    void* memory = nullptr;
    require("cudaHostAlloc", cudaHostAlloc(&memory, bytes_max, cudaHostAllocDefault));
    pinned_ = {static_cast<std::byte*>(memory), bytes_max};
    const cudaError_t created = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    if (created != cudaSuccess) static_cast<void>(cudaFreeHost(memory));
    require("cudaStreamCreateWithFlags", created);
    for_engine_ = device.caller_stream(stream_);
  }
  ~CudaMachine() override {
    for_engine_.reset();
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
    static_cast<void>(cudaFreeHost(pinned_.data()));
  }

  void run(const Each<Embed>& program) override { launch(program, stream_); }
  void run(const Each<Linear>& program) override { launch(program, stream_); }
  void run(const Each<Softmax>& program) override { launch(program, stream_); }
  void run(const Each<LinearGradient>& program) override { launch(program, stream_); }
  void run(const Each<LinearBackward>& program) override { launch(program, stream_); }
  void run(const Each<EmbedGradient>& program) override { launch(program, stream_); }
  StreamRef& stream() override { return *for_engine_; }

  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) override {
    std::memcpy(room_for(bytes.size()).data(), bytes.data(), bytes.size());
    copy(reinterpret_cast<void*>(to.address()), pinned_.data(), bytes.size(),
         cudaMemcpyHostToDevice);
  }
  void read(std::span<std::byte> to, DeviceSpan<const std::byte> bytes) override {
    copy(room_for(bytes.size()).data(), reinterpret_cast<const void*>(bytes.address()),
         bytes.size(), cudaMemcpyDeviceToHost);
    std::memcpy(to.data(), pinned_.data(), bytes.size());
  }

 private:
  std::span<std::byte> room_for(std::size_t size_bytes) const {
    ZIGGURAT_CHECK(size_bytes <= pinned_.size(), "{} of {} bytes", size_bytes, pinned_.size());
    return pinned_;
  }
  void copy(void* to, const void* from, std::size_t size_bytes, cudaMemcpyKind kind) {
    require("cudaMemcpyAsync", cudaMemcpyAsync(to, from, size_bytes, kind, stream_));
    require("cudaStreamSynchronize", cudaStreamSynchronize(stream_));
  }

  std::span<std::byte> pinned_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<StreamRef> for_engine_;
};

}  // namespace

std::unique_ptr<Machine> make_machine(CudaDevice& device, std::uint64_t bytes_max) {
  return std::make_unique<CudaMachine>(device, bytes_max);
}

}  // namespace ziggurat::device_mlp
