// SPDX-License-Identifier: Apache-2.0
// integrations/cli/step_log.cc: calculates sums, differences and means of steps.
#include "integrations/cli/step_log.h"

#include <algorithm>
#include <numeric>

namespace ziggurat::cli {
namespace {

/// Returns the smaller time of each part.
StepSplit least(const StepSplit& a, const StepSplit& b) noexcept {
  StepSplit result{.data_s = std::min(a.data_s, b.data_s),
                   .forward_s = std::min(a.forward_s, b.forward_s),
                   .backward_s = std::min(a.backward_s, b.backward_s),
                   .optimizer_s = std::min(a.optimizer_s, b.optimizer_s),
                   .wait_s = {},
                   .other_s = std::min(a.other_s, b.other_s)};
  for (std::size_t i = 0; i < kWaits; ++i) result.wait_s[i] = std::min(a.wait_s[i], b.wait_s[i]);
  return result;
}

}  // namespace

CounterSnapshot CounterSnapshot::of(const Metrics& metrics) noexcept {
  CounterSnapshot snapshot;
  for (std::size_t i = 0; i < kCounters; ++i)
    snapshot.values[i] = metrics.value(static_cast<Counter>(i));
  return snapshot;
}

CounterSnapshot CounterSnapshot::operator-(const CounterSnapshot& before) const noexcept {
  CounterSnapshot difference;
  for (std::size_t i = 0; i < kCounters; ++i) difference.values[i] = values[i] - before.values[i];
  return difference;
}

CounterSnapshot& CounterSnapshot::operator+=(const CounterSnapshot& other) noexcept {
  for (std::size_t i = 0; i < kCounters; ++i) values[i] += other.values[i];
  return *this;
}

std::string_view to_string(Wait wait) noexcept {
  switch (wait) {
    case Wait::kParams: return "params";
    case Wait::kSweep: return "sweep";
    case Wait::kGrads: return "grads";
    case Wait::kDurable: return "durable";
    case Wait::kRanks: return "ranks";
    case Wait::kCount: break;
  }
  return "?";
}

Counter counter_of(Wait wait) noexcept {
  switch (wait) {
    case Wait::kParams: return Counter::kWaitParamsNs;
    case Wait::kSweep: return Counter::kWaitSweepNs;
    case Wait::kGrads: return Counter::kWaitGradsNs;
    case Wait::kRanks: return Counter::kWaitRanksNs;
    default: return Counter::kWaitDurableNs;
  }
}

double StepSplit::waiting_s() const noexcept {
  return std::accumulate(wait_s.begin(), wait_s.end(), 0.0);
}

StepSplit& StepSplit::operator+=(const StepSplit& other) noexcept {
  data_s += other.data_s;
  forward_s += other.forward_s;
  backward_s += other.backward_s;
  optimizer_s += other.optimizer_s;
  for (std::size_t i = 0; i < kWaits; ++i) wait_s[i] += other.wait_s[i];
  other_s += other.other_s;
  return *this;
}

StepSplit StepSplit::operator/(double divisor) const noexcept {
  StepSplit result = *this;
  result.data_s /= divisor;
  result.forward_s /= divisor;
  result.backward_s /= divisor;
  result.optimizer_s /= divisor;
  for (double& wait : result.wait_s) wait /= divisor;
  result.other_s /= divisor;
  return result;
}

StepSplit split_of(const StepTimes& times) noexcept {
  StepSplit split;
  split.data_s = times.data_s;
  split.forward_s = times.forward_compute_s;
  split.backward_s = times.backward_compute_s;
  double waited_in_step = 0;
  double waited_in_passes = 0;
  for (std::size_t i = 0; i < kWaits; ++i) {
    const Counter counter = counter_of(static_cast<Wait>(i));
    waited_in_step += times.step_call.seconds(counter);
    waited_in_passes += times.passes.seconds(counter);
    split.wait_s[i] = times.step_call.seconds(counter) + times.passes.seconds(counter);
  }
  split.optimizer_s = std::max(0.0, times.step_call_s - waited_in_step);
  split.other_s =
      std::max(0.0, times.passes_s - waited_in_passes - split.forward_s - split.backward_s);
  return split;
}

void StepLog::add(const StepRecord& record) {
  wall_s_ += record.wall_s;
  if (record.skipped) {
    ++skipped_;
    return;
  }
  ++steps_;
  newest_.push_back(record);
  if (newest_.size() > kRecordsMax) newest_.pop_front();
}

StepLog::Steady StepLog::steady() const {
  Steady result;
  if (newest_.empty()) return result;
  const std::size_t dropped = steps_ - newest_.size();
  std::size_t first = dropped < kWarmUpSteps ? kWarmUpSteps - dropped : 0;
  if (first >= newest_.size()) first = 0;
  result.best = newest_[first].split;
  for (std::size_t i = first; i < newest_.size(); ++i) {
    const StepRecord& record = newest_[i];
    ++result.steps;
    result.wall_s += record.wall_s;
    result.split += record.split;
    result.best = least(result.best, record.split);
    result.counters += record.counters;
    if (record.counters[Counter::kSpeculations] > record.counters[Counter::kSpeculationsRedone])
      result.speculated += 1;
    const auto moved = static_cast<double>(record.counters[Counter::kNvmeReadBytes] +
                                           record.counters[Counter::kNvmeWriteBytes]);
    const double busy_s = record.counters.seconds(Counter::kNvmeBusyNs);
    if (busy_s > 0) result.nvme_bytes_per_s = std::max(result.nvme_bytes_per_s, moved / busy_s);
  }
  const auto count = static_cast<double>(result.steps);
  result.wall_s /= count;
  result.speculated /= count;
  result.split = result.split / count;
  for (std::uint64_t& value : result.counters.values) value /= result.steps;
  return result;
}

double StepLog::recent_wall_s() const noexcept {
  std::size_t count = std::min<std::size_t>(8, newest_.size());
  if (steps_ > kWarmUpSteps && count > steps_ - kWarmUpSteps) count = steps_ - kWarmUpSteps;
  if (count == 0) return 0;
  double sum = 0;
  for (auto record = newest_.rbegin();
       record != newest_.rbegin() + static_cast<std::ptrdiff_t>(count); ++record) {
    sum += record->wall_s;
  }
  return sum / static_cast<double>(count);
}

double StepLog::mean_loss(std::size_t count) const noexcept {
  count = std::min(count, newest_.size());
  if (count == 0) return 0;
  double sum = 0;
  for (auto record = newest_.rbegin();
       record != newest_.rbegin() + static_cast<std::ptrdiff_t>(count); ++record) {
    sum += record->loss;
  }
  return sum / static_cast<double>(count);
}

}  // namespace ziggurat::cli
