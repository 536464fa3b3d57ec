// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_device.cc: one block of stream-ordered memory, and the parts that make a device
// of it.
#include "tiers/device/cuda_device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/own_thread.h"
#include "tiers/device/cuda_stream.h"
#include "tiers/device/device_memory.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kAlignment =
    256;  // what cudaMallocAsync promises, and what kernels' vector loads expect

/// The device's bytes, from a memory pool of their own. Nothing else is ever taken from that pool,
/// so the budget is a hard limit, and this program decides how the block is cut (device_memory.h).
/// The driver would reuse freed memory sooner or later, depending on which events have happened.
class CudaBlock {
 public:
  CudaBlock(std::shared_ptr<CudaContext> context, std::uint64_t size_bytes)
      : context_(std::move(context)),
        size_bytes_(size_bytes),
        queue_(context_, StreamPriority::kNormal) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {.type = cudaMemLocationTypeDevice, .id = context_->index()};
    context_->call({"cudaMemPoolCreate"}, [&] { return cudaMemPoolCreate(&pool_, &properties); });
    try {
      take();
    } catch (...) {
      release();
      throw;
    }
  }
  ~CudaBlock() { release(); }

  std::byte* base() const noexcept { return static_cast<std::byte*>(base_); }

 private:
  void take() {
    // The whole block stays with the pool until it is freed.
    std::uint64_t threshold = size_bytes_;
    context_->call({"cudaMemPoolSetAttribute"}, [&] {
      return cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &threshold);
    });
    context_->call({"cudaMallocFromPoolAsync", size_bytes_}, [&] {
      return cudaMallocFromPoolAsync(&base_, size_bytes_, pool_, queue_.handle());
    });
    // From here on every stream may use the block.
    context_->call({"cudaStreamSynchronize"},
                   [&] { return cudaStreamSynchronize(queue_.handle()); });
  }
  /// Gives the memory back. Each step is done only if the previous one was: what cannot be given
  /// back stays with the process.
  void release() noexcept {
    if (base_ != nullptr) {
      const bool freed = context_->call_at_end({"cudaFreeAsync", size_bytes_}, [this] {
        return cudaFreeAsync(base_, queue_.handle());
      }) && context_->call_at_end({"cudaStreamSynchronize"}, [this] {
        return cudaStreamSynchronize(queue_.handle());
      });
      if (!freed) {
        queue_.abandon();
        return;
      }
    }
    context_->call_at_end({"cudaMemPoolDestroy"}, [this] { return cudaMemPoolDestroy(pool_); });
  }

  std::shared_ptr<CudaContext> context_;
  std::uint64_t size_bytes_;
  CudaQueue queue_;
  cudaMemPool_t pool_ = nullptr;
  void* base_ = nullptr;
};

class BlockDevice final : public CudaDevice {
 public:
  /// `block` is null if the memory is lent.
  BlockDevice(Reactor& reactor, const CudaDeviceOptions& options, CudaParts parts,
              std::unique_ptr<CudaBlock> block, std::uint64_t size_bytes, std::string description)
      : reactor_(reactor),
        trace_(options.trace),
        metrics_(options.metrics),
        parts_(std::move(parts)),
        block_(std::move(block)),
        memory_(block_ ? block_->base() : static_cast<std::byte*>(options.lent_memory), size_bytes,
                kAlignment),
        description_(std::move(description)) {}
  ~BlockDevice() override {
    // Events of the device's own streams have happened; those of another device may not have.
    for (const Event& event : memory_.pending()) event.state()->block();
    internal::on_own_thread([this] { block_.reset(); });
  }

  std::string description() const override { return description_; }
  using Device::create_stream;
  std::unique_ptr<Stream> create_stream(const std::string& name, StreamPriority priority) override {
    const Stream::Home home{
        .reactor = reactor_, .memory = memory_, .trace = trace_, .metrics = metrics_};
    return std::make_unique<CudaStream>(parts_, home, name, priority);
  }
  std::unique_ptr<StreamRef> caller_stream(void* handle) override {
    return std::make_unique<CudaCallerStream>(parts_.context, reactor_,
                                              static_cast<cudaStream_t>(handle));
  }
  std::shared_ptr<HostRegistration> register_host_memory(std::span<std::byte> memory) override {
    return parts_.host_memory->add(memory);
  }
  CudaContext& context() noexcept override { return *parts_.context; }

 protected:
  DeviceMemory& memory() const noexcept override { return memory_; }
  void require_present() const override { parts_.context->require_present(); }

 private:
  Reactor& reactor_;
  Trace* trace_;
  Metrics* metrics_;
  CudaParts parts_;
  std::unique_ptr<CudaBlock> block_;
  mutable DeviceMemory memory_;
  std::string description_;
};

void require_index(int index) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess && result != cudaErrorNoDevice &&
      result != cudaErrorInsufficientDriver) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorCode::kUnavailable,
                fmt::format("cuda{}: cudaGetDeviceCount: {}", index, cuda_text(result)),
                static_cast<int>(result));
  }
  if (result != cudaSuccess || count == 0) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorCode::kUnavailable,
                fmt::format("no CUDA device can be used: {}", why_no_gpu(result)),
                static_cast<int>(result));
  }
  if (index < 0 || index >= count) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("there is no CUDA device {}: this process sees {}, counted from 0",
                            index, count));
  }
}

std::string name_of(int index) {
  cudaDeviceProp properties{};
  if (const cudaError_t result = cudaGetDeviceProperties(&properties, index);
      result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorCode::kUnavailable,
                fmt::format("cuda{}: cudaGetDeviceProperties: {}", index, cuda_text(result)),
                static_cast<int>(result));
  }
  return properties.name;
}

void require_pools(CudaContext& context) {
  int supported = 0;
  context.call({"cudaDeviceGetAttribute"}, [&] {
    return cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, context.index());
  });
  if (supported != 0) return;
  throw Error(ErrorCode::kUnimplemented,
              fmt::format("{} has no memory pools, like some virtual GPUs; lend the device memory "
                          "that was allocated another way, or use the host-emulated device",
                          context.description()));
}

std::unique_ptr<CudaBlock> take_block(const std::shared_ptr<CudaContext>& context,
                                      std::uint64_t size_bytes) {
  require_pools(*context);
  try {
    return std::make_unique<CudaBlock>(context, size_bytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    context->call({"cudaMemGetInfo"}, [&] { return cudaMemGetInfo(&free_bytes, &total_bytes); });
    throw Error(error.code(),
                fmt::format("a device memory budget of {} does not fit: {} of {} are free ({}). "
                            "Give a smaller budget, or end the other processes that use the GPU",
                            format_bytes(size_bytes), format_bytes(free_bytes),
                            format_bytes(total_bytes), error.what()),
                error.native());
  }
}

/// Throws unless the memory of `size_bytes` at `lent` is the GPU's, at its first byte and its last.
void require_lent(CudaContext& context, const std::byte* lent, std::uint64_t size_bytes) {
  if (reinterpret_cast<std::uintptr_t>(lent) % kAlignment != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the memory at {} that is lent to {} is not aligned; lend memory whose "
                            "address {} divides",
                            fmt::ptr(lent), context.description(), kAlignment));
  }
  for (const std::byte* const address : {lent, lent + size_bytes - 1}) {
    cudaPointerAttributes attributes{};
    context.call({"cudaPointerGetAttributes"},
                 [&] { return cudaPointerGetAttributes(&attributes, address); });
    if (attributes.type == cudaMemoryTypeDevice && attributes.device == context.index()) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the {} at {} that are lent to {} are not all in its memory: {} is not; "
                    "lend memory that was allocated on this GPU",
                    format_bytes(size_bytes), fmt::ptr(lent), context.description(),
                    fmt::ptr(address)));
  }
}

}  // namespace

std::unique_ptr<CudaDevice> CudaDevice::create(Reactor& reactor, const CudaDeviceOptions& options) {
  require_index(options.index);
  const std::uint64_t size_bytes = options.capacity_bytes / kAlignment * kAlignment;
  if (size_bytes == 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "the device memory budget is below 256 bytes, which holds nothing; give a larger budget");
  }
  CudaParts parts;
  parts.context =
      std::make_shared<CudaContext>(options.index, name_of(options.index), options.deadlines);
  parts.host_memory = std::make_shared<CudaHostMemory>(parts.context);
  std::unique_ptr<CudaBlock> block;
  const auto* const lent = static_cast<const std::byte*>(options.lent_memory);
  internal::on_own_thread([&] {
    if (lent != nullptr) return require_lent(*parts.context, lent, size_bytes);
    block = take_block(parts.context, size_bytes);
  });
  std::string description =
      fmt::format("{}: {}{}", parts.context->description(), format_bytes(size_bytes),
                  block ? "" : " lent by the caller");
  return std::make_unique<BlockDevice>(reactor, options, std::move(parts), std::move(block),
                                       size_bytes, std::move(description));
}

}  // namespace ziggurat
