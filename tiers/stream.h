// SPDX-License-Identifier: Apache-2.0
// tiers/stream.h: in-order queues of a device: a StreamRef, where events are recorded and waited
// for, and a Stream, the engine's own, which copies too.
//
// Work of one stream happens in its order; work of different streams overlaps, except where one
// waits for an event of another. Nothing here blocks the caller, but on the Host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "base/runtime/metrics.h"
#include "base/runtime/trace.h"
#include "tiers/event.h"

namespace ziggurat {

class DeviceMemory;

/// Somebody's in-order queue of work: the engine's, a caller's own (CudaDevice::caller_stream), or
/// the host.
class StreamRef {
 public:
  virtual ~StreamRef() = default;
  /// Happens when everything queued here before has finished.
  virtual Event record() = 0;
  /// What is queued here from now on starts after `event` has happened.
  virtual void wait(const Event& event) = 0;
};

/// The calling thread as a stream: what it has done is finished, and waiting means waiting. Any
/// thread but the reactor's.
class Host final : public StreamRef {
 public:
  Event record() override { return {}; }
  void wait(const Event& event) override;  ///< blocks; rethrows the event's error
};

/// The GPU prefers the stream of higher priority where several have work. Copies are short and
/// the next kernel waits for them: they go first.
enum class StreamPriority : std::uint8_t { kHigh, kNormal };

/// A queue of copies. Reactor's thread only, the destructor included, unless the loop is not
/// running. A stream that has failed once does no more: all that is queued on it later gets the
/// first error, and so does a stream that waits for an event of it.
class Stream : public StreamRef {
 public:
  enum class Direction : std::uint8_t { kToDevice, kToHost, kOnDevice };

  struct Copy {
    std::byte* destination;
    const std::byte* source;
    std::uint64_t size_bytes;
    Direction direction;
  };
  /// What a device lends its streams. `trace` and `metrics` may be null.
  struct Home {
    Reactor& reactor;
    DeviceMemory& memory;
    Trace* trace;
    Metrics* metrics;
  };

  /// Queues `copy` and returns; `done` runs on the reactor's thread when it and all before it have
  /// finished, with the error, if it or one before it failed. The event says the same, for streams
  /// that wait for the copy. Host memory must stay valid until then, and is registered
  /// (Device::register_host_memory) where the device asks for that. Before
  /// it touches memory of a buffer, it waits for those who had that memory before
  /// (DeviceBuffer::before_use). Errors, by `done`: kInvalidArgument for a device side that is not
  /// in one of the device's buffers, or a host side that is not registered; kUnavailable when the
  /// device is lost.
  Event copy(const Copy& copy, std::function<void(std::exception_ptr)> done);

  /// On a failed stream: an event that fails.
  Event record() final;
  void wait(const Event& event) final;

  const std::string& name() const noexcept { return name_; }
  /// The driver's handle (cudaStream_t), to launch kernels on; null where the device is emulated.
  virtual void* native_handle() const noexcept { return nullptr; }

 protected:
  Stream(const Home& home, const std::string& name);

  Reactor& reactor() const noexcept { return home_.reactor; }
  /// These queue, and throw an Error if they cannot. What queue_copy returns is kept until the copy
  /// has finished.
  virtual std::shared_ptr<void> queue_copy(const Copy& copy) = 0;
  virtual void queue_wait(const std::shared_ptr<EventState>& event) = 0;
  /// Must queue something that happens after all before it, also when `fate` says that the stream
  /// has failed, or that nothing can be queued any more.
  virtual std::shared_ptr<EventState> queue_record(std::exception_ptr fate) = 0;

 private:
  struct Track;
  std::exception_ptr start(const Copy& copy, std::shared_ptr<void>& kept);

  Home home_;
  std::string name_;
  std::exception_ptr failed_;
  std::shared_ptr<Track> track_;  // copies that finish after the stream has gone draw on it too
};

/// "a copy of 4.0 MiB to device": for messages.
std::string to_string(const Stream::Copy& copy);

/// co_await copy(stream, {...}): queues and resumes on the reactor when done.
Task<> copy(Reactor& reactor, Stream& stream, const Stream::Copy& request);

}  // namespace ziggurat
