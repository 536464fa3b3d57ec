// SPDX-License-Identifier: Apache-2.0
// integrations/measure/html_report.h: makes the page of --report. It is one file that fetches
// nothing, runs no script, and is light or dark like the reader's system. It is well-formed XML, so
// that tests can parse it.
#pragma once

#include <string>

#include "integrations/measure/result.h"

namespace ziggurat::measure {

std::string html_report(const BenchResult& result);

}  // namespace ziggurat::measure
