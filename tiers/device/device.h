// SPDX-License-Identifier: Apache-2.0
// tiers/device/device.h: a device: its memory under a hard budget, and the streams that copy while
// it computes (tiers/device/stream.h).
//
// Implementations: host_device.h (emulated in host memory: the CPU-only device) and cuda_device.h.
// The memory is the device's own, or lent by the caller.
// One conformance suite covers both: tests/tiers/device_conformance_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tiers/device/stream.h"
#include "tiers/pool/account.h"
#include "tiers/pool/host_registration.h"

namespace ziggurat {

class Device;
class DeviceMemory;

/// Device memory that the destructor gives back. Move-only. Must not outlive its Device.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device& device, std::byte* data, std::uint64_t size_bytes, Purpose purpose)
      : device_(&device), data_(data), size_bytes_(size_bytes), purpose_(purpose) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  explicit operator bool() const noexcept { return data_ != nullptr; }
  std::byte* data() const noexcept { return data_; }
  std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  /// Returns the buffer as elements of T. The CPU may access them only if
  /// Device::host_accessible().
  template <class T>
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(data_), size_bytes_ / sizeof(T)};
  }

  /// Marks the buffer as in use until `event`, even if it is given back before: the next user of
  /// its memory waits for the event. The device's streams do this for their copies by themselves.
  void used_until(const Event& event);
  /// Returns the events of earlier users of this memory that have not happened yet. A kernel's
  /// stream must wait for them before it uses the buffer; copies do so by themselves.
  std::vector<Event> before_use() const;

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
  Purpose purpose_ = Purpose::kStaging;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string description() const = 0;
  /// Returns whether the CPU may dereference device pointers (the host-emulated device).
  virtual bool host_accessible() const noexcept = 0;
  /// Returns whether all of its memory is known to be zeros, because nobody has had any of it yet.
  virtual bool holds_zeros() const noexcept { return false; }

  /// Allocates memory aligned to at least 64 bytes (CUDA: 256). Thread-safe, never blocks. Errors:
  /// kResourceExhausted, with the account by purpose, if the budget does not hold it; nothing
  /// changes then. kUnavailable if the device is lost: its memory is never used again.
  DeviceBuffer allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Allocates like allocate(), but returns an empty buffer if the budget does not hold it.
  DeviceBuffer try_allocate(std::uint64_t size_bytes, Purpose purpose);

  /// Registers host memory so that copies may use it, until the result and all copies of it under
  /// way are gone. Give whole pages, and only what will be used, because pinning takes time and
  /// memory of the driver. Returns null on a device that can copy any host memory, like the
  /// host-emulated one. Errors: kInvalidArgument if some of it is registered already;
  /// kUnimplemented if the platform cannot do it; kResourceExhausted if the driver cannot pin as
  /// much; kUnavailable if the device is lost.
  [[nodiscard]] virtual std::shared_ptr<HostRegistration> register_host_memory(
      std::span<std::byte> memory) {
    static_cast<void>(memory);
    return nullptr;
  }

  /// Makes a stream; `name` labels its trace track. The device must outlive its streams; a stream's
  /// destructor waits for its copies.
  virtual std::unique_ptr<Stream> create_stream(const std::string& name,
                                                StreamPriority priority) = 0;
  std::unique_ptr<Stream> create_stream(const std::string& name) {
    return create_stream(name, StreamPriority::kHigh);
  }

  /// Returns a copy of the account (budget, used, peak, by purpose). Thread-safe.
  Account account() const;

  /// Sets a callback that is called after memory was given back, on the thread that did it, so that
  /// waiters can try again. Set once by the engine.
  void on_free(std::function<void()> callback);

 protected:
  friend class DeviceBuffer;
  /// Returns the same object at each call.
  virtual DeviceMemory& memory() const noexcept = 0;
  /// Throws if the device is lost. Errors: kUnavailable.
  virtual void require_present() const {}
};

}  // namespace ziggurat
