// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/verdict_json.h: a comparison of strategies as JSON. Private to this folder,
// because it includes nlohmann's header.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "core/plan/strategies/compare.h"

namespace ziggurat {

nlohmann::json json_of_lines(const std::vector<TimeLine>& lines);
nlohmann::json json_of_comparison(const Job& job, const Comparison& comparison);

}  // namespace ziggurat
