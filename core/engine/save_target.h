// SPDX-License-Identifier: Apache-2.0
// core/engine/save_target.h: judges whether the target of a save answers.
//
// Whoever waits for the end of a save waits as long as its target answers. A target that has not
// answered for stall_max (and at least kSilence; kLongSilence while the save begins or ends, and
// where no stall_max is set) is considered to hang, and calls to it may never return. Reactor's
// thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "base/runtime/metrics.h"

namespace ziggurat {

class SaveTarget {
 public:
  /// The time allowed between two answers of a target when something waits for the save's end.
  static constexpr Nanoseconds kSilence = std::chrono::seconds(10);
  /// The time allowed for one sync, one removal, or other ranks, at the beginning and end of a
  /// save. It is shorter than the time after which ranks that stand still end the job
  /// (RankOptions::call_timeout).
  static constexpr Nanoseconds kLongSilence = std::chrono::minutes(8);

  /// A call to the target, which has not returned while this object lives.
  class Asked {
   public:
    explicit Asked(SaveTarget& target) : target_(target) { ++target_.asked_; }
    ~Asked() {
      --target_.asked_;
      ++target_.returned_;
    }
    Asked(const Asked&) = delete;
    Asked& operator=(const Asked&) = delete;

   private:
    SaveTarget& target_;
  };

  SaveTarget(Reactor& reactor, std::optional<double> stall_max_s)
      : reactor_(reactor), stall_max_s_(stall_max_s) {}
  SaveTarget(const SaveTarget&) = delete;
  SaveTarget& operator=(const SaveTarget&) = delete;

  /// Counts bytes that are moved to and from the target, which are answers too.
  Metrics& moved() noexcept { return moved_; }
  /// Says whether records are being written. Before and after, calls answer only at their end:
  /// syncs, removals, and exchanges with other ranks.
  void copying(bool now) noexcept { copying_ = now; }
  /// Notes that the save has ended.
  void end();
  /// Returns how long the target had been silent when it was found to hang; 0 if the save has
  /// ended. `waits_for_time` says whether the save itself makes a pause.
  Task<Nanoseconds> ended_or_silent(std::function<bool()> waits_for_time);
  /// Says that the target has not answered for so long.
  Error not_answered(Nanoseconds silent) const;

 private:
  Task<> ended_or(Nanoseconds longest);
  /// Returns a number that grows with every answer of the target.
  std::uint64_t answers() const {
    return returned_ + moved_.value(Counter::kNvmeWriteBytes) +
           moved_.value(Counter::kNvmeReadBytes);
  }

  Reactor& reactor_;
  std::optional<double> stall_max_s_;
  Metrics moved_;
  bool copying_ = false;
  bool ended_ = false;
  std::size_t asked_ = 0;
  std::uint64_t returned_ = 0;
  std::vector<std::weak_ptr<Signal>> waiting_;
};

}  // namespace ziggurat
