// SPDX-License-Identifier: Apache-2.0
// tiers/device/host_device.h: the CPU-only device: a budget of host memory is used like a GPU's
// memory, with streams on threads of their own.
//
// One mapping of transparent huge pages is the device's memory, or memory that the caller lends.
// Nothing else is ever allocated, so the budget is hard. A copy is a memcpy on the stream's thread:
// it takes memory bandwidth and some CPU time, as a link would take its own, and overlaps compute.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "base/device_span.h"
#include "base/runtime/metrics.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "base/typed_span.h"
#include "tiers/device/device.h"
#include "tiers/device/device_memory.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {

class HostDevice final : public Device {
 public:
  /// Makes a device. `trace` and `metrics` may be null. The reactor must outlive the device.
  /// Errors: kInvalidArgument for a budget below 4 KiB; kResourceExhausted if the machine cannot
  /// give the memory.
  static std::unique_ptr<HostDevice> create(Reactor& reactor, std::uint64_t capacity_bytes,
                                            Trace* trace = nullptr, Metrics* metrics = nullptr);
  /// Makes a device of `lent` memory, which must outlive it, and which nothing else uses meanwhile.
  /// Errors: kInvalidArgument if the memory does not begin with a page (4 KiB), or has less than
  /// one.
  static std::unique_ptr<HostDevice> create(Reactor& reactor, std::span<std::byte> lent,
                                            Trace* trace = nullptr, Metrics* metrics = nullptr);

  /// Returns device elements for the CPU, because memory of an emulated device is host memory.
  template <class T>
  static std::span<T> view(DeviceSpan<T> span) noexcept {
    return {reinterpret_cast<T*>(span.address()), span.size()};
  }
  template <class Byte>
  static TypedSpan<Byte> view(TypedDeviceSpan<Byte> span) noexcept {
    return {span.dtype, view(span.bytes)};
  }

  std::string description() const override;
  bool host_accessible() const noexcept override { return true; }
  bool holds_zeros() const noexcept override {
    return mapping_.has_value() && account().peak_bytes() == 0;
  }
  using Device::create_stream;
  std::unique_ptr<Stream> create_stream(const std::string& name, StreamPriority priority) override;

 protected:
  DeviceMemory& memory() const noexcept override { return memory_; }

 private:
  HostDevice(Reactor& reactor, std::optional<HostMapping> mapping, std::span<std::byte> bytes,
             Trace* trace, Metrics* metrics);

  Reactor& reactor_;
  std::optional<HostMapping> mapping_;  // empty if the memory is lent
  std::span<std::byte> bytes_;
  mutable DeviceMemory memory_;
  Trace* trace_;
  Metrics* metrics_;
};

/// A queue and the thread that empties it. Priorities have no effect: threads are equal.
class HostStream final : public Stream {
 public:
  HostStream(const Home& home, const std::string& name);
  ~HostStream() override;  ///< finishes the queued work

  /// Queues `action` to run on the stream's thread, in order. It must not throw.
  void enqueue(std::function<void()> action);

 protected:
  void queue_copy(const Copy& copy, std::shared_ptr<void>& kept) override;
  void queue_wait(const std::shared_ptr<EventState>& event) override;
  std::shared_ptr<EventState> queue_record(std::exception_ptr fate) override;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ziggurat
