// SPDX-License-Identifier: Apache-2.0
// tiers/cuda_device.cc: one slab by cudaMalloc, non-blocking streams, completions posted to the
// reactor.
//
// Completion is by cudaStreamAddCallback, not cudaLaunchHostFunc: the latter's function is never
// called once the context has failed, and a copy that never completes is a hang; the former is
// called with the error. Callbacks may not call CUDA. The current device belongs to the calling
// thread, so every entry sets it.
#include "tiers/cuda_device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/runtime/work_ended.h"
#include "tiers/device_slab.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kAlignment =
    256;  // what cudaMalloc promises, and kernels' vector loads expect

std::string text_of(cudaError_t error) {
  return fmt::format("{} ({})", cudaGetErrorName(error), cudaGetErrorString(error));
}

Error cuda_error(cudaError_t error, const std::string& what_failed) {
  static_cast<void>(cudaGetLastError());     // clears what is not sticky
  ErrorCode code = ErrorCode::kUnavailable;  // a lost device stays lost until the process ends
  if (error == cudaErrorMemoryAllocation) code = ErrorCode::kResourceExhausted;
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidDevice) {
    code = ErrorCode::kInvalidArgument;
  }
  return Error(code, fmt::format("{}: {}", what_failed, text_of(error)), static_cast<int>(error));
}

void check(cudaError_t result, const char* what_failed) {
  if (result != cudaSuccess) throw cuda_error(result, what_failed);
}

/// For destructors: nobody could act on it, but it is not silent.
void report(cudaError_t result, const char* what_failed) noexcept {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  log().warn("{}: {}", what_failed, text_of(result));
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string bus_id(int index) {
  char text[32] = {};
  if (cudaDeviceGetPCIBusId(text, sizeof(text), index) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return "?";
  }
  std::string id(text);
  for (char& c : id) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  }
  return id;
}

cudaMemcpyKind kind_of(Stream::Direction direction) noexcept {
  switch (direction) {
    case Stream::Direction::kToDevice: return cudaMemcpyHostToDevice;
    case Stream::Direction::kToHost: return cudaMemcpyDeviceToHost;
    case Stream::Direction::kOnDevice: break;
  }
  return cudaMemcpyDeviceToDevice;
}

/// What a stream and the completions it has under way share with the device.
struct Context {
  Reactor& reactor;
  const DeviceSlab& slab;
  int index;
  Trace* trace;
  Metrics* metrics;
};

class CudaStream final : public Stream {
 public:
  CudaStream(Context context, const std::string& name) : context_(context), name_(name) {
    check(cudaSetDevice(context_.index), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    if (context_.trace != nullptr) track_ = context_.trace->track("copies: " + name);
  }
  ~CudaStream() override {
    report(cudaSetDevice(context_.index), "cudaSetDevice");
    report(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    report(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  void copy(const Copy& copy, std::function<void(std::exception_ptr)> done) override;
  void enqueue(std::function<void()> action);

 private:
  struct Completion {
    CudaStream* stream;
    Copy copy;
    Nanoseconds queued;
    std::exception_ptr refused;  // the copy was never queued
    std::function<void(std::exception_ptr)> done;
  };
  std::exception_ptr start(const Copy& copy);
  static void CUDART_CB completed(cudaStream_t, cudaError_t status, void* user_data);
  void finish(std::unique_ptr<Completion> completion, cudaError_t status);

  Context context_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  int track_ = 0;
  std::exception_ptr failed_;  // reactor's thread
  Nanoseconds last_end_{0};    // callbacks of one stream come one at a time
};

/// Queues the transfer; an error, if it cannot be queued.
std::exception_ptr CudaStream::start(const Copy& copy) {
  if (failed_) return failed_;
  const bool to_device = copy.direction != Direction::kToHost;
  const bool from_device = copy.direction != Direction::kToDevice;
  if ((to_device && !context_.slab.contains(copy.destination, copy.size_bytes)) ||
      (from_device && !context_.slab.contains(copy.source, copy.size_bytes))) {
    return std::make_exception_ptr(
        Error(ErrorCode::kInvalidArgument,
              fmt::format("stream {}: a copy of {} names memory that is not the device's", name_,
                          format_bytes(copy.size_bytes))));
  }
  cudaError_t result = cudaSetDevice(context_.index);
  if (result == cudaSuccess && copy.size_bytes > 0) {
    result = cudaMemcpyAsync(copy.destination, copy.source, copy.size_bytes,
                             kind_of(copy.direction), stream_);
  }
  if (result == cudaSuccess) return nullptr;
  return std::make_exception_ptr(
      cuda_error(result, fmt::format("stream {}: cudaMemcpyAsync", name_)));
}

void CudaStream::copy(const Copy& copy, std::function<void(std::exception_ptr)> done) {
  failed_ = start(copy);
  context_.reactor.external_begin();
  auto completion = std::make_unique<Completion>(
      Completion{this, copy, monotonic_now(), failed_, std::move(done)});
  // A refused copy is reported in its turn too: after all before it.
  const cudaError_t result =
      cudaStreamAddCallback(stream_, &CudaStream::completed, completion.get(), 0);
  if (result == cudaSuccess) {
    static_cast<void>(completion.release());  // completed() owns it
  } else {
    static_cast<void>(cudaGetLastError());
    finish(std::move(completion), result);
  }
}

void CUDART_CB CudaStream::completed(cudaStream_t, cudaError_t status, void* user_data) {
  std::unique_ptr<Completion> completion(static_cast<Completion*>(user_data));
  CudaStream& stream = *completion->stream;
  stream.finish(std::move(completion), status);
}

/// On a thread of the driver's: no CUDA calls.
void CudaStream::finish(std::unique_ptr<Completion> completion, cudaError_t status) {
  const Copy& copy = completion->copy;
  std::exception_ptr error = completion->refused;
  if (!error && status != cudaSuccess) {
    error = std::make_exception_ptr(
        Error(ErrorCode::kUnavailable,
              fmt::format("stream {}: the device was lost under a copy of {}: {}; "
                          "start the process again",
                          name_, format_bytes(copy.size_bytes), text_of(status)),
              static_cast<int>(status)));
  }
  if (!error) {
    const Nanoseconds end = monotonic_now();
    // In-order: it cannot have begun before the one before it ended.
    const Nanoseconds begin = std::max(completion->queued, last_end_);
    last_end_ = end;
    if (context_.trace != nullptr) {
      context_.trace->span(track_, copy.direction == Direction::kToHost ? "to host" : "to device",
                           begin, end, static_cast<std::int64_t>(copy.size_bytes));
    }
    if (context_.metrics != nullptr && copy.direction == Direction::kToDevice) {
      context_.metrics->add(Counter::kHostToDeviceBytes, copy.size_bytes);
    } else if (context_.metrics != nullptr && copy.direction == Direction::kToHost) {
      context_.metrics->add(Counter::kDeviceToHostBytes, copy.size_bytes);
    }
  }
  Reactor& reactor = context_.reactor;
  reactor.post([&reactor, done = std::move(completion->done), error] {
    work_ended(reactor);
    done(error);
  });
}

void CudaStream::enqueue(std::function<void()> action) {
  auto owned = std::make_unique<std::function<void()>>(std::move(action));
  check(cudaSetDevice(context_.index), "cudaSetDevice");
  check(cudaLaunchHostFunc(
            stream_,
            [](void* user_data) {
              const std::unique_ptr<std::function<void()>> call(
                  static_cast<std::function<void()>*>(user_data));
              (*call)();
            },
            owned.get()),
        "cudaLaunchHostFunc");
  static_cast<void>(owned.release());
}

class SlabDevice final : public CudaDevice {
 public:
  SlabDevice(Reactor& reactor, const CudaDeviceOptions& options, std::byte* base,
             std::uint64_t size_bytes, std::string description)
      : base_(base),
        slab_(base, size_bytes, kAlignment),
        context_{reactor, slab_, options.index, options.trace, options.metrics},
        description_(std::move(description)) {}
  ~SlabDevice() override {
    report(cudaSetDevice(context_.index), "cudaSetDevice");
    report(cudaFree(base_), "cudaFree");
  }

  std::string description() const override { return description_; }
  DeviceBuffer try_allocate(std::uint64_t size_bytes, Purpose purpose) override {
    std::byte* data = slab_.try_allocate(size_bytes, purpose);
    if (data == nullptr) return {};
    return DeviceBuffer(*this, data, size_bytes, purpose);
  }
  std::unique_ptr<Stream> create_stream(const std::string& name) override {
    return std::make_unique<CudaStream>(context_, name);
  }
  Account account() const override { return slab_.account(); }
  void on_free(std::function<void()> callback) override { slab_.on_free(std::move(callback)); }
  std::shared_ptr<void> register_host_memory(std::span<std::byte> memory) override;
  void enqueue(Stream& stream, std::function<void()> action) override {
    dynamic_cast<CudaStream&>(stream).enqueue(std::move(action));
  }

 protected:
  void free(std::byte* data, std::uint64_t, Purpose purpose) noexcept override {
    slab_.free(data, purpose);
  }

 private:
  std::byte* base_;
  DeviceSlab slab_;
  Context context_;
  std::string description_;
};

std::shared_ptr<void> SlabDevice::register_host_memory(std::span<std::byte> memory) {
  check(cudaSetDevice(context_.index), "cudaSetDevice");
  const cudaError_t result =
      cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
  if (result != cudaSuccess) {
    throw cuda_error(result, fmt::format("cudaHostRegister of {} of host memory (fix: "
                                         "ulimit -l unlimited, or a "
                                         "smaller host memory budget)",
                                         format_bytes(memory.size())));
  }
  return {memory.data(), [index = context_.index](void* base) {
            report(cudaSetDevice(index), "cudaSetDevice");
            report(cudaHostUnregister(base), "cudaHostUnregister");
          }};
}

}  // namespace

CudaInventory cuda_devices() {
  CudaInventory inventory;
  inventory.runtime_version = version_text(CUDART_VERSION);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0) {
    inventory.driver_version = version_text(driver);
  }
  int count = 0;
  if (const cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    inventory.why_none = text_of(result);
    return inventory;
  }
  if (count == 0) inventory.why_none = "the driver lists no GPU";
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      continue;
    }
    CudaInventory::Gpu gpu{index, properties.name, bus_id(index), properties.totalGlobalMem, 0};
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    if (cudaSetDevice(index) == cudaSuccess &&
        cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
      gpu.free_bytes = free_bytes;
    } else {
      static_cast<void>(cudaGetLastError());
    }
    inventory.gpus.push_back(std::move(gpu));
  }
  if (inventory.gpus.empty() && inventory.why_none.empty()) {
    inventory.why_none = "no GPU answers: is one in exclusive use, or fallen off the bus?";
  }
  return inventory;
}

std::unique_ptr<CudaDevice> CudaDevice::create(Reactor& reactor, const CudaDeviceOptions& options) {
  int count = 0;
  if (const cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess || count == 0) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorCode::kUnavailable,
                fmt::format("no CUDA device: {}",
                            result != cudaSuccess ? text_of(result) : "the driver lists no GPU"),
                static_cast<int>(result));
  }
  if (options.index < 0 || options.index >= count) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("CUDA device {}: there are {}, counted from 0", options.index, count));
  }
  const std::uint64_t size_bytes = options.capacity_bytes / kAlignment * kAlignment;
  if (size_bytes == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "device memory: a budget below 256 bytes holds nothing");
  }
  check(cudaSetDevice(options.index), "cudaSetDevice");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, options.index), "cudaGetDeviceProperties");
  void* base = nullptr;
  if (const cudaError_t result = cudaMalloc(&base, size_bytes); result != cudaSuccess) {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    static_cast<void>(cudaGetLastError());
    static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw cuda_error(
        result, fmt::format("device memory: a budget of {} on {} ({} of {} free): cudaMalloc",
                            format_bytes(size_bytes), properties.name, format_bytes(free_bytes),
                            format_bytes(total_bytes)));
  }
  return std::make_unique<SlabDevice>(
      reactor, options, static_cast<std::byte*>(base), size_bytes,
      fmt::format("{} ({}): {}", properties.name, bus_id(options.index), format_bytes(size_bytes)));
}

}  // namespace ziggurat
