// SPDX-License-Identifier: Apache-2.0
// integrations/measure/result_json.h: writes a result for programs: the file of --json, and the
// machine profile that planning reads.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/plan/machine_profile.h"
#include "integrations/measure/result.h"

namespace ziggurat::measure {

/// Returns everything: series by second, histograms, every round, fio's figures and flags. A row
/// that is refused has "refused": true beside its figures.
nlohmann::ordered_json to_json(const BenchResult& result);

/// Returns `known` with what `result` adds: each single path that has a believable read rate. The
/// figure of a refused row is 0.
MachineProfile updated_profile(MachineProfile known, const BenchResult& result);

/// Returns what a tuned set suggests to DeepSpeed: the choice for the mix, or for reads if nothing
/// was written. It has one submitting thread, as was measured.
DeepSpeedAio suggested_aio(const TuneResult& tuned);

}  // namespace ziggurat::measure
