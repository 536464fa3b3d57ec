// SPDX-License-Identifier: Apache-2.0
// integrations/measure/table.h: writes a result for people, in lines of at most 100 columns.
#pragma once

#include <string>
#include <vector>

#include "integrations/measure/result.h"

namespace ziggurat::measure {

std::vector<std::string> table(const BenchResult& result);

/// "2.3 ms", "840 us".
std::string latency_text(double us);
/// Returns a text such as "blocks of 1.0 MiB, in flight 64 (read), 4 (write), 64 (mix)".
std::string depth_text(const SetResult& set);
/// Returns sentences on what the drive gives training, for the end of the table and the top of the
/// page.
std::vector<std::string> summary(const SetResult& set, const BenchResult& result);

}  // namespace ziggurat::measure
