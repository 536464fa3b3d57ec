// SPDX-License-Identifier: Apache-2.0
// tests/core/rehearsed_units.h: a model of equal units on a machine on which nothing takes time but
// what a test slows down.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "core/rehearsal/rehearsal.h"

namespace ziggurat::testing::rehearsed {

inline constexpr std::size_t kUnits = 8;
inline constexpr std::uint64_t kUnitCount = 16 << 20;
inline constexpr double kCount = static_cast<double>(kUnits * kUnitCount);
inline constexpr double kUnitBytes = 2.0 * kUnitCount;  // of its parameters

inline constexpr Counter kLinks[] = {Counter::kNvmeReadBytes,     Counter::kNvmeWriteBytes,
                                     Counter::kHostToDeviceBytes, Counter::kDeviceToHostBytes,
                                     Counter::kStateReadBytes,    Counter::kStateWriteBytes,
                                     Counter::kOptimizerBytes};

inline ModelSpec equal_units(std::size_t units, std::uint64_t count) {
  ModelSpec model{.name = "equal", .units = {}};
  for (std::size_t u = 0; u < units; ++u) {
    const std::string name = "unit" + std::to_string(u);
    model.units.push_back({.name = name,
                           .params = {{.name = name + ".weight",
                                       .shape = {static_cast<std::int64_t>(count)},
                                       .decay = true}}});
  }
  return model;
}

/// A machine on which nothing takes noticeable time: a test slows one thing down.
inline RehearsedMachine fast_machine() {
  RehearsedMachine machine;
  machine.workers = {.threads = 4, .bytes_per_second = 1e15, .latency = Nanoseconds(0)};
  const CostedLink link{.bytes_per_second = 1e15, .latency = Nanoseconds(0)};
  machine.device = {.memory_bytes = 4 * kGiB,
                    .host_accessible = true,
                    .to_device = link,
                    .to_host = link,
                    .own_memory = link};
  machine.drive = {.read_bytes_per_second = 1e15, .write_bytes_per_second = 1e15};
  return machine;
}

inline RehearsalRequest equal_run(Tier optimizer) {
  RehearsalRequest request;
  request.model = equal_units(kUnits, kUnitCount);
  request.config.store = {{"store"}};
  request.config.placement = {.params = Tier::kHost, .grads = Tier::kHost, .optimizer = optimizer};
  request.config.host_budget_bytes = 3 * kGiB;
  request.machine = fast_machine();
  request.costs.assign(kUnits, {.forward_s = 1e-5, .backward_s = 2e-5});
  request.steps = 4;
  return request;
}

/// The seconds of a step among others. The first step waits for no sweep, and the last one's sweep
/// has no step beside it.
inline double steady(const RehearsedRank& rank) { return rank.steps[2].seconds; }

/// The seconds of all steps, until they are durable.
inline double seconds_of(const RehearsedRank& rank) {
  double sum = rank.durable_s;
  for (const RehearsedStep& step : rank.steps) sum += step.seconds;
  return sum;
}

inline void expect_within(double value, double expected, double part) {
  EXPECT_NEAR(value, expected, part * expected);
}

}  // namespace ziggurat::testing::rehearsed
