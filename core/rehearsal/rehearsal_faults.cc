// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsal_faults.cc: draws faults, and plays a run with them and one after it.
#include "core/rehearsal/rehearsal_faults.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "core/rehearsal/rehearsed_rank.h"

namespace ziggurat {
namespace {

/// What time cannot change. Reads can be more: what was read ahead gives way to what is needed.
constexpr Counter kUpdates[] = {Counter::kStateWriteBytes, Counter::kOptimizerBytes};

/// Draws one thing after the other, in an order that never changes.
class Draw {
 public:
  Draw(std::uint64_t seed, const FaultTargets& targets) : targets_(targets), random_(seed) {}

  RehearsalFaults faults() {
    RehearsalFaults all;
    all.order = 1 + below(std::uint64_t{1} << 62);
    for (std::uint64_t n = below(4); n > 0; --n) slow_drive(all);
    for (std::uint64_t n = below(3); n > 0; --n)
      all.slow_ranks.push_back({.rank = rank(),
                                .step = static_cast<int>(below(steps())),
                                .factor = 1.5 + static_cast<double>(below(20))});
    for (std::uint64_t n = targets_.messages > 0 ? below(4) : 0; n > 0; --n)
      all.late_messages.push_back(
          {.rank = rank(), .number = below(targets_.messages), .delay = delay()});
    switch (below(8)) {
      case 0:
      case 1: failing_drive(all); break;
      case 2:
        all.disk_bytes = 1 + below(targets_.disk_bytes);
        all.may_fail = true;
        break;
      case 3:
      case 4:
        all.power_cut_events = 1 + below(targets_.disk_events);
        all.may_fail = true;
        break;
      default: break;
    }
    return all;
  }

 private:
  std::uint64_t below(std::uint64_t count) { return random_() % std::max<std::uint64_t>(count, 1); }
  int rank() { return static_cast<int>(below(static_cast<std::uint64_t>(targets_.ranks))); }
  std::uint64_t steps() const { return static_cast<std::uint64_t>(targets_.steps); }
  /// From 10 us to 1 s, each power of ten as likely.
  Nanoseconds delay() {
    std::int64_t most = 100'000;
    for (std::uint64_t n = below(5); n > 0; --n) most *= 10;
    return Nanoseconds(most / 10 +
                       static_cast<std::int64_t>(below(static_cast<std::uint64_t>(most))));
  }
  FaultPoint point() {
    constexpr FaultPoint kPoints[] = {FaultPoint::kRead, FaultPoint::kWrite, FaultPoint::kSync};
    return kPoints[below(3)];
  }
  std::uint64_t call_of(FaultPoint at) {
    if (at == FaultPoint::kSync) return below(targets_.syncs);
    return below(at == FaultPoint::kRead ? targets_.reads : targets_.writes);
  }
  static const char* name(FaultPoint at) {
    if (at == FaultPoint::kSync) return "sync";
    return at == FaultPoint::kRead ? "read" : "write";
  }

  void slow_drive(RehearsalFaults& all) {
    const FaultPoint at = point();
    const Nanoseconds longer = delay();
    const std::uint64_t call = call_of(at);
    Fault fault = Fault::slow(at, longer).at(call).from_then_on();
    fault.times = 1 + below(50);
    const int of = rank();
    all.drives.push_back({of, fault,
                          fmt::format("rank {}: {} {}s from the {}th on take {} us longer", of,
                                      fault.times, name(at), call, longer.count() / 1000)});
  }

  void failing_drive(RehearsalFaults& all) {
    const FaultPoint at = point();
    const std::uint64_t call = call_of(at);
    const int of = rank();
    const int number = at == FaultPoint::kWrite && below(2) == 0 ? ENOSPC : EIO;
    Fault fault = Fault::fail(at, number).at(call);
    if (below(2) == 0) fault = fault.from_then_on();
    all.drives.push_back(
        {of, fault,
         fmt::format("rank {}: the {}th {}{} fails with {}", of, call, name(at),
                     fault.persistent ? " and all after it" : "", errno_text(number))});
    all.may_fail = true;
  }

  const FaultTargets& targets_;
  std::mt19937_64 random_;
};

std::uint64_t newest_sealing(const RehearsalWatch::Rank& rank) {
  return rank.sealing.empty() ? 0 : rank.sealing.back();
}

/// Returns the newest generation that was durable on all ranks when the run ended. No rank seals a
/// generation before the one before it is durable on every rank.
std::uint64_t surely_durable(const RehearsalWatch& watch) {
  std::uint64_t durable = 0;
  for (const RehearsalWatch::Rank& rank : watch.ranks) {
    const std::size_t count = rank.sealing.size();
    const std::uint64_t before = count < 2 ? 0 : rank.sealing[count - 2];
    durable = std::max(durable, rank.all_durable ? newest_sealing(rank) : before);
  }
  return durable;
}

std::uint64_t perhaps_durable(const RehearsalWatch& watch) {
  std::uint64_t durable = 0;
  for (const RehearsalWatch::Rank& rank : watch.ranks)
    durable = std::max(durable, newest_sealing(rank));
  return durable;
}

void take(FaultReport& report, const RehearsalWatch& watch, const char* when) {
  for (const std::string& text : watch.broken) report.broken.push_back(when + text);
  for (const std::string& text : watch.ledger.conflicts()) report.broken.push_back(when + text);
}

/// Opens the engines on what a run has left, and makes a step.
void go_on(RehearsalRequest request, const std::shared_ptr<SimulatedDisk>& disk,
           const RehearsalWatch& before, const RehearsalFaults& faults, FaultReport& report) {
  request.steps = 1;
  RehearsalWatch watch(request.machine.network.ranks);
  try {
    RehearsedWorld world(request, disk, &watch);
    report.went_on_from = play(world).front().steps.front().generation - 1;
  } catch (const Error& error) {
    const bool no_room = error.code() == ErrorCode::kResourceExhausted && faults.disk_bytes > 0;
    // A run of one slot that ends within a sweep has written over the only generation.
    const bool one_slot = error.code() == ErrorCode::kDataLoss && request.config.slots == 1 &&
                          !report.ended_with.empty();
    if (no_room || one_slot) {
      report.did_not_open = error.what();
    } else {
      report.broken.push_back(fmt::format("afterwards the engine does not open: {}", error.what()));
    }
    return;
  }
  take(report, watch, "afterwards, ");
  const std::uint64_t least = surely_durable(before);
  const std::uint64_t most = perhaps_durable(before);
  if (report.went_on_from >= least && report.went_on_from <= most) return;
  report.broken.push_back(
      fmt::format("the engine goes on from generation {}, but {} was durable, and {} the newest",
                  report.went_on_from, least, most));
}

}  // namespace

RehearsalFaults draw_faults(std::uint64_t seed, const FaultTargets& targets) {
  return Draw(seed, targets).faults();
}

std::vector<std::string> RehearsalFaults::text() const {
  std::vector<std::string> lines;
  for (const OfDrive& its : drives) lines.push_back(its.text);
  for (const SlowRank& its : slow_ranks)
    lines.push_back(fmt::format("rank {}: computes {:g} times as long in step {}", its.rank,
                                its.factor, its.step + 1));
  for (const LateMessage& its : late_messages)
    lines.push_back(fmt::format("rank {}: the {}th message is {} us late", its.rank, its.number,
                                its.delay.count() / 1000));
  if (disk_bytes > 0)
    lines.push_back(fmt::format("the drives have room for {}", format_bytes(disk_bytes)));
  if (power_cut_events > 0)
    lines.push_back(fmt::format("power fails after {} events of the drives", power_cut_events));
  return lines;
}

FaultCampaign::FaultCampaign(RehearsalRequest request) : request_(std::move(request)) {
  if (request_.mirrored) {
    throw Error(ErrorCode::kInvalidArgument,
                "faults strike single ranks, but only one of the ranks is played: play all");
  }
  RehearsalWatch watch(request_.machine.network.ranks);
  const auto disk =
      std::make_shared<SimulatedDisk>(disk_bytes(request_), SimulatedDisk::Keeps::kAll);
  {
    RehearsedWorld world(request_, disk, &watch);
    without_ = ziggurat::play(world);
  }
  const RehearsalWatch::Rank& rank = watch.ranks.front();
  targets_ = {.reads = rank.reads,
              .writes = rank.writes,
              .syncs = rank.syncs,
              .messages = rank.messages,
              .disk_events = disk->events(),
              .disk_bytes = disk->used_bytes(),
              .ranks = request_.machine.network.ranks,
              .steps = request_.steps};
  request_.trace_path.clear();
}

FaultReport FaultCampaign::play(std::uint64_t seed) const {
  FaultReport report{.seed = seed};
  RehearsalWatch watch(targets_.ranks);
  watch.faults = draw_faults(seed, targets_);
  report.faults = watch.faults.text();
  const RehearsalFaults& faults = watch.faults;
  const auto disk = std::make_shared<SimulatedDisk>(
      faults.disk_bytes > 0 ? faults.disk_bytes : disk_bytes(request_),
      faults.power_cut_events > 0 ? SimulatedDisk::Keeps::kWhatWasSynced
                                  : SimulatedDisk::Keeps::kAll);
  if (faults.power_cut_events > 0) disk->cut_power_after(faults.power_cut_events);
  RehearsalRequest request = request_;
  request.order_seed = faults.order;
  std::vector<RehearsedRank> ranks;
  try {
    RehearsedWorld world(request, disk, &watch);
    ranks = ziggurat::play(world);
  } catch (const Error& error) {
    report.ended_with = error.what();
  }
  report.events = watch.events;
  report.history = watch.history;
  report.generation = watch.ranks.front().generation;
  take(report, watch, "");
  if (!report.ended_with.empty() && !faults.may_fail)
    report.broken.push_back("nothing failed, but the run ended: " + report.ended_with);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const Counter update : kUpdates) {
      if (ranks[r].counted(update) == without_[r].counted(update)) continue;
      report.broken.push_back(fmt::format("rank {}: {} is {}, but {} without faults", r,
                                          to_string(update), ranks[r].counted(update),
                                          without_[r].counted(update)));
    }
  }
  if (faults.power_cut_events > 0) disk->crash(seed);
  go_on(request, disk, watch, faults, report);
  return report;
}

}  // namespace ziggurat
