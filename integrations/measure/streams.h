// SPDX-License-Identifier: Apache-2.0
// integrations/measure/streams.h: sequential reads (parameters), writes (a checkpoint's burst) and
// their mix, `depth` transfers of one block in flight on each target.
//
// Some transfers of a row are kept aside, evenly over its time, and looked at when the clocks have
// stopped: what is checked is what was measured, and checking costs the row nothing.
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
#include "tiers/pinned_pool.h"

namespace ziggurat::measure {

/// What every workload runs on.
struct Bench {
  Reactor& reactor;
  PinnedPool& pool;
  const Progress& progress;
  WorkerPool& workers;
  const AdamLoad* beside = nullptr;  ///< runs now, beside whatever is measured
};
using Targets = std::span<Target* const>;

inline constexpr std::uint64_t kInFlightBytesMax = 64 * kMiB;  ///< each way, of what is tried
inline constexpr std::uint32_t kDepthTriedMax = 64;
inline constexpr std::uint64_t kSampleBytes = 32 * kMiB;

struct StreamPlan {
  std::string name;
  IoMix kind = IoMix::kRead;
  double seconds = 0;
  std::uint32_t depth = 1;
  std::uint32_t block_bytes = 0;              ///< whole pages, at most DirectFile::kBlockBytes
  std::uint64_t sample_bytes = kSampleBytes;  ///< of transfers kept aside, at most kSamplesMax
};

/// Blocks until it is done. Reads of our own files want Content::kPages. Errors: those of the
/// transfers.
Measurement run_stream(const Bench& bench, Targets targets, const StreamPlan& plan);

/// Writes a target of ours from end to end with a new pass of pages.
void fill(const Bench& bench, Target& target);

/// A buffer from the pool. Errors: kResourceExhausted: the pool was made too small (a bug).
Lease take_buffer(PinnedPool& pool, std::uint64_t size_bytes);

}  // namespace ziggurat::measure
