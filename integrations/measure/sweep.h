// SPDX-License-Identifier: Apache-2.0
// integrations/measure/sweep.h: the optimizer's pass over records on a drive. It reads a record of
// 12 bytes per parameter from one slot, updates it on a worker, and writes it to the other slot.
//
// The kernel, the record's size and the two checksums are those of training (optimizer/update.h).
// Without compute the same bytes move unchanged, so that the difference is the cost of the update.
#pragma once

#include "integrations/measure/streams.h"

namespace ziggurat::measure {

/// Writes generation 0 of the records into a target of ours. All else in the target is lost.
void make_records(const Bench& bench, Target& target);

struct SweepPlan {
  std::string name;
  double seconds = 0;
  bool compute = false;
};
/// Runs the plan on targets that hold Content::kRecords. With compute, every record that is read is
/// verified; without it, some records are verified afterwards.
Measurement run_sweep(const Bench& bench, Targets targets, const SweepPlan& plan);

/// Returns the bytes of a record in a file of this size: 6 MiB as in the engine, or less if too few
/// records would fit.
std::uint64_t sweep_record_bytes(std::uint64_t file_bytes) noexcept;

}  // namespace ziggurat::measure
