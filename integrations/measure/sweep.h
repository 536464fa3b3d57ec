// SPDX-License-Identifier: Apache-2.0
// integrations/measure/sweep.h: the optimizer's pass over records on a drive: read a record of 12
// bytes a parameter from one slot, update it on a worker, write it to the other.
//
// The kernel, the record's size and the two checksums are training's (optimizer/update.h). Without
// compute the same bytes move untouched: what the update costs is the difference.
#pragma once

#include "integrations/measure/streams.h"

namespace ziggurat::measure {

/// Writes generation 0 of the records into a target of ours; what else was in it is gone.
void make_records(const Bench& bench, Target& target);

struct SweepPlan {
  std::string name;
  double seconds = 0;
  bool compute = false;
};
/// Wants Content::kRecords. With compute every record read is verified; without, some afterwards.
Measurement run_sweep(const Bench& bench, Targets targets, const SweepPlan& plan);

/// Bytes of a record in a file of this size: the engine's 6 MiB, less where too few would fit.
std::uint64_t sweep_record_bytes(std::uint64_t file_bytes) noexcept;

}  // namespace ziggurat::measure
