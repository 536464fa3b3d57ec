// SPDX-License-Identifier: Apache-2.0
// tiers/device.h: a device: its memory under a hard budget, and the streams that copy while it
// computes (tiers/stream.h).
//
// Implementations: host_device.h (emulated in host memory: the CPU-only device) and cuda_device.h.
// One conformance suite covers both: tests/tiers/device_conformance_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tiers/account.h"
#include "tiers/host_registration.h"
#include "tiers/stream.h"

namespace ziggurat {

class Device;
class DeviceMemory;

/// Device memory; given back by the destructor. Move-only. Must not outlive its Device.
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
  /// The buffer as elements of T. Dereferenceable on the CPU only if Device::host_accessible().
  template <class T>
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(data_), size_bytes_ / sizeof(T)};
  }

  /// Says that the buffer is in use until `event`, even if it is given back before: who gets its
  /// memory next waits for that. Copies of the device's streams say so by themselves.
  void used_until(const Event& event);
  /// Events of earlier users of this memory that are still to happen. A kernel's stream waits for
  /// them before it touches the buffer; copies do so by themselves.
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
  /// The CPU may dereference device pointers (the host-emulated device).
  virtual bool host_accessible() const noexcept = 0;

  /// Allocates at least 64-byte (CUDA: 256-byte) aligned memory. Thread-safe, never blocks.
  /// Errors: kResourceExhausted with the account by purpose when the budget does not hold it;
  /// nothing changes. kUnavailable when the device is lost: its memory is never used again.
  DeviceBuffer allocate(std::uint64_t size_bytes, Purpose purpose);
  /// The same, but an empty buffer where the budget does not hold it.
  DeviceBuffer try_allocate(std::uint64_t size_bytes, Purpose purpose);

  /// Makes host memory one that copies may name, until the result and all copies of it under way
  /// are gone. Whole pages, exactly what will be used: pinning takes time and memory of the driver.
  /// Null on a device that any host memory can be copied to and from, as the host-emulated one.
  /// Errors: kInvalidArgument if some of it is registered already; kUnimplemented where the
  /// platform cannot; kResourceExhausted if the driver cannot pin as much; kUnavailable when the
  /// device is lost.
  [[nodiscard]] virtual std::shared_ptr<HostRegistration> register_host_memory(
      std::span<std::byte> memory) {
    static_cast<void>(memory);
    return nullptr;
  }

  /// `name` labels its trace track. The device must outlive its streams; a stream's destructor
  /// waits for its copies.
  virtual std::unique_ptr<Stream> create_stream(const std::string& name,
                                                StreamPriority priority) = 0;
  std::unique_ptr<Stream> create_stream(const std::string& name) {
    return create_stream(name, StreamPriority::kHigh);
  }

  /// A copy of the account (budget, used, peak, by purpose). Thread-safe.
  Account account() const;

  /// Called, on whatever thread freed it, after memory came back: waiters retry. Set once by the
  /// engine.
  void on_free(std::function<void()> callback);

 protected:
  friend class DeviceBuffer;
  /// The same at each call.
  virtual DeviceMemory& memory() const noexcept = 0;
  /// Errors: kUnavailable when the device is lost.
  virtual void require_present() const {}
};

}  // namespace ziggurat
