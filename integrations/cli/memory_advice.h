// SPDX-License-Identifier: Apache-2.0
// integrations/cli/memory_advice.h: what a run needs on each tier, and which change helps most if
// that is too much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/run_plan.h"
#include "integrations/cli/train_options.h"

namespace ziggurat::cli {

// `strategy` says over how many ranks the state is divided; by default there is one rank.

/// Returns the run that `options` ask for, on one rank, as core/plan describes it.
RunRequest run_request(const TrainOptions& options, std::size_t threads,
                       const Strategy& strategy = {});

/// Returns the bytes of 16-bit parameters, 16-bit gradients and records on all tiers together.
std::uint64_t training_state_bytes(const TrainOptions& options);

/// The bytes that one rank makes its drive write, calculated from sizes alone.
struct WritePlan {
  std::uint64_t first_bytes = 0;  ///< bytes of generation 0 of a new store
  std::uint64_t per_step_bytes = 0;
  std::uint64_t at_end_bytes = 0;  ///< the checkpoint of state that is not NVMe-placed

  WritePlan operator*(std::uint64_t times) const {
    return {first_bytes * times, per_step_bytes * times, at_end_bytes * times};
  }
};
WritePlan write_plan(const TrainOptions& options, const Strategy& strategy = {});

/// Returns what to change, the most helpful change first, if `error` is a MemoryExhausted
/// ("--placement grads=nvme: ...") or a DiskFull of the store. Empty for all other errors, whatever
/// their errno.
std::vector<std::string> advice(const Error& error, const TrainOptions& options,
                                std::size_t threads, const Strategy& strategy = {});

}  // namespace ziggurat::cli
