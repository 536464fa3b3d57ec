// SPDX-License-Identifier: Apache-2.0
// tiers/device/costed_device.h: the twin of a device, in virtual time: addresses without memory
// under a hard budget, and streams in which work takes time and moves nothing.
//
// A copy occupies its direction of the link for bytes / bandwidth, after the copies of all streams
// that were begun before it, and ends a latency later. The rows of a copy are queued together, so
// they have one latency, and cost the twin as much as a single row. Reactor's thread only.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/absent_memory.h"
#include "base/access_ledger.h"
#include "tiers/device/device.h"
#include "tiers/device/device_memory.h"

namespace ziggurat {

class CostedStream;

struct CostedLink {
  double bytes_per_second = 1e9;  ///< above 0
  Nanoseconds latency{0};
};

struct CostedDeviceOptions {
  std::uint64_t memory_bytes = 0;
  /// The twin of a device that is emulated in host memory; else of a GPU.
  bool host_accessible = true;
  CostedLink to_device;
  CostedLink to_host;
  /// A GPU's own memory, which its kernels and its copies within it use.
  CostedLink own_memory;
  /// Notes who reads and writes memory; it outlives the device. Null if nobody looks.
  AccessLedger* ledger = nullptr;
  /// For tests: the rows of a copy occupy the link one after another, each with a timer of its own,
  /// so that copies of other streams come between them.
  bool row_by_row = false;
};

class CostedDevice final : public Device {
 public:
  /// `metrics` and `trace` may be null. All arguments outlive the device.
  CostedDevice(Reactor& reactor, AbsentMemory& absent, const CostedDeviceOptions& options,
               Metrics* metrics, Trace* trace = nullptr);

  std::string description() const override;
  bool host_accessible() const noexcept override { return options_.host_accessible; }
  using Device::create_stream;
  /// Makes a stream. Work that was queued goes on after its destructor. The priority has no effect.
  std::unique_ptr<Stream> create_stream(const std::string& name, StreamPriority priority) override;
  /// Makes a stream that also computes.
  std::unique_ptr<CostedStream> create_costed_stream(const std::string& name);

 protected:
  DeviceMemory& memory() const noexcept override { return memory_; }

 private:
  friend class CostedStream;
  struct Links;

  Reactor& reactor_;
  CostedDeviceOptions options_;
  mutable DeviceMemory memory_;
  Metrics* metrics_;
  Trace* trace_;
  std::shared_ptr<Links> links_;
};

/// A stream of a CostedDevice.
class CostedStream final : public Stream {
 public:
  CostedStream(const Home& home, CostedDevice& device, const std::string& name);

  /// The memory that work touches while it is under way, for the ledger: one row, or several.
  struct Touched {
    std::span<const std::byte> read{};
    std::span<const std::byte> written{};
    std::uint64_t rows = 1;
    std::uint64_t read_stride_bytes = 0;
    std::uint64_t written_stride_bytes = 0;
  };
  /// Queues work of the device's processors that takes `time`. The trace shows it as `name`, a
  /// literal, of `unit`.
  void compute(Nanoseconds time, const char* name, std::int64_t unit, const Touched& touched);
  /// Queues a kernel that reads and writes `size_bytes` of the device's own memory.
  void use_memory(std::uint64_t size_bytes, const Touched& touched);
  /// Queues bytes of a kernel that cross the link to the host.
  void bring_to_host(std::uint64_t size_bytes);

 protected:
  void queue_copy(const Copy& copy, std::shared_ptr<void>& kept) override;
  void queue_wait(const std::shared_ptr<EventState>& event) override;
  std::shared_ptr<EventState> queue_record(std::exception_ptr fate) override;

 private:
  struct Queue;
  std::shared_ptr<CostedDevice::Links> links_;
  std::shared_ptr<Queue> queue_;  // also kept by its timers
  bool row_by_row_;
};

}  // namespace ziggurat
