// SPDX-License-Identifier: Apache-2.0
// integrations/measure/svg.h: the four plots of the page, as SVG text that is well-formed XML.
//
// Colours are classes of the page's style sheet, so that light and dark are its business.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "integrations/measure/result.h"

namespace ziggurat::measure {

/// & < > " made harmless.
std::string escaped(std::string_view text);

/// GB/s by tenths of a second, with the mean and the seconds' means.
std::string bandwidth_plot(const Row& row, double top_gb_per_s);
/// Share of transfers by latency, on a logarithmic axis, p50, p99 and p99.9 marked.
std::string latency_plot(const Row& row);
/// Ratio to fio, and both sides' CPU, a bar a row that has it. Empty without fio.
std::string fio_plot(const std::vector<Row>& rows);
/// Block size by depth, of "read", "write" or "mix".
std::string tune_plot(const TuneResult& tuned, std::string_view kind);

}  // namespace ziggurat::measure
