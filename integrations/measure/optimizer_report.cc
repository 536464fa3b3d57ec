// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_report.cc: writes the rows of `bench optimizer` as a table and as
// JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "integrations/measure/optimizer_ceiling.h"
#include "integrations/measure/optimizer_suite.h"

namespace ziggurat::measure {

std::vector<std::string> optimizer_table(const OptimizerBenchResult& result) {
  std::vector<std::string> lines;
  lines.push_back(fmt::format(
      "{} updates {} M parameters, with bf16 gradients and parameters, in {}; figures are medians "
      "of {} rounds",
      to_string(result.optimizer), result.params / 1'000'000, result.page_kind, result.rounds));
  lines.push_back(fmt::format("{:<14} {:>8} {:>8} {:>10} {:>7} {:>10} {:>7} {:>8} {:>6} {:>6}",
                              "format", "B/param", "B moved", "ISA", "threads", "Mparam/s", "GB/s",
                              "ceiling", "share", "best"));
  for (const OptimizerRow& row : result.rows) {
    lines.push_back(
        fmt::format("{:<14} {:>8.4g} {:>8.4g} {:>10} {:>7} {:>10.0f} {:>7.2f} {:>8.2f} {:>6.2f} "
                    "{:>6.2f}",
                    to_string(row.format), row.record_bytes, row.moved_bytes, row.target,
                    row.threads, row.params_per_s(result.params) / 1e6, row.gb_per_s(result.params),
                    row.ceiling_gb_per_s(result.params), row.share(), row.best_share()));
  }
  lines.push_back(fmt::format(
      "ceiling is the fastest of {} passes over the same bytes in the same streams, in the best of "
      "all rounds; best is the share that the kernel's fastest round reached",
      kCeilingWalks.size()));
  return lines;
}

std::string optimizer_json(const OptimizerBenchResult& result) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const OptimizerRow& row : result.rows) {
    rows.push_back({{"format", to_string(row.format)},
                    {"isa", row.target},
                    {"threads", row.threads},
                    {"record_bytes_per_param", row.record_bytes},
                    {"moved_bytes_per_param", row.moved_bytes},
                    {"params_per_s", row.params_per_s(result.params)},
                    {"gb_per_s", row.gb_per_s(result.params)},
                    {"ceiling_gb_per_s", row.ceiling_gb_per_s(result.params)},
                    {"share_of_ceiling", row.share()},
                    {"best_share_of_ceiling", row.best_share()},
                    {"seconds", row.seconds},
                    {"ceiling_seconds", row.ceiling_seconds}});
  }
  const nlohmann::ordered_json all = {{"optimizer", to_string(result.optimizer)},
                                      {"params", result.params},
                                      {"rounds", result.rounds},
                                      {"pages", result.page_kind},
                                      {"gradient", "bf16"},
                                      {"parameter", "bf16"},
                                      {"rows", rows}};
  return all.dump(1) + "\n";
}

}  // namespace ziggurat::measure
