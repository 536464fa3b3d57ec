// SPDX-License-Identifier: Apache-2.0
// integrations/measure/streams.h: measures sequential reads (of parameters), writes (the burst of a
// checkpoint) and their mix, with `depth` transfers of one block in flight on each target.
//
// Some transfers of a row, evenly over its time, are kept aside and checked when the clocks have
// stopped. So what was measured is checked, and the check costs the row nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/runtime/reactor.h"
#include "base/runtime/worker_pool.h"
#include "integrations/measure/adam_load.h"
#include "integrations/measure/measurement.h"
#include "integrations/measure/target.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat::measure {

/// The parts of the engine on which every workload runs.
struct Bench {
  Reactor& reactor;
  PinnedPool& pool;
  const Progress& progress;
  WorkerPool& workers;
  const AdamLoad* beside = nullptr;  ///< the load that runs beside what is measured, or null
};
using Targets = std::span<Target* const>;

/// The most that is tried in each direction.
inline constexpr std::uint64_t kInFlightBytesMax = 64 * kMiB;
inline constexpr std::uint32_t kDepthTriedMax = 64;
inline constexpr std::uint64_t kSampleBytes = 32 * kMiB;

struct StreamPlan {
  std::string name;
  IoMix kind = IoMix::kRead;
  double seconds = 0;
  std::uint32_t depth = 1;
  /// Size of a transfer: whole pages, at most DirectFile::kBlockBytes.
  std::uint32_t block_bytes = 0;
  /// Bytes of transfers kept aside, at most kSamplesMax transfers.
  std::uint64_t sample_bytes = kSampleBytes;
};

/// Runs the plan and returns when it is done. Files of our own must hold Content::kPages to be
/// read. Errors: those of the transfers.
Measurement run_stream(const Bench& bench, Targets targets, const StreamPlan& plan);

/// Writes a target of ours from end to end with a new pass of pages.
void fill(const Bench& bench, Target& target);

/// Takes a buffer from the pool. Aborts if the pool was made too small, which is a bug.
Lease take_buffer(PinnedPool& pool, std::uint64_t size_bytes);

}  // namespace ziggurat::measure
