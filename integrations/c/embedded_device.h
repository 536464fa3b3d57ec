// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_device.h: the device to which an embedded engine brings streamed
// parameters: memory of the host or of a GPU, its own or lent by the caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/device_span.h"
#include "core/engine/runtime.h"
#include "integrations/c/handles.h"
#include "tiers/device/device.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {

class CudaDevice;

class EmbeddedDevice {
 public:
  struct Memory {
    std::optional<int> gpu{};  ///< CUDA's number of the GPU that has it; none: the host's
    void* address = nullptr;   ///< lent by the caller, if not null
    std::uint64_t size_bytes = 0;
  };
  /// Makes a device. `runtime` must outlive it. Errors: those of HostDevice and CudaDevice.
  EmbeddedDevice(Runtime& runtime, const Memory& memory);
  ~EmbeddedDevice();
  EmbeddedDevice(const EmbeddedDevice&) = delete;
  EmbeddedDevice& operator=(const EmbeddedDevice&) = delete;

  Device& device() noexcept { return *device_; }
  /// Returns the caller's stream with the driver's handle (cudaStream_t), made at its first use and
  /// kept; on the host the Host, whose handle is null. Errors: kInvalidArgument for another handle
  /// there.
  StreamRef& stream(void* handle);
  /// Forgets the caller's streams, which may be destroyed once their engine is closed.
  void forget_streams();
  /// Copy between the device's memory and any host memory, one call at a time, after what the
  /// caller's streams have queued so far; they return when it is done.
  void read(DeviceSpan<const std::byte> from, std::span<std::byte> to);
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> from);

 private:
  Task<> copy_in_pieces(std::span<std::byte> host, std::byte* on_device,
                        Stream::Direction direction, const std::vector<Event>& after);
  std::vector<Event> queued();
  std::span<std::byte> staging();

  Runtime& runtime_;
  std::unique_ptr<Device> device_;
  CudaDevice* gpu_ = nullptr;           // device_, if it is a GPU
  std::optional<HostMapping> staging_;  // of a GPU, from the first copy on
  std::shared_ptr<HostRegistration> registration_;
  Host host_;
  std::mutex mutex_;  // guards streams_
  std::map<void*, std::unique_ptr<StreamRef>> streams_;
};

/// A device that a caller has open. It keeps its runtime, which cannot be destroyed meanwhile.
struct OpenDevice {
  OpenDevice(std::shared_ptr<Runtime> its_runtime, const EmbeddedDevice::Memory& memory)
      : runtime(std::move(its_runtime)), device(*runtime, memory) {}

  std::shared_ptr<Runtime> runtime;
  EmbeddedDevice device;
  std::atomic<bool> taken = false;  ///< an engine has it
};
/// Never destroyed, as runtimes().
Handles<OpenDevice>& devices();

/// Returns the device of a handle for an engine on `runtime`, which alone has it until the result
/// is gone. Errors: kInvalidArgument if there is none, if it is of another runtime, or if another
/// engine has it.
std::shared_ptr<EmbeddedDevice> taken_device(std::uint64_t handle, const Runtime& runtime);

}  // namespace ziggurat
