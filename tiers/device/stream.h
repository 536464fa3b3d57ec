// SPDX-License-Identifier: Apache-2.0
// tiers/device/stream.h: in-order queues of a device. A StreamRef records events and waits for
// them; a Stream, which belongs to the engine, also copies.
//
// Work of one stream happens in its order. Work of different streams overlaps, except if one waits
// for an event of another. No function blocks the caller, except those of Host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "base/runtime/metrics.h"
#include "base/runtime/trace.h"
#include "tiers/device/event.h"

namespace ziggurat {

class DeviceMemory;

/// An in-order queue of work of any owner: the engine's, a caller's own
/// (CudaDevice::caller_stream), or the host.
class StreamRef {
 public:
  virtual ~StreamRef() = default;
  /// Returns an event that happens when everything that was queued before has finished.
  virtual Event record() = 0;
  /// Makes work that is queued from now on start after `event` has happened.
  virtual void wait(const Event& event) = 0;
};

/// The calling thread as a stream: its work is finished when it calls, and wait() blocks. Any
/// thread but the reactor's.
class Host final : public StreamRef {
 public:
  Event record() override { return {}; }
  void wait(const Event& event) override;  ///< blocks, and rethrows the event's error
};

/// If several streams have work, the GPU prefers the one of higher priority. Copies get the high
/// priority, because they are short and the next kernel waits for them.
enum class StreamPriority : std::uint8_t { kHigh, kNormal };

/// A queue of copies. Reactor's thread only, also for the destructor, unless the loop is not
/// running. A stream that has failed once does nothing more: everything queued on it later gets the
/// first error, and so does a stream that waits for one of its events.
class Stream : public StreamRef {
 public:
  enum class Direction : std::uint8_t { kToDevice, kToHost, kOnDevice };

  /// Bytes, or several rows of as many bytes each: the same part of every slice of a unit.
  struct Copy {
    std::byte* destination;
    const std::byte* source;
    std::uint64_t size_bytes;  ///< of a row
    Direction direction;
    std::uint64_t rows = 1;
    // How far it is from where one row begins to where the next one does.
    std::uint64_t destination_stride_bytes = 0;
    std::uint64_t source_stride_bytes = 0;

    std::uint64_t all_bytes() const noexcept { return rows * size_bytes; }
    /// Return how many bytes lie between the begin of the first row and the end of the last.
    std::uint64_t destination_reach() const noexcept { return reach(destination_stride_bytes); }
    std::uint64_t source_reach() const noexcept { return reach(source_stride_bytes); }

   private:
    std::uint64_t reach(std::uint64_t stride_bytes) const noexcept {
      return all_bytes() == 0 ? 0 : (rows - 1) * stride_bytes + size_bytes;
    }
  };
  /// What a device gives its streams. `trace` and `metrics` may be null.
  struct Home {
    Reactor& reactor;
    DeviceMemory& memory;
    Trace* trace;
    Metrics* metrics;
  };

  /// Queues `copy` and returns. `done` runs on the reactor's thread when this copy and all before
  /// it have finished, with an error if one of them failed. The event says the same, for streams
  /// that wait for the copy. Host memory must stay valid until then, and must be registered
  /// (Device::register_host_memory) if the device needs that. Before the copy touches memory of a
  /// buffer, it waits for earlier users of that memory (DeviceBuffer::before_use). Errors, passed
  /// to `done`: kInvalidArgument for a device side that is not in one of the device's buffers, or a
  /// host side that is not registered; kUnavailable if the device is lost.
  Event copy(const Copy& copy, std::function<void(std::exception_ptr)> done);

  /// Records an event. On a failed stream, the event fails.
  Event record() final;
  void wait(const Event& event) final;

  const std::string& name() const noexcept { return name_; }
  /// Returns the driver's handle (cudaStream_t), for launching kernels; null if the device is
  /// emulated.
  virtual void* native_handle() const noexcept { return nullptr; }

 protected:
  Stream(const Home& home, const std::string& name);

  Reactor& reactor() const noexcept { return home_.reactor; }
  /// These functions queue, and throw an Error if they cannot. `kept` gets what must live until
  /// all that was queued has finished; that may be a part of the rows if an Error is thrown.
  virtual void queue_copy(const Copy& copy, std::shared_ptr<void>& kept) = 0;
  virtual void queue_wait(const std::shared_ptr<EventState>& event) = 0;
  /// Must queue an event that happens after all work before it, even if `fate` says that the stream
  /// has failed, or if nothing can be queued any more.
  virtual std::shared_ptr<EventState> queue_record(std::exception_ptr fate) = 0;

 private:
  struct Track;
  std::exception_ptr start(const Copy& copy, std::shared_ptr<void>& kept);

  Home home_;
  std::string name_;
  std::exception_ptr failed_;
  std::shared_ptr<Track> track_;  // shared with copies that finish after the stream has gone
};

/// Formats a copy for messages: "a copy of 4.0 MiB to device".
std::string to_string(const Stream::Copy& copy);

/// Queues a copy and resumes on the reactor when it is done: co_await copy(stream, {...}).
Task<> copy(Reactor& reactor, Stream& stream, const Stream::Copy& request);

}  // namespace ziggurat
