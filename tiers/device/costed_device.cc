// SPDX-License-Identifier: Apache-2.0
// tiers/device/costed_device.cc: queues of costed work, each with one timer at a time.
#include "tiers/device/costed_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/runtime/seconds.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kCostedAlignment = 4 * kKiB;  // HostDevice's

class CostedEvent final : public EventState {
 public:
  CostedEvent(Reactor& reactor, const void* queue, std::exception_ptr fate)
      : EventState(reactor, queue, std::move(fate), Place::kOnReactor) {}
};

}  // namespace

/// The links, and until when each is occupied.
struct CostedDevice::Links {
  struct Link {
    CostedLink its;
    Nanoseconds busy_until{0};

    /// Occupies the link with bytes. Returns until when.
    Nanoseconds take(std::uint64_t size_bytes, Nanoseconds now) {
      busy_until = std::max(busy_until, now) +
                   nanoseconds_of(static_cast<double>(size_bytes) / its.bytes_per_second);
      return busy_until;
    }
  };
  Link to_device;
  Link to_host;
  Link own_memory;
};

CostedDevice::CostedDevice(Reactor& reactor, AbsentMemory& absent,
                           const CostedDeviceOptions& options, Metrics* metrics, Trace* trace)
    : reactor_(reactor),
      options_(options),
      memory_(absent.reserve(options.memory_bytes).data(), options.memory_bytes, kCostedAlignment),
      metrics_(metrics),
      trace_(trace),
      links_(std::make_shared<Links>(Links{.to_device = {options.to_device},
                                           .to_host = {options.to_host},
                                           .own_memory = {options.own_memory}})) {
  for (const CostedLink& link : {options.to_device, options.to_host, options.own_memory})
    ZIGGURAT_CHECK(link.bytes_per_second > 0, "a link of {} bytes/s", link.bytes_per_second);
}

std::string CostedDevice::description() const {
  return fmt::format("a device without memory, in virtual time: {}",
                     format_bytes(options_.memory_bytes));
}

std::unique_ptr<Stream> CostedDevice::create_stream(const std::string& name, StreamPriority) {
  return create_costed_stream(name);
}

std::unique_ptr<CostedStream> CostedDevice::create_costed_stream(const std::string& name) {
  const Stream::Home home{
      .reactor = reactor_, .memory = memory_, .trace = trace_, .metrics = metrics_};
  return std::make_unique<CostedStream>(home, *this, name);
}

struct CostedStream::Queue : std::enable_shared_from_this<Queue> {
  Queue(const CostedDevice& device, const std::string& name)
      : reactor(device.reactor_),
        ledger(device.options_.ledger),
        trace(device.trace_),
        track(trace == nullptr ? 0 : trace->track("kernels: " + name)) {}

  /// One piece of work: bytes over a link, or time, or an event to wait for or to make happen.
  struct Work {
    CostedDevice::Links::Link* link = nullptr;
    std::uint64_t size_bytes = 0;
    bool goes_on = false;  ///< the next work is of the same copy, so nothing has arrived yet
    Nanoseconds time{0};
    const char* name = nullptr;  ///< of a kernel, for the trace; copies are drawn by Stream
    std::int64_t id = -1;
    Touched touched{};
    std::shared_ptr<EventState> waits_for{};
    std::shared_ptr<EventState> happens{};
  };

  void add(Work work) {
    all.push_back(std::move(work));
    go_on();
  }

  void go_on() {
    while (!is_busy && !all.empty()) {
      const Work work = std::move(all.front());
      all.pop_front();
      if (work.happens) {
        work.happens->happen(nullptr);
      } else if (work.waits_for) {
        if (!work.waits_for->happened()) wait(*work.waits_for);
      } else {
        take_time(work);
      }
    }
  }

  void wait(EventState& event) {
    is_busy = true;
    event.then([self = shared_from_this()](const EventOutcome&) { self->end(); });
  }

  void note_accesses(const Work& work) {
    if (ledger == nullptr) return;
    const char* const who = work.name != nullptr ? work.name : "a copy";
    const auto row = [](std::span<const std::byte> first, std::uint64_t offset_bytes) {
      return std::span(first.data() + offset_bytes, first.size());
    };
    const CostedStream::Touched& its = work.touched;
    for (std::uint64_t i = 0; i < its.rows; ++i) {
      accesses.push_back(
          ledger->begin(AccessLedger::Kind::kRead, row(its.read, i * its.read_stride_bytes), who));
      accesses.push_back(ledger->begin(AccessLedger::Kind::kWrite,
                                       row(its.written, i * its.written_stride_bytes), who));
    }
  }

  void take_time(const Work& work) {
    is_busy = true;
    note_accesses(work);
    const Nanoseconds now = reactor.clock().now();
    Nanoseconds until = now + work.time;
    if (work.link != nullptr) {
      until = work.link->take(work.size_bytes, now);
      if (!work.goes_on) until += work.link->its.latency;
    }
    if (trace != nullptr && work.name != nullptr)
      trace->span(track, work.name, now, until, work.id);
    reactor.clock().after(until - now, [self = shared_from_this()] { self->end(); });
  }

  void end() {
    is_busy = false;
    accesses.clear();
    go_on();
  }

  Reactor& reactor;
  AccessLedger* ledger;
  Trace* trace;
  int track;
  std::vector<AccessLedger::Access> accesses;  // of the work that is under way
  std::deque<Work> all;
  bool is_busy = false;
};

CostedStream::CostedStream(const Home& home, CostedDevice& device, const std::string& name)
    : Stream(home, name),
      links_(device.links_),
      queue_(std::make_shared<Queue>(device, name)),
      row_by_row_(device.options_.row_by_row) {}

void CostedStream::compute(Nanoseconds time, const char* name, std::int64_t unit,
                           const Touched& touched) {
  queue_->add({.time = time, .name = name, .id = unit, .touched = touched});
}

void CostedStream::use_memory(std::uint64_t size_bytes, const Touched& touched) {
  queue_->add({.link = &links_->own_memory,
               .size_bytes = size_bytes,
               .name = "a kernel",
               .touched = touched});
}

void CostedStream::bring_to_host(std::uint64_t size_bytes) {
  queue_->add({.link = &links_->to_host, .size_bytes = size_bytes});
}

void CostedStream::queue_copy(const Copy& copy, std::shared_ptr<void>& kept) {
  const bool on_device = copy.direction == Direction::kOnDevice;
  CostedDevice::Links::Link* const link = on_device ? &links_->own_memory
                                          : copy.direction == Direction::kToDevice
                                              ? &links_->to_device
                                              : &links_->to_host;
  kept = links_;
  const std::uint64_t at_once = row_by_row_ ? 1 : copy.rows;
  for (std::uint64_t row = 0; row < copy.rows; row += at_once) {
    const std::byte* const from = copy.source + row * copy.source_stride_bytes;
    std::byte* const to = copy.destination + row * copy.destination_stride_bytes;
    queue_->add({.link = link,
                 .size_bytes = (on_device ? 2 : 1) * at_once * copy.size_bytes,
                 .goes_on = row + at_once < copy.rows,
                 .touched = {.read = {from, copy.size_bytes},
                             .written = {to, copy.size_bytes},
                             .rows = at_once,
                             .read_stride_bytes = copy.source_stride_bytes,
                             .written_stride_bytes = copy.destination_stride_bytes}});
  }
}

void CostedStream::queue_wait(const std::shared_ptr<EventState>& event) {
  queue_->add({.waits_for = event});
}

std::shared_ptr<EventState> CostedStream::queue_record(std::exception_ptr fate) {
  auto event =
      std::make_shared<CostedEvent>(reactor(), static_cast<const Stream*>(this), std::move(fate));
  queue_->add({.happens = event});
  return event;
}

}  // namespace ziggurat
