// SPDX-License-Identifier: Apache-2.0
// aio/io_activity.h: records when a drive was busy, over all the files that share it, as busy
// counters and rows of the trace.
//
// Reactor's thread. Trace viewers cannot show overlapping spans on one row, so each direction has
// several lanes, and a transfer takes the lowest free one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "aio/io_engine.h"
#include "base/runtime/clock.h"
#include "base/runtime/metrics.h"
#include "base/runtime/trace.h"

namespace ziggurat {

class IoActivity {
 public:
  /// The most transfers that the trace shows at once in one direction. Further ones are counted,
  /// but not drawn.
  static constexpr std::size_t kLanesMax = 32;

  IoActivity() = default;
  IoActivity(const IoActivity&) = delete;

  /// A transfer that is under way, from begin() to end().
  struct Seat {
    IoKind kind = IoKind::kRead;
    int lane = -1;
    Nanoseconds begin{0};  ///< of the reactor's clock
  };

  /// Begins a transfer; `now` is the reactor's clock. A sync is drawn, but it is no transfer and
  /// adds nothing to busy time.
  Seat begin(IoKind kind, Nanoseconds now, Trace* trace);
  void end(const Seat& seat, Nanoseconds now, Metrics* metrics, Trace* trace);

 private:
  struct Span {
    std::size_t in_flight = 0;
    Nanoseconds begin{0};
    void enter(Nanoseconds now) noexcept;
    std::uint64_t leave(Nanoseconds now) noexcept;
  };
  struct Lane {
    int track = 0;
    bool taken = false;
  };

  std::array<Span, 2> direction_;  // by IoKind: reads, writes
  Span any_;
  std::array<std::vector<Lane>, 3> lanes_;  // by IoKind
};

}  // namespace ziggurat
