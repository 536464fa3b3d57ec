// SPDX-License-Identifier: Apache-2.0
// integrations/measure/svg.h: the four plots of the page, as SVG text that is well-formed XML.
//
// Colours are classes of the page's style sheet, which decides between light and dark.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "integrations/measure/result.h"

namespace ziggurat::measure {

/// Returns the text with & < > and " escaped.
std::string escaped(std::string_view text);

/// Draws GB/s by tenths of a second, with the mean.
std::string bandwidth_plot(const Row& row, double top_gb_per_s);
/// Draws the share of transfers by latency on a logarithmic axis, with p50, p99 and p99.9 marked.
std::string latency_plot(const Row& row);
/// Draws a bar for each row that was compared with fio, with the ratio and the CPU of both. Empty
/// without fio.
std::string fio_plot(const std::vector<Row>& rows);
/// Draws the speed by block size and depth for "read", "write" or "mix".
std::string tune_plot(const TuneResult& tuned, std::string_view kind);

}  // namespace ziggurat::measure
