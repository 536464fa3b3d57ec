// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/core_rates.h: what this machine's cores compute, by kind of product, and how
// fast they pass over memory and copy it. Planning takes these figures for this machine.
//
// The products are the trainer's: oneDNN, tile by tile on every worker. So are attention and the
// other kernels of a layer, forward and backward together. Nothing here touches a GPU.
#pragma once

#include <cstdint>

#include "base/runtime/worker_pool.h"
#include "core/plan/machine_profile.h"

namespace ziggurat::gpt {

/// A product of so many rows, and how long it took.
struct TimedProduct {
  std::int64_t rows = 0;
  double took_s = 0;
};
/// Returns the seconds that two products of the same weights take for these, however many rows they
/// have; at most a part of either.
double weights_seconds(const TimedProduct& few, const TimedProduct& many);

/// Measures each of the eight figures for `seconds`, and at least three times; the median counts.
/// Takes 200 MiB of memory. Errors: kUnavailable if oneDNN cannot be opened; kResourceExhausted.
ComputeProfile measure_cores(WorkerPool& workers, double seconds);

}  // namespace ziggurat::gpt
