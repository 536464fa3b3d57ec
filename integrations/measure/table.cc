// SPDX-License-Identifier: Apache-2.0
// integrations/measure/table.cc: writes a line for each row, and below the rows what there is to
// say about them.
#include "integrations/measure/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/bytes.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kColumns = 100;
constexpr double kBelievableGain = 1.05;

std::string rate_text(const Row& row) {
  return refused(row.flags()) ? "refused" : fmt::format("{:.2f}", row.gb_per_s());
}

std::string flag_names(const Row& row) {
  std::vector<std::string> names;
  for (const Flag& flag : row.flags())
    names.push_back(fmt::format("{}{}", flag.refuses ? "REFUSED: " : "", to_string(flag.doubt)));
  return fmt::format("{}", fmt::join(names, " "));
}

std::string row_line(const Row& row) {
  const Measurement& median = row.median();
  const std::vector<double> seconds = median.per_second();
  const bool no = refused(row.flags());
  const auto second = [&](std::size_t i) {
    return seconds.empty() || no ? std::string("-") : fmt::format("{:.2f}", seconds[i]);
  };
  const auto number = [](const std::optional<double>& value, int digits) {
    return value ? fmt::format("{:.{}f}", *value, digits) : std::string("-");
  };
  const Latencies& latency = median.latency;
  return fmt::format(
      "{:<15} {:>7} {:>5} {:>5} {:>7} {:>7} {:>7} {:>6.4f} |{:>6} {:>6} {:>5} | ",
      to_string(row.workload), rate_text(row), second(0),
      second(seconds.empty() ? 0 : seconds.size() - 1), latency_text(latency.quantile_us(0.5)),
      latency_text(latency.quantile_us(0.99)), latency_text(latency.quantile_us(0.999)),
      row.cpu_s_per_gb(), number(row.fio_gb_per_s(), 2), number(row.fio_cpu_s_per_gb(), 4),
      no ? "-" : number(row.ratio(), 2));
}

/// Returns the name of a row for use in a sentence.
std::string in_words(Workload workload) {
  switch (workload) {
    case Workload::kReadBesideAdam: return "a stream of reads";
    case Workload::kWriteBesideAdam: return "a checkpoint's writes";
    case Workload::kPrefetchBesideAdam: return "prefetch";
    default: return to_string(workload);
  }
}

std::string deadline_text(const Row& row) {
  const Deadlines& d = *row.median().deadlines;
  const std::string wanted = fmt::format(
      "Of {} units of {} that were wanted at {:.2f} GB/s{}, ", d.units, format_bytes(d.unit_bytes),
      d.pace_gb_per_s, row.workload == Workload::kPrefetch ? "" : " while AdamW ran");
  if (d.missed == 0) return wanted + "none came late.";
  return wanted + fmt::format("{} came late, the worst by {}; that is {:.1f} % of the time lost.",
                              d.missed, latency_text(d.worst_late_s * 1e6),
                              100 * d.stalled_s / std::max(row.median().seconds, 1e-9));
}

/// Returns the last space up to `end` that is not between backticks, so that the name of a setting
/// is not broken.
std::size_t last_break(const std::string& text, std::size_t end) {
  end = text.rfind(' ', end);
  while (end != std::string::npos && end > 0 &&
         std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end), '`') % 2 == 1)
    end = text.rfind(' ', end - 1);
  return end;
}

/// Adds `text` in lines that are broken at spaces; later lines are indented.
void add_wrapped(std::vector<std::string>& lines, const std::string& text) {
  std::string rest = text;
  std::string indent;
  while (indent.size() + rest.size() > kColumns) {
    const std::size_t end = last_break(rest, kColumns - indent.size());
    if (end == std::string::npos || end == 0) break;
    lines.push_back(indent + rest.substr(0, end));
    rest = rest.substr(end + 1);
    indent = "  ";
  }
  lines.push_back(indent + rest);
}

void add_set(std::vector<std::string>& lines, const SetResult& set, const BenchResult& result) {
  lines.emplace_back();
  add_wrapped(lines, fmt::format("{} is on {} ({}), with a file of {}, {}; {} were written",
                                 set.label, set.drives.front().filesystem,
                                 set.drives.front().device, format_bytes(set.file_bytes),
                                 depth_text(set), format_bytes(set.written_bytes)));
  lines.push_back(fmt::format(
      "{:<15} {:>7} {:>5} {:>5} {:>7} {:>7} {:>7} {:>6} |{:>6} {:>6} {:>5} |", "", "GB/s", "first",
      "last", "p50", "p99", "p99.9", "CPU/GB", "fio", "CPU/GB", "ratio"));
  for (const Row& row : set.rows) {
    lines.push_back(row_line(row));
    const std::string names = flag_names(row);
    if (lines.back().size() + names.size() <= kColumns) {
      lines.back() += names;
    } else {
      lines.push_back(fmt::format("{:>{}}", names, kColumns));
    }
  }
  for (const std::string& line : summary(set, result)) add_wrapped(lines, line);
  std::set<std::string> said;
  for (const Row& row : set.rows) {
    for (const Flag& flag : row.flags()) {
      if (!said.insert(std::string(to_string(flag.doubt))).second) continue;
      add_wrapped(lines,
                  fmt::format("{} ({}{}): {}", to_string(flag.doubt),
                              flag.refuses ? "refused; " : "", to_string(row.workload), flag.text));
    }
  }
  add_wrapped(lines, "fio: " + set.fio_how);
}

}  // namespace

std::string latency_text(double us) {
  if (us < 1000) return fmt::format("{:.0f} us", us);
  if (us < 1e6) return fmt::format("{:.1f} ms", us / 1e3);
  return fmt::format("{:.1f} s", us / 1e6);
}

std::string depth_text(const SetResult& set) {
  std::string text = fmt::format("blocks of {}, in flight {} (read)", format_bytes(set.block_bytes),
                                 set.depth[IoMix::kRead].best);
  const std::uint32_t write = set.depth[IoMix::kWrite].best;
  if (write == 0) return text;
  return text + fmt::format(", {} (write), {} (mix)", write, set.depth[IoMix::kMix].best);
}

std::vector<std::string> summary(const SetResult& set, const BenchResult& result) {
  std::vector<std::string> lines;
  if (const std::optional<double> seconds = optimizer_seconds(set, result.model)) {
    lines.push_back(
        fmt::format("The optimizer state of a model of {} parameters takes {:.2f} s of each step "
                    "on this drive, which reads 12 bytes per parameter and writes 12, at the "
                    "{:.2f} GB/s of sweep + Adam.",
                    result.model.name, *seconds, set.find(Workload::kSweepAdam)->gb_per_s()));
  }
  const Row* const plain = set.find(Workload::kSweep);
  const Row* const adam = set.find(Workload::kSweepAdam);
  if (optimizer_seconds(set, result.model) && plain != nullptr && plain->gb_per_s() > 0) {
    lines.push_back(fmt::format(
        "With AdamW and both checksums the sweep keeps {:.0f} % of its speed without them.",
        100 * adam->gb_per_s() / plain->gb_per_s()));
  }
  for (const Row& row : set.rows) {
    if (row.median().deadlines && !refused(row.flags())) lines.push_back(deadline_text(row));
  }
  const double alone = median_of(set.adam_alone_gb_per_s);
  for (const Row& row : set.rows) {
    std::vector<double> beside;
    for (const Measurement& round : row.rounds) {
      if (round.adam_gb_per_s) beside.push_back(*round.adam_gb_per_s);
    }
    if (beside.empty() || refused(row.flags()) || alone <= 0) continue;
    // If AdamW is faster beside a load than alone, others used the machine. The line then says
    // that, instead of praising the drive.
    const double share = median_of(beside) / alone;
    lines.push_back(
        share <= kBelievableGain
            ? fmt::format("AdamW in memory keeps {:.0f} % of its {:.1f} GB/s beside {}.",
                          100 * share, alone, in_words(row.workload))
            : fmt::format("AdamW in memory ran at {:.1f} GB/s beside {} and at {:.1f} alone, "
                          "because others used this machine meanwhile.",
                          median_of(beside), in_words(row.workload), alone));
  }
  return lines;
}

std::vector<std::string> table(const BenchResult& result) {
  std::vector<std::string> lines;
  add_wrapped(lines,
              fmt::format("the benchmark ran on {} and Linux {} with {} workers and buffers on {}; "
                          "each row took {} s, and figures are medians of {} round{}",
                          result.cpu_model, result.kernel, result.workers, result.buffer_pages,
                          result.seconds_per_row, result.rounds, result.rounds == 1 ? "" : "s"));
  add_wrapped(
      lines,
      "GB is 1e9 bytes of reads and writes together. CPU/GB is the user and system time of all "
      "threads in seconds, without stamping what is written and without optimizer jobs; for fio it "
      "is usr_cpu + sys_cpu. Latency is that of one transfer (in a sweep, of one record).");
  for (const SetResult& set : result.sets) add_set(lines, set, result);
  return lines;
}

}  // namespace ziggurat::measure
