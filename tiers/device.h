// SPDX-License-Identifier: Apache-2.0
// tiers/device.h: a device's memory under a hard budget, and in-order streams that copy while the
// device computes.
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

#include "base/runtime/reactor.h"
#include "tiers/account.h"

namespace ziggurat {

class Device;

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

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
  Purpose purpose_ = Purpose::kStaging;
};

/// An in-order queue of copies. Copies of different streams, and compute, overlap.
class Stream {
 public:
  virtual ~Stream() = default;
  enum class Direction { kToDevice, kToHost, kOnDevice };

  struct Copy {
    std::byte* destination;
    const std::byte* source;
    std::uint64_t size_bytes;
    Direction direction;
  };
  /// Queues `copy` and returns; `done` is posted to the reactor when it and all before it have
  /// finished (with the error, if one of them failed: a stream that failed once does no more). Host
  /// memory must stay valid until then. Reactor's thread. Errors, by `done`: kInvalidArgument for a
  /// device side that is not in the device's memory; kUnavailable when the device is lost.
  virtual void copy(const Copy& copy, std::function<void(std::exception_ptr)> done) = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string description() const = 0;
  /// The CPU may dereference device pointers (the host-emulated device).
  virtual bool host_accessible() const noexcept = 0;

  /// Allocates at least 64-byte (CUDA: 256-byte) aligned memory. Thread-safe, never blocks.
  /// Errors: kResourceExhausted with the account by purpose when the budget does not hold it;
  /// nothing changes.
  DeviceBuffer allocate(std::uint64_t size_bytes, Purpose purpose);
  /// The same, but an empty buffer in place of the error.
  virtual DeviceBuffer try_allocate(std::uint64_t size_bytes, Purpose purpose) = 0;

  /// Tells the device that copies will touch this host memory often, so that it need not stage
  /// them; until the result is dropped. On the host-emulated device there is nothing to tell.
  /// Errors: kResourceExhausted if the driver cannot pin it.
  [[nodiscard]] virtual std::shared_ptr<void> register_host_memory(std::span<std::byte> memory) {
    static_cast<void>(memory);
    return nullptr;
  }

  /// `name` labels its trace track. The device must outlive its streams; a stream's destructor
  /// waits for its copies.
  virtual std::unique_ptr<Stream> create_stream(const std::string& name) = 0;

  /// A copy of the account (budget, used, peak, by purpose). Thread-safe.
  virtual Account account() const = 0;

  /// Called, on whatever thread freed it, after memory came back: waiters retry. Set once by the
  /// engine.
  virtual void on_free(std::function<void()> callback) = 0;

 protected:
  friend class DeviceBuffer;
  virtual void free(std::byte* data, std::uint64_t size_bytes, Purpose purpose) noexcept = 0;
};

/// co_await copy(stream, {...}): queues and resumes on the reactor when done.
Task<> copy(Reactor& reactor, Stream& stream, const Stream::Copy& request);

}  // namespace ziggurat
