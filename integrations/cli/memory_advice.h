// SPDX-License-Identifier: Apache-2.0
// integrations/cli/memory_advice.h: what a run needs of each tier, and what helps most when that is
// too much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/run_plan.h"
#include "integrations/cli/train_options.h"

namespace ziggurat::cli {

// `strategy`: over how many ranks the state is cut; by default there is one.

/// The run that `options` ask for, on one rank, as core/plan sees it.
RunRequest run_request(const TrainOptions& options, std::size_t threads,
                       const Strategy& strategy = {});

/// On all tiers together: 16-bit parameters and gradients, and records.
std::uint64_t training_state_bytes(const TrainOptions& options);

/// Bytes of a step, and of the whole run, that one rank makes its drive write. From sizes alone.
struct WritePlan {
  std::uint64_t first_bytes = 0;  ///< generation 0 of a new store
  std::uint64_t per_step_bytes = 0;
  std::uint64_t at_end_bytes = 0;  ///< the checkpoint of state that is not NVMe-placed

  WritePlan operator*(std::uint64_t times) const {
    return {first_bytes * times, per_step_bytes * times, at_end_bytes * times};
  }
};
WritePlan write_plan(const TrainOptions& options, const Strategy& strategy = {});

/// What to change, that which helps most first, when `error` is a MemoryExhausted ("--placement
/// grads=nvme: ...") or a DiskFull of the store. Nothing for other errors, whatever their errno.
std::vector<std::string> advice(const Error& error, const TrainOptions& options,
                                std::size_t threads, const Strategy& strategy = {});

}  // namespace ziggurat::cli
