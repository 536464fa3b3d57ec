// SPDX-License-Identifier: Apache-2.0
// integrations/cli/step_log.h: records where the time and the bytes of each step, and of the whole
// run, went.
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

/// The counters at one instant. The difference of two snapshots is what was counted between them.
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

/// What the trainer waited for.
enum class Wait : std::uint8_t { kParams, kSweep, kGrads, kDurable, kRanks, kCount };
inline constexpr std::size_t kWaits = static_cast<std::size_t>(Wait::kCount);
std::string_view to_string(Wait wait) noexcept;
Counter counter_of(Wait wait) noexcept;

/// The parts of a step's wall time, which sum to it.
struct StepSplit {
  double data_s = 0;
  double forward_s = 0;   ///< compute
  double backward_s = 0;  ///< compute, recomputation included
  /// The engine's step call without its waiting. The sweep itself runs beside the other parts.
  double optimizer_s = 0;
  std::array<double, kWaits> wait_s{};
  double other_s = 0;  ///< calls into the engine, and everything else

  double waiting_s() const noexcept;
  double wall_s() const noexcept {
    return data_s + forward_s + backward_s + optimizer_s + waiting_s() + other_s;
  }
  StepSplit& operator+=(const StepSplit& other) noexcept;
  StepSplit operator/(double divisor) const noexcept;
};

struct StepRecord {
  std::uint64_t step = 0;  ///< the generation that the step makes, from 1
  float loss = 0;          ///< mean loss over the step, in nats per byte
  double learning_rate = 0;
  double grad_norm = 0;
  bool clipped = false;
  std::optional<double> loss_scale;  ///< none if the run has no loss scale
  bool skipped = false;  ///< its gradients overflowed, so it made nothing and is attempted again
  std::uint64_t durable_generation = 0;
  double wall_s = 0;
  StepSplit split;
  CounterSnapshot counters;  ///< of this step
  std::optional<double> held_out_loss;
};

/// The times and counters measured in one step, from which split_of() makes the split.
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

/// Keeps the totals of the run so far, and the newest steps one by one.
class StepLog {
 public:
  static constexpr std::size_t kRecordsMax = 1024;
  /// The number of first steps of a process that are not steady, because they learn the order of
  /// units and find nothing prefetched.
  static constexpr std::size_t kWarmUpSteps = 2;

  /// Adds a step. Only the time of a skipped step counts.
  void add(const StepRecord& record);

  std::size_t steps() const noexcept { return steps_; }
  std::size_t skipped() const noexcept { return skipped_; }
  double wall_s() const noexcept { return wall_s_; }
  const std::deque<StepRecord>& newest() const noexcept { return newest_; }

  /// The means over the newest steady steps (over all steps if the run was too short to have any).
  struct Steady {
    std::size_t steps = 0;
    double wall_s = 0;
    StepSplit split;
    CounterSnapshot counters;  ///< counts of an average step
    /// The least time of each part in any of these steps, which it takes if nothing is in its way.
    StepSplit best;
    /// The speed of the drive while it was busy, in the best of these steps.
    double nvme_bytes_per_s = 0;
    /// The share of the steps whose update began before the norm was known and was not made again.
    double speculated = 0;
  };
  Steady steady() const;
  /// Returns the mean wall seconds of the last eight steps, for the live line. The first steps are
  /// left out if there are others.
  double recent_wall_s() const noexcept;
  /// Returns the mean loss of the last `count` steps.
  double mean_loss(std::size_t count) const noexcept;

 private:
  std::size_t steps_ = 0;
  std::size_t skipped_ = 0;
  double wall_s_ = 0;
  std::deque<StepRecord> newest_;
};

}  // namespace ziggurat::cli
