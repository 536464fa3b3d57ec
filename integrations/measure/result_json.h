// SPDX-License-Identifier: Apache-2.0
// integrations/measure/result_json.h: a result for machines: the file of --json, and the machine
// profile that planning reads.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/plan/machine_profile.h"
#include "integrations/measure/result.h"

namespace ziggurat::measure {

/// Everything: per-second series, histograms, every round, fio's figures, flags. A row that is
/// refused has "refused": true beside its figures.
nlohmann::ordered_json to_json(const BenchResult& result);

/// `known` with what `result` adds: each single path that has a believable read rate. Refused rows
/// leave their figure at 0.
MachineProfile updated_profile(MachineProfile known, const BenchResult& result);

/// What a tuned set suggests to DeepSpeed: the mix's choice, or the read's where nothing was
/// written. One submitting thread, as measured.
DeepSpeedAio suggested_aio(const TuneResult& tuned);

}  // namespace ziggurat::measure
