// SPDX-License-Identifier: Apache-2.0
// aio/io_activity.cc: busy time runs from the start of the first transfer to the end of the last
// one.
#include "aio/io_activity.h"

#include <fmt/format.h>

namespace ziggurat {
namespace {

constexpr const char* kRows[] = {"nvme read", "nvme write", "nvme sync"};
constexpr const char* kSpans[] = {"read", "write", "fdatasync"};
constexpr Counter kBusy[] = {Counter::kNvmeReadBusyNs, Counter::kNvmeWriteBusyNs};

constexpr std::size_t index(IoKind kind) noexcept { return static_cast<std::size_t>(kind); }

}  // namespace

void IoActivity::Span::enter(Nanoseconds now) noexcept {
  if (in_flight++ == 0) begin = now;
}

std::uint64_t IoActivity::Span::leave(Nanoseconds now) noexcept {
  return --in_flight == 0 ? static_cast<std::uint64_t>((now - begin).count()) : 0;
}

IoActivity::Seat IoActivity::begin(IoKind kind, Nanoseconds now, Trace* trace) {
  if (kind != IoKind::kSync) {
    direction_[index(kind)].enter(now);
    any_.enter(now);
  }
  Seat seat{kind, -1, {}};
  if (trace == nullptr) return seat;
  auto& lanes = lanes_[index(kind)];
  std::size_t lane = 0;
  while (lane < lanes.size() && lanes[lane].taken) ++lane;
  if (lane == kLanesMax) return seat;
  if (lane == lanes.size()) {
    const std::string suffix = lane == 0 ? "" : fmt::format(" {}", lane + 1);
    lanes.push_back({trace->track(kRows[index(kind)] + suffix), false});
  }
  lanes[lane].taken = true;
  seat.lane = static_cast<int>(lane);
  seat.begin = now;
  return seat;
}

void IoActivity::end(const Seat& seat, Nanoseconds now, Metrics* metrics, Trace* trace) {
  if (seat.kind != IoKind::kSync) {
    const std::uint64_t direction_ns = direction_[index(seat.kind)].leave(now);
    const std::uint64_t any_ns = any_.leave(now);
    if (metrics != nullptr) {
      metrics->add(kBusy[index(seat.kind)], direction_ns);
      metrics->add(Counter::kNvmeBusyNs, any_ns);
    }
  }
  if (seat.lane < 0 || trace == nullptr) return;
  Lane& lane = lanes_[index(seat.kind)][static_cast<std::size_t>(seat.lane)];
  lane.taken = false;
  trace->span(lane.track, kSpans[index(seat.kind)], seat.begin, now);
}

}  // namespace ziggurat
