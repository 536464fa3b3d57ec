// SPDX-License-Identifier: Apache-2.0
// integrations/cli/step_log.h: where the time and the bytes of each step went, and of the run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string_view>

#include "base/runtime/metrics.h"

namespace ziggurat::cli {

inline constexpr std::size_t kCounters = static_cast<std::size_t>(Counter::kCount);

/// The counters at one instant; differences are what happened between.
struct CounterSnapshot {
  std::array<std::uint64_t, kCounters> values{};

  static CounterSnapshot of(const Metrics& metrics) noexcept;
  std::uint64_t operator[](Counter counter) const noexcept {
    return values[static_cast<std::size_t>(counter)];
  }
  double seconds(Counter counter) const noexcept {
    return static_cast<double>((*this)[counter]) * 1e-9;
  }
  CounterSnapshot operator-(const CounterSnapshot& before) const noexcept;
  CounterSnapshot& operator+=(const CounterSnapshot& other) noexcept;
};

/// Why the trainer stood still.
enum class Wait : std::uint8_t { kParams, kSweep, kGrads, kDurable, kRanks, kCount };
inline constexpr std::size_t kWaits = static_cast<std::size_t>(Wait::kCount);
std::string_view to_string(Wait wait) noexcept;
Counter counter_of(Wait wait) noexcept;

/// The parts of a step's wall time; they sum to it.
struct StepSplit {
  double data_s = 0;
  double forward_s = 0;   ///< compute
  double backward_s = 0;  ///< compute, recomputation included
  double optimizer_s =
      0;  ///< the engine's step call, less what it waited: the sweep itself runs beside the rest
  std::array<double, kWaits> wait_s{};
  double other_s = 0;  ///< calls into the engine, everything else

  double waiting_s() const noexcept;
  double wall_s() const noexcept {
    return data_s + forward_s + backward_s + optimizer_s + waiting_s() + other_s;
  }
  StepSplit& operator+=(const StepSplit& other) noexcept;
  StepSplit operator/(double divisor) const noexcept;
};

struct StepRecord {
  std::uint64_t step = 0;  ///< from 1: the generation it makes
  float loss = 0;          ///< mean over the step, nats per byte
  double learning_rate = 0;
  double grad_norm = 0;
  bool clipped = false;
  std::optional<double> loss_scale;  ///< where there is one
  bool skipped = false;  ///< its gradients overflowed: it made nothing, and is attempted again
  std::uint64_t durable_generation = 0;
  double wall_s = 0;
  StepSplit split;
  CounterSnapshot counters;  ///< of this step
  std::optional<double> held_out_loss;
};

/// What is measured while a step runs, turned into its split.
struct StepTimes {
  double data_s = 0;
  double passes_s = 0;     ///< forward_backward(), wall
  double step_call_s = 0;  ///< Engine::step(), wall
  double forward_compute_s = 0;
  double backward_compute_s = 0;
  CounterSnapshot passes;     ///< counted during forward_backward()
  CounterSnapshot step_call;  ///< counted during Engine::step()
};
StepSplit split_of(const StepTimes& times) noexcept;

/// The run so far: totals over everything, and the newest steps for what needs their distribution.
class StepLog {
 public:
  static constexpr std::size_t kRecordsMax = 1024;
  /// The first steps of a process learn the order of units and find nothing prefetched: not steady.
  static constexpr std::size_t kWarmUpSteps = 2;

  /// A skipped step counts by its time only.
  void add(const StepRecord& record);

  std::size_t steps() const noexcept { return steps_; }
  std::size_t skipped() const noexcept { return skipped_; }
  double wall_s() const noexcept { return wall_s_; }
  const std::deque<StepRecord>& newest() const noexcept { return newest_; }

  /// Means over the newest steady steps (over all of them if the run was too short to have any).
  struct Steady {
    std::size_t steps = 0;
    double wall_s = 0;
    StepSplit split;
    CounterSnapshot counters;  ///< of an average step
    /// Each part's least time in any of these steps: what it takes where nothing is in its way.
    StepSplit best;
    /// Bytes per second while busy that the drive reached in the best of these steps.
    double nvme_bytes_per_s = 0;
    /// Share of the steps whose update began before the norm and was not made again.
    double speculated = 0;
  };
  Steady steady() const;
  /// Wall seconds of a recent step, for the live line: the mean of the last eight, the first steps
  /// left out when it can be.
  double recent_wall_s() const noexcept;
  /// Mean loss of the last `count` steps.
  double mean_loss(std::size_t count) const noexcept;

 private:
  std::size_t steps_ = 0;
  std::size_t skipped_ = 0;
  double wall_s_ = 0;
  std::deque<StepRecord> newest_;
};

}  // namespace ziggurat::cli
