// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_auto.h: what a run of `ziggurat train` leaves to `auto`: asks core/plan,
// and says once, when some steps are made, what was planned beside what they took.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/plan/auto_ways.h"
#include "core/sharding/strategy.h"
#include "integrations/cli/train_options.h"

namespace ziggurat::cli {

/// What a rank takes, and what a step moves: as planned, or as measured.
struct AutoFigures {
  std::uint64_t device_bytes = 0;  ///< at the peak
  std::uint64_t host_bytes = 0;
  std::uint64_t store_bytes = 0;  ///< the files of the store
  std::uint64_t drive_bytes = 0;  ///< a step reads and writes
  double step_s = 0;              ///< 0 if it is not known
};

/// The facts of a choice, which are the same on all ranks.
struct AutoFacts {
  std::uint64_t free_bytes = 0;  ///< the least that a rank found
  std::uint64_t node_ranks = 1;  ///< the most that a machine has
  MovingSpeeds speeds{};         ///< rank 0's
};

struct TrainChoice {
  AutoFigures planned;
  std::string why;  ///< one line
};

/// Whether a budget is left to `auto`.
bool leaves_memory(const TrainOptions& options);

/// Gives `options` the budgets that it leaves out, and its placement if that is automatic. Errors:
/// choose_run()'s.
TrainChoice choose_memory(TrainOptions& options, std::size_t threads, const Strategy& strategy,
                          const AutoFacts& facts);

/// Returns the seconds of a step with so many `threads` by the rates of `profile`; none without
/// them, or for several ranks.
std::optional<double> planned_seconds(const TrainOptions& options, std::size_t threads,
                                      const Strategy& strategy, const MachineProfile& profile);

/// Says both in one line.
std::string beside(const AutoFigures& planned, const AutoFigures& taken, std::uint64_t step);

}  // namespace ziggurat::cli
