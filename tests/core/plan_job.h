// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_job.h: what tests ask the planner.
#pragma once

#include <cstdint>

#include "core/plan/machines/machine.h"
#include "core/plan/models/named_models.h"
#include "core/plan/strategies/compare.h"

namespace ziggurat {

inline Job job_of(const char* model, const char* machine, int gpus, std::int64_t sequence = 4096) {
  Job job;
  job.model = named_model(model).value();
  job.machine = find_machine(machine);
  job.gpus = gpus;
  job.sequence = sequence;
  job.micro_batches = 4;
  return job;
}

}  // namespace ziggurat
