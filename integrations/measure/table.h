// SPDX-License-Identifier: Apache-2.0
// integrations/measure/table.h: a result for people: lines of at most 100 columns.
#pragma once

#include <string>
#include <vector>

#include "integrations/measure/result.h"

namespace ziggurat::measure {

std::vector<std::string> table(const BenchResult& result);

/// "2.3 ms", "840 us".
std::string latency_text(double us);
/// "blocks of 1.0 MiB, in flight 64 (read), 4 (write), 64 (mix)".
std::string depth_text(const SetResult& set);
/// What the drive gives training, in sentences: for the end of the table and the top of the page.
std::vector<std::string> summary(const SetResult& set, const BenchResult& result);

}  // namespace ziggurat::measure
