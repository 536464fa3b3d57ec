// SPDX-License-Identifier: Apache-2.0
// integrations/measure/html_report.cc: writes what the figures mean, then the figures, then the
// plots.
#include "integrations/measure/html_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/bytes.h"
#include "integrations/measure/svg.h"
#include "integrations/measure/table.h"

namespace ziggurat::measure {
namespace {

// Braces are not doubled, because this is not a format string.
constexpr std::string_view kStyle = R"css(
:root { --page: #ffffff; --panel: #f6f8fa; --ink: #16191d; --muted: #525c68; --grid: #dce1e7;
  --accent: #1f6cb5; --strong: #0d3d6e; --mark: #b3261e; --refused: #a1160d;
  --heat0: #eef4fa; --heat1: #cfe1f2; --heat2: #9dc3e3; --heat3: #4f8fc4; --heat4: #1d5c99;
  --on-heat: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --panel: #1c2127; --ink: #e8ebef; --muted: #a4afbb; --grid: #343c46;
    --accent: #66aee8; --strong: #b5d8f5; --mark: #ff8a80; --refused: #ff8a80;
    --heat0: #1f2a35; --heat1: #24405a; --heat2: #2c5f8a; --heat3: #5a9fd4; --heat4: #9fd0f5;
    --on-heat: #0b1117; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1080px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 4px; } .muted, .about { color: var(--muted); }
.about { font-weight: normal; }
.says { background: var(--panel); border-left: 4px solid var(--accent); padding: 10px 16px; }
.says p { margin: 4px 0; } .scroll { margin-top: 16px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
@media (max-width: 760px) { .pair { grid-template-columns: 1fr; } }
svg { width: 100%; height: auto; background: var(--panel); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th:first-child, td:first-child, td:last-child, th:last-child { text-align: left; }
td:last-child { white-space: normal; } th { color: var(--muted); font-weight: 600; }
.refused { color: var(--refused); font-weight: 600; }
.grid { stroke: var(--grid); stroke-width: 1; }
.tick, .axis { fill: var(--muted); font-size: 11px; } .label { fill: var(--ink); font-size: 13px; }
.note { fill: var(--ink); font-size: 11px; } .on-heat { fill: var(--on-heat); font-size: 11px; }
.curve { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
.mean { stroke: var(--strong); stroke-width: 1.5; stroke-dasharray: 5 4; }
.mark { stroke: var(--mark); stroke-width: 1.5; } .dashed { stroke-dasharray: 5 3; }
.dotted { stroke-dasharray: 1.5 3; } .bar { fill: var(--accent); }
.heat0 { fill: var(--heat0); } .heat1 { fill: var(--heat1); } .heat2 { fill: var(--heat2); }
.heat3 { fill: var(--heat3); } .heat4 { fill: var(--heat4); }
)css";

std::string cell(const std::string& text) { return "<td>" + escaped(text) + "</td>"; }

std::string number(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "–";
}

std::string table_row(const Row& row) {
  const Measurement& median = row.median();
  const std::vector<double> seconds = median.per_second();
  const bool no = refused(row.flags());
  std::string out = "<tr>" + cell(to_string(row.workload));
  out += no ? "<td class=\"refused\">refused</td>" : cell(fmt::format("{:.2f}", row.gb_per_s()));
  out += cell(seconds.empty() || no ? "–" : fmt::format("{:.2f}", seconds.front()));
  out += cell(seconds.empty() || no ? "–" : fmt::format("{:.2f}", seconds.back()));
  for (const double quantile : {0.5, 0.99, 0.999})
    out += cell(latency_text(median.latency.quantile_us(quantile)));
  out += cell(fmt::format("{:.4f}", row.cpu_s_per_gb()));
  out += cell(number(row.fio_gb_per_s(), 2)) + cell(number(row.fio_cpu_s_per_gb(), 4));
  out += cell(no ? "–" : number(row.ratio(), 2));
  std::vector<std::string> names;
  for (const Flag& flag : row.flags()) names.emplace_back(to_string(flag.doubt));
  return out + cell(fmt::format("{}", fmt::join(names, ", "))) + "</tr>\n";
}

std::string figures(const SetResult& set) {
  std::string out =
      "<div class=\"scroll\"><table class=\"figures\"><thead><tr><th>workload</th><th>GB/s</th>"
      "<th>first s</th><th>last s</th><th>p50</th><th>p99</th><th>p99.9</th><th>CPU s/GB</th>"
      "<th>fio GB/s</th><th>fio CPU</th><th>ratio</th><th>doubts</th></tr></thead><tbody>\n";
  for (const Row& row : set.rows) out += table_row(row);
  return out + "</tbody></table></div>\n";
}

std::string doubts(const SetResult& set) {
  std::string out;
  for (const Row& row : set.rows) {
    for (const Flag& flag : row.flags()) {
      out += fmt::format("<li{}>{}: {}: {}</li>\n", flag.refuses ? " class=\"refused\"" : "",
                         escaped(to_string(row.workload)), escaped(to_string(flag.doubt)),
                         escaped(flag.text));
    }
  }
  return out.empty() ? "" : "<h3>Doubts</h3>\n<ul class=\"doubts\">\n" + out + "</ul>\n";
}

std::string plots(const SetResult& set) {
  double top = 0;
  for (const Row& row : set.rows) {
    for (const double gb : row.median().gb_per_tenth) top = std::max(top, gb * 10);
  }
  std::string out =
      "<h2>Bandwidth over time, and latency</h2>\n"
      "<p class=\"muted\">The median round of each row. Dashed: its mean.</p>\n";
  for (const Row& row : set.rows) {
    // A curve convinces a reader in spite of the doubts beside it.
    if (refused(row.flags())) continue;
    out += fmt::format(
        "<h3>{}: {:.2f} GB/s <span class=\"about\">{}</span></h3>\n<div class=\"pair\">\n",
        escaped(to_string(row.workload)), row.gb_per_s(), escaped(about(row.workload)));
    out += bandwidth_plot(row, top) + latency_plot(row) + "</div>\n";
  }
  return out;
}

std::string tuning(const SetResult& set) {
  if (!set.tune) return "";
  std::string out = "<h2>Block size and depth</h2>\n<div class=\"pair\">\n";
  for (const char* kind : {"read", "write", "mix"}) out += tune_plot(*set.tune, kind);
  out += "</div>\n";
  const TuneChoice& best = set.tune->mix.depth > 0 ? set.tune->mix : set.tune->read;
  return out + fmt::format(
                   "<p>Chosen: {} transfers of {} in flight: the fewest bytes within 2 % of "
                   "the best, when the finalists ran again.</p>\n",
                   best.depth, format_bytes(best.block_bytes));
}

std::string against_fio(const SetResult& set) {
  const std::string plot = fio_plot(set.rows);
  return fmt::format("<h2>Against fio</h2>\n<p class=\"muted\">{}</p>\n{}", escaped(set.fio_how),
                     plot);
}

std::string one_set(const SetResult& set, const BenchResult& result) {
  std::string out = fmt::format("<section>\n<h2>{}</h2>\n", escaped(set.label));
  out += fmt::format(
      "<p class=\"muted\">{} on {}{}, a file of {}, {}, {}; "
      "{} were written</p>\n<div class=\"says\">\n",
      escaped(set.drives.front().filesystem), escaped(set.drives.front().device),
      set.drives.front().model.empty() ? ""
                                       : fmt::format(" ({})", escaped(set.drives.front().model)),
      format_bytes(set.file_bytes), escaped(depth_text(set)), escaped(set.engines.front()),
      format_bytes(set.written_bytes));
  for (const std::string& sentence : summary(set, result))
    out += fmt::format("<p>{}</p>\n", escaped(sentence));
  out += "</div>\n" + figures(set) + doubts(set) + against_fio(set) + tuning(set) + plots(set);
  return out + "</section>\n";
}

}  // namespace

std::string html_report(const BenchResult& result) {
  std::string out =
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n"
      "<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<meta name=\"color-scheme\" content=\"light dark\"/>\n"
      "<title>What this drive gives training</title>\n<style>";
  out += kStyle;
  out += "</style>\n</head>\n<body>\n<h1>What this drive gives training</h1>\n";
  out += fmt::format(
      "<p class=\"muted\">{}; {}, Linux {}, {} workers, buffers on {}; rows of {} s, "
      "median of {} round{}; GB is 1e9 bytes, reads and writes together</p>\n",
      escaped(result.started_at), escaped(result.cpu_model), escaped(result.kernel), result.workers,
      escaped(result.buffer_pages), result.seconds_per_row, result.rounds,
      result.rounds == 1 ? "" : "s");
  for (const SetResult& set : result.sets) out += one_set(set, result);
  return out + "</body>\n</html>\n";
}

}  // namespace ziggurat::measure
