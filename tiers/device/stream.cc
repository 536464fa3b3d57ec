// SPDX-License-Identifier: Apache-2.0
// tiers/device/stream.cc: what the streams of all devices share: the checks before a copy, the
// order of failures, and completion by an event.
#include "tiers/device/stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "tiers/device/device_memory.h"

namespace ziggurat {
namespace {

const char* span_name(Stream::Direction direction) noexcept {
  switch (direction) {
    case Stream::Direction::kToDevice: return "to device";
    case Stream::Direction::kToHost: return "to host";
    case Stream::Direction::kOnDevice: return "on device";
  }
  return "copy";
}

/// Calls `visit(bytes)` for each side of the copy that must be device memory.
template <class Visit>
void device_sides(const Stream::Copy& copy, const Visit& visit) {
  using Bytes = std::span<const std::byte>;
  if (copy.direction != Stream::Direction::kToHost)
    visit(Bytes(copy.destination, copy.destination_reach()));
  if (copy.direction != Stream::Direction::kToDevice)
    visit(Bytes(copy.source, copy.source_reach()));
}

void count(Metrics* metrics, const Stream::Copy& copy) {
  if (metrics == nullptr || copy.direction == Stream::Direction::kOnDevice) return;
  metrics->add(copy.direction == Stream::Direction::kToDevice ? Counter::kHostToDeviceBytes
                                                              : Counter::kDeviceToHostBytes,
               copy.all_bytes());
}

/// Returns an error that names the copy, for a failure whose own text does not.
std::exception_ptr of_copy(const Stream::Copy& copy, const std::string& stream, const char* verb,
                           const std::exception_ptr& why) {
  try {
    std::rethrow_exception(why);
  } catch (const Error& error) {
    return std::make_exception_ptr(
        Error(error.code(),
              fmt::format("stream {}: {} {}: {}", stream, to_string(copy), verb, error.what()),
              error.native()));
  } catch (...) {
    return why;
  }
}

}  // namespace

std::string to_string(const Stream::Copy& copy) {
  const std::string rows = copy.rows == 1 ? "" : fmt::format(" in {} rows", copy.rows);
  return fmt::format("a copy of {}{} {}", format_bytes(copy.all_bytes()), rows,
                     span_name(copy.direction));
}

void Host::wait(const Event& event) {
  const std::shared_ptr<EventState>& state = event.state();
  if (state == nullptr) return;
  ZIGGURAT_CHECK(!state->reactor().on_reactor_thread(),
                 "the reactor's thread blocks on an event: co_await it");
  state->block();
  if (const std::exception_ptr error = state->fate()) std::rethrow_exception(error);
}

/// Draws the spans of copies, one after another as the stream does them. Reactor's thread.
struct Stream::Track {
  Trace* trace;
  int id;
  Nanoseconds last_end{0};

  void draw(const Copy& copy, Nanoseconds queued, Nanoseconds end) {
    if (trace == nullptr) return;
    const Nanoseconds begin = std::min(std::max(queued, last_end), end);
    last_end = end;
    trace->span(id, span_name(copy.direction), begin, end,
                static_cast<std::int64_t>(copy.all_bytes()));
  }
};

Stream::Stream(const Home& home, const std::string& name) : home_(home), name_(name) {
  const int id = home.trace == nullptr ? 0 : home.trace->track("copies: " + name);
  track_ = std::make_shared<Track>(Track{.trace = home.trace, .id = id});
}

/// Queues the transfer behind earlier users of the memory. Returns an error if it cannot be queued.
std::exception_ptr Stream::start(const Copy& copy, std::shared_ptr<void>& kept) {
  if (copy.all_bytes() == 0) return nullptr;
  try {
    device_sides(copy, [&](std::span<const std::byte> side) {
      if (home_.memory.contains(side.data(), side.size())) return;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the memory at {} is not in one of the device's buffers",
                              fmt::ptr(side.data())));
    });
    device_sides(copy, [&](std::span<const std::byte> side) {
      for (const Event& event : home_.memory.before_use(side.data())) wait(event);
    });
    if (failed_) return failed_;
    queue_copy(copy, kept);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

Event Stream::copy(const Copy& copy, std::function<void(std::exception_ptr)> done) {
  const Nanoseconds queued = home_.reactor.clock().now();
  std::shared_ptr<void> kept;
  const char* verb = "was not begun after an earlier failure";
  if (!failed_) {
    verb = "was refused";
    failed_ = start(copy, kept);
  }
  const bool is_queued = !failed_ && copy.all_bytes() > 0;
  if (is_queued) verb = "did not finish";
  const std::shared_ptr<EventState> finished = queue_record(failed_);
  // An event may fail although the copy was queued, and what follows cannot be trusted then.
  if (!failed_) failed_ = finished->fate();
  if (is_queued) {
    device_sides(copy, [&](std::span<const std::byte> side) {
      home_.memory.used_until(side.data(), Event(finished));
    });
  }
  AfterEvent action = [copy, queued, verb, name = name_, track = track_, metrics = home_.metrics,
                       kept = std::move(kept),
                       done = std::move(done)](const EventOutcome& outcome) mutable {
    kept.reset();
    if (!outcome.error) {
      count(metrics, copy);
      track->draw(copy, queued, outcome.at);
    }
    done(outcome.error ? of_copy(copy, name, verb, outcome.error) : nullptr);
  };
  finished->then(std::move(action));
  return Event(finished);
}

Event Stream::record() {
  Event event(queue_record(failed_));
  if (!failed_) failed_ = event.state()->fate();
  return event;
}

void Stream::wait(const Event& event) {
  const std::shared_ptr<EventState>& state = event.state();
  if (failed_ || state == nullptr) return;
  if (const std::exception_ptr fate = state->fate()) {
    failed_ = fate;
  } else if (state->queue() != this && !state->happened()) {
    try {
      queue_wait(state);
    } catch (...) {
      failed_ = std::current_exception();
    }
  }
}

namespace {

Task<> copy_and_wait(Reactor& reactor, Stream& stream, Stream::Copy request) {
  Signal finished(reactor);
  std::function<void(std::exception_ptr)> done = [&finished](std::exception_ptr error) {
    if (error) {
      finished.fail(std::move(error));
    } else {
      finished.set();
    }
  };
  stream.copy(request, std::move(done));
  co_await finished.wait();
}

}  // namespace

// Not itself a coroutine, because `request` may be a temporary, and a coroutine starts later.
Task<> copy(Reactor& reactor, Stream& stream, const Stream::Copy& request) {
  return copy_and_wait(reactor, stream, request);
}

}  // namespace ziggurat
