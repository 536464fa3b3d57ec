// SPDX-License-Identifier: Apache-2.0
// integrations/cli/report.cc: calculates the inputs of the bound, and lays out the table.
#include "integrations/cli/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/bytes.h"

namespace ziggurat::cli {
namespace {

double rate(std::uint64_t size_bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(size_bytes) / seconds : 0;
}

std::string account_line(const char* tier, const Account& account) {
  std::string held;
  for (std::size_t i = 0; i < static_cast<std::size_t>(Purpose::kCount); ++i) {
    const auto purpose = static_cast<Purpose>(i);
    if (account.peak_bytes(purpose) == 0) continue;
    held += fmt::format("{}{} {}", held.empty() ? "" : ", ", to_string(purpose),
                        format_bytes(account.peak_bytes(purpose)));
  }
  return fmt::format("  {:<8} {:>11} {:>11}   {}", tier, format_bytes(account.capacity_bytes()),
                     format_bytes(account.peak_bytes()), held);
}

std::string link_line(const char* link, std::uint64_t total, std::size_t steps, double busy_s) {
  const std::string speed =
      busy_s > 0 ? fmt::format("{:.2f} GB/s while busy", rate(total, busy_s) / 1e9) : "";
  return fmt::format("  {:<16} {:>11} {:>11}   {}", link, format_bytes(total),
                     format_bytes(steps > 0 ? total / steps : 0), speed);
}

std::string part_line(const std::string& part, double seconds, double wall_s,
                      const std::string& note = "") {
  return fmt::format("  {:<16} {:>9.4f} s {:>9.1f} %   {}", part, seconds,
                     wall_s > 0 ? 100 * seconds / wall_s : 0, note);
}

void add_split(std::vector<std::string>& lines, const RunReport& report) {
  const StepLog::Steady& steady = report.steady;
  const StepSplit& split = steady.split;
  lines.push_back(fmt::format("a step (mean of {})      time      share", steady.steps));
  lines.push_back(part_line("data", split.data_s, steady.wall_s));
  lines.push_back(part_line("forward", split.forward_s, steady.wall_s));
  lines.push_back(part_line("backward", split.backward_s, steady.wall_s));
  lines.push_back(part_line(
      "optimizer", split.optimizer_s, steady.wall_s,
      fmt::format("the optimizer's jobs took {:.4f} s of processor time beside the passes",
                  steady.counters.seconds(Counter::kOptimizerCpuNs))));
  for (std::size_t i = 0; i < kWaits; ++i) {
    const auto wait = static_cast<Wait>(i);
    if (wait == Wait::kRanks && report.facts.ranks.empty()) continue;
    lines.push_back(
        part_line(fmt::format("waiting: {}", to_string(wait)), split.wait_s[i], steady.wall_s,
                  "for " + link_of(wait, report.facts.placement, !report.facts.ranks.empty())));
  }
  lines.push_back(part_line("other", split.other_s, steady.wall_s));
  lines.push_back(part_line("in all", steady.wall_s, steady.wall_s));
}

/// Adds a line on the bytes that the optimizer's state moved over NVMe, to compare with what its
/// format promises.
void add_state(std::vector<std::string>& lines, const RunReport& report) {
  const CounterSnapshot& totals = report.totals;
  if (totals[Counter::kStateWriteBytes] == 0 || report.steps == 0) return;
  const double updates =
      static_cast<double>(report.facts.parameters) * static_cast<double>(report.steps);
  lines.push_back(
      fmt::format("state over NVMe: each step read {:.2f} and wrote {:.2f} bytes per parameter; {}",
                  static_cast<double>(totals[Counter::kStateReadBytes]) / updates,
                  static_cast<double>(totals[Counter::kStateWriteBytes]) / updates,
                  to_string(report.facts.state)));
}

/// Adds lines on records that were not read and on bytes that were moved in vain, if there were
/// any.
void add_saved(std::vector<std::string>& lines, const RunReport& report) {
  const CounterSnapshot& totals = report.totals;
  if (totals[Counter::kRecordCacheHits] > 0)
    lines.push_back(link_line("not read", totals[Counter::kRecordCacheHitBytes], report.steps, 0) +
                    "records were kept in host memory");
  if (const std::uint64_t again = totals[Counter::kStateReadAgainBytes]; again > 0)
    lines.push_back(link_line("read again", again, report.steps, 0) +
                    "the memory of these records was needed sooner by others");
  if (totals[Counter::kSpeculations] > 0)
    lines.push_back(
        fmt::format("{} of {} steps were updated before the norm was known; {} of them were made "
                    "again, and {} were moved in vain",
                    totals[Counter::kSpeculations], report.steps + report.skipped,
                    totals[Counter::kSpeculationsRedone],
                    format_bytes(totals[Counter::kSpeculationWasteBytes])));
  const std::uint64_t leases = totals[Counter::kLeasesOnNode] + totals[Counter::kLeasesElsewhere];
  const std::uint64_t jobs = totals[Counter::kJobsOnNode] + totals[Counter::kJobsElsewhere];
  if (leases + jobs > 0)
    lines.push_back(
        fmt::format("{} of {} leases and {} of {} jobs were on the NUMA node of their chunk",
                    totals[Counter::kLeasesOnNode], leases, totals[Counter::kJobsOnNode], jobs));
  if (const std::uint64_t checkpoints = totals[Counter::kCheckpoints]; checkpoints > 0)
    lines.push_back(fmt::format(
        "{} checkpoints of state in memory took {:.2f} s each, beside training", checkpoints,
        static_cast<double>(totals[Counter::kCheckpointNs]) * 1e-9 /
            static_cast<double>(checkpoints)));
  if (report.facts.loss_scale)
    lines.push_back(
        fmt::format("the loss scale is {}; {} of {} attempts at a step overflowed and were skipped",
                    *report.facts.loss_scale, report.skipped, report.steps + report.skipped));
}

/// Returns a text that says what the bound was calculated from.
std::string basis(const RunReport& report) {
  std::string text =
      fmt::format("each part of compute at its best of {} steps", report.steady.steps);
  if (report.bound.nvme_s == 0) return text;
  const double profiled = report.facts.profiled_nvme_bytes_per_s;
  if (profiled > 0 && profiled >= report.steady.nvme_bytes_per_s)
    return text + " and the speed of the drive in the machine profile";
  text += " and the speed of the drive in its best step";
  return text + (profiled > 0
                     ? fmt::format(" (the machine profile has less, {:.2f} GB/s)", profiled / 1e9)
                     : " (the machine profile does not have it; `ziggurat bench io` measures it)");
}

/// Adds lines on what the ranks sent and whom they waited for, if there are several ranks.
void add_ranks(std::vector<std::string>& lines, const RunReport& report) {
  const RunFacts& facts = report.facts;
  if (facts.ranks.empty()) return;
  const std::size_t steps = std::max<std::size_t>(1, report.steps);
  const RankFigures& first = facts.ranks.front();
  lines.push_back(fmt::format(
      "{} ranks in ZeRO stage {} exchanged gradients in {}{}; a step of rank 0 sent {} within its "
      "host{}",
      facts.ranks.size(), facts.zero_stage,
      facts.quantization.gradients() ? fmt::format("{} bits", facts.quantization.gradient_bits)
                                     : std::string(to_string(facts.reduce_dtype)),
      facts.quantization.weights ? " and parameters in 8 bits" : "",
      format_bytes(first.sent_here_bytes / steps),
      first.sent_away_bytes > 0
          ? fmt::format(" and {} to other hosts", format_bytes(first.sent_away_bytes / steps))
          : ""));
  std::string waited;
  for (std::size_t rank = 0; rank < facts.waited_for_s.size(); ++rank) {
    const std::string one = fmt::format("rank {} {:.2f} s", rank, facts.waited_for_s[rank]);
    constexpr std::size_t kLineMax = 76;
    if (!waited.empty() && waited.size() + one.size() > kLineMax) {
      lines.push_back("  waited for " + waited);
      waited.clear();
    }
    waited += (waited.empty() ? "" : ", ") + one;
  }
  lines.push_back("  waited for " + waited + " (the longest time of any rank)");
}

}  // namespace

std::string link_of(Wait wait, const Placement& placement, bool several_ranks) {
  switch (wait) {
    case Wait::kParams:
      return placement.params == Tier::kNvme ? "NVMe, then host to device" : "host to device";
    case Wait::kSweep:
      return placement.optimizer == Tier::kNvme ? "NVMe (records of the sweep)"
                                                : "the workers (the sweep)";
    case Wait::kGrads:
      return fmt::format("device to host{}{}", several_ranks ? ", between ranks" : "",
                         placement.grads == Tier::kNvme ? ", then NVMe" : "");
    case Wait::kRanks: return "other ranks";
    default: return "NVMe (the previous generation)";
  }
}

StepWork step_work(const RunFacts& facts, const StepLog::Steady& steady) {
  // The bytes of all parameters, which are also the bytes of all gradients.
  const std::uint64_t values_bytes = size_bytes(facts.dtype) * facts.parameters;
  const StateTraffic traffic = state_traffic(facts.state, facts.placement.params != Tier::kNvme);
  double sweep = facts.placement.optimizer == Tier::kNvme
                     ? (traffic.read + traffic.written) * static_cast<double>(facts.parameters)
                     : 0;
  double forward = 0;
  double backward = 0;
  if (facts.placement.params == Tier::kNvme) {
    forward += static_cast<double>(values_bytes);
    backward += static_cast<double>(values_bytes);
    sweep += static_cast<double>(values_bytes);
  }
  if (facts.placement.grads == Tier::kNvme) {
    backward += static_cast<double>(values_bytes);
    sweep += static_cast<double>(values_bytes);
  }
  // Divides the bytes that were really moved in the planned proportions. These bytes include
  // padding and tables, but not units that stayed between passes.
  const auto moved = static_cast<double>(steady.counters[Counter::kNvmeReadBytes] +
                                         steady.counters[Counter::kNvmeWriteBytes]);
  const double planned = sweep + forward + backward;
  const double scale = planned > 0 ? moved / planned : 0;

  StepWork work;
  work.forward_s = steady.best.forward_s;
  work.backward_s = steady.best.backward_s;
  work.other_s = steady.best.data_s + steady.best.optimizer_s;
  work.sweep_nvme_bytes = static_cast<std::uint64_t>(sweep * scale);
  work.forward_nvme_bytes = static_cast<std::uint64_t>(forward * scale);
  work.backward_nvme_bytes = static_cast<std::uint64_t>(backward * scale);
  work.host_to_device_bytes = steady.counters[Counter::kHostToDeviceBytes];
  work.device_to_host_bytes = steady.counters[Counter::kDeviceToHostBytes];
  work.sweep_waits_for_norm = true;
  // For each lease one record is read before the norm is known, and another record, once written,
  // may trail into the next backward pass. A kept record is only written.
  work.leased_bytes = 2 * facts.read_ahead_bytes + facts.kept_record_bytes;
  return work;
}

RunReport make_report(const RunFacts& facts, const StepLog& log, const CounterSnapshot& totals) {
  RunReport report;
  report.facts = facts;
  report.steps = log.steps();
  report.skipped = log.skipped();
  if (!log.newest().empty()) report.first_step = log.newest().back().step + 1 - log.steps();
  report.wall_s = log.wall_s();
  report.tokens_per_s = rate(facts.tokens_per_step * log.steps(), log.wall_s());
  report.mean_loss_last_10 = log.mean_loss(10);
  report.totals = totals;
  report.steady = log.steady();
  report.bound_nvme_bytes_per_s =
      std::max(report.steady.nvme_bytes_per_s, facts.profiled_nvme_bytes_per_s);
  const LinkSpeeds links{.nvme = report.bound_nvme_bytes_per_s};
  StepWork work = step_work(facts, report.steady);
  const StepBound waiting = step_bound(work, links);
  work.sweep_waits_for_norm = false;
  const StepBound speculating = step_bound(work, links);
  const double share = report.steady.speculated;
  report.bound = share > 0.5 ? speculating : waiting;
  report.bound.seconds = share * speculating.seconds + (1 - share) * waiting.seconds;
  if (report.steady.wall_s > 0) report.share = report.bound.seconds / report.steady.wall_s;
  return report;
}

std::vector<std::string> table(const RunReport& report) {
  std::vector<std::string> lines;
  lines.emplace_back("tier          budget        peak   largest by purpose");
  lines.push_back(account_line("device", report.facts.device));
  lines.push_back(account_line("host", report.facts.host));
  lines.push_back(fmt::format("  {:<8} {:>11} {:>11}   files of the store", "nvme", "",
                              format_bytes(report.facts.store_bytes)));
  const CounterSnapshot& totals = report.totals;
  lines.emplace_back("link               the run   each step   bandwidth");
  lines.push_back(link_line("NVMe read", totals[Counter::kNvmeReadBytes], report.steps,
                            totals.seconds(Counter::kNvmeReadBusyNs)));
  lines.push_back(link_line("NVMe write", totals[Counter::kNvmeWriteBytes], report.steps,
                            totals.seconds(Counter::kNvmeWriteBusyNs)));
  lines.push_back(
      link_line("host to device", totals[Counter::kHostToDeviceBytes], report.steps, 0));
  lines.push_back(
      link_line("device to host", totals[Counter::kDeviceToHostBytes], report.steps, 0));
  add_state(lines, report);
  add_saved(lines, report);
  add_ranks(lines, report);
  add_split(lines, report);
  const StepBound& bound = report.bound;
  lines.push_back(
      fmt::format("the least a step can take is {:.4f} s (compute {:.4f} s; NVMe {:.4f} s at "
                  "{:.2f} GB/s, of which backward hides {:.4f} s)",
                  bound.seconds, bound.compute_s, bound.nvme_s, report.bound_nvme_bytes_per_s / 1e9,
                  bound.hidden_in_backward_s));
  lines.push_back("  this limit follows from " + basis(report));
  lines.push_back(fmt::format("the run reached {:.2f} of this limit; binding limit: {}",
                              report.share, to_string(bound.limit)));
  lines.push_back(fmt::format(
      "{} steps took {:.1f} s, {:.0f} tokens/s; the mean loss of the last {} is {:.4f}{}",
      report.steps, report.wall_s, report.tokens_per_s, std::min<std::size_t>(10, report.steps),
      report.mean_loss_last_10,
      report.held_out_loss ? fmt::format("; held-out loss {:.4f}", *report.held_out_loss) : ""));
  return lines;
}

RankFigures rank_figures(const StepLog::Steady& steady, const CounterSnapshot& totals) {
  const double ranks_s = steady.split.wait_s[static_cast<std::size_t>(Wait::kRanks)];
  return {.step_s = steady.wall_s,
          .compute_s = steady.split.forward_s + steady.split.backward_s,
          .waited_ranks_s = ranks_s,
          .waited_tiers_s = steady.split.waiting_s() - ranks_s,
          .nvme_read_bytes = totals[Counter::kNvmeReadBytes],
          .nvme_write_bytes = totals[Counter::kNvmeWriteBytes]};
}

std::vector<std::string> rank_table(const RunReport& report) {
  const RunFacts& facts = report.facts;
  std::vector<std::string> lines{
      "rank  a step of  compute  waited: ranks   tiers  sent: here       away  device     host  "
      "waited for"};
  const std::size_t steps = std::max<std::size_t>(1, report.steps);
  for (std::size_t rank = 0; rank < facts.ranks.size(); ++rank) {
    const RankFigures& its = facts.ranks[rank];
    lines.push_back(fmt::format(
        "{:>4} {:>8.4f} s {:>8.4f} {:>14.4f} {:>7.4f} {:>11} {:>10} {:>9} {:>9} {:>8.2f} s", rank,
        its.step_s, its.compute_s, its.waited_ranks_s, its.waited_tiers_s,
        format_bytes(its.sent_here_bytes / steps), format_bytes(its.sent_away_bytes / steps),
        format_bytes(its.device_peak_bytes), format_bytes(its.host_peak_bytes),
        facts.waited_for_s[rank]));
  }
  return lines;
}

}  // namespace ziggurat::cli
