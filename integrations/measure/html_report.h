// SPDX-License-Identifier: Apache-2.0
// integrations/measure/html_report.h: the page of --report: one file, nothing fetched, nothing
// scripted, light or dark as the reader's system is. Well-formed XML, so that tests can parse it.
#pragma once

#include <string>

#include "integrations/measure/result.h"

namespace ziggurat::measure {

std::string html_report(const BenchResult& result);

}  // namespace ziggurat::measure
