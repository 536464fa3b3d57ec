// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/core_rates.h: what this machine's cores compute, by kind of product, and how
// fast they pass over memory and copy it. Planning takes these figures for this machine.
//
// The products are the trainer's: oneDNN, tile by tile on every worker. Nothing here touches a GPU.
#pragma once

#include "base/runtime/worker_pool.h"
#include "core/plan/machine_profile.h"

namespace ziggurat::gpt {

/// Measures each of the five figures for `seconds`, and at least three times; the median counts.
/// Takes 128 MiB of memory. Errors: kUnavailable if oneDNN cannot be opened; kResourceExhausted.
ComputeProfile measure_cores(WorkerPool& workers, double seconds);

}  // namespace ziggurat::gpt
