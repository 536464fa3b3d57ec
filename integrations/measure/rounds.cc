// SPDX-License-Identifier: Apache-2.0
// integrations/measure/rounds.cc: runs each row with what it needs in the file and what runs beside
// it, and fio in turn.
#include "integrations/measure/rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "integrations/measure/prefetch.h"
#include "integrations/measure/sweep.h"
#include "integrations/measure/tune.h"

namespace ziggurat::measure {
namespace {

constexpr std::array<std::uint64_t, 5> kInFlightBytes{4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB,
                                                      kInFlightBytesMax};
// A share of the read rate, because deadlines test jitter and not bandwidth.
constexpr double kPaceShare = 0.8;
constexpr double kTrialSeconds = 0.4;
constexpr int kTrialPasses = 2;
constexpr double kAloneSeconds = 1;

bool beside_adam(Workload workload) {
  return workload == Workload::kReadBesideAdam || workload == Workload::kWriteBesideAdam ||
         workload == Workload::kPrefetchBesideAdam;
}

IoMix stream_kind(Workload workload) {
  switch (workload) {
    case Workload::kWrite:
    case Workload::kWriteBesideAdam: return IoMix::kWrite;
    case Workload::kMix: return IoMix::kMix;
    default: return IoMix::kRead;
  }
}

/// Returns the rows in order. Rows that leave the file's pages in place come first; rows with
/// records, which replace the pages, come last.
std::vector<Workload> order_of_rows(bool ours) {
  if (!ours) {
    return {Workload::kRead, Workload::kReadBesideAdam, Workload::kPrefetch,
            Workload::kPrefetchBesideAdam};
  }
  return {Workload::kRead,
          Workload::kReadBesideAdam,
          Workload::kPrefetch,
          Workload::kPrefetchBesideAdam,
          Workload::kMix,
          Workload::kWrite,
          Workload::kWriteBesideAdam,
          Workload::kSweep,
          Workload::kSweepAdam};
}

}  // namespace

Rounds::Rounds(Bench bench, const BenchOptions& options, std::vector<Target*> targets,
               AdamLoad& load, const ModelShape& model)
    : bench_(bench), options_(options), targets_(std::move(targets)), load_(load), model_(model) {}

SetResult Rounds::run() {
  describe();
  fill_first();
  find_fio();
  for (const Workload workload : order_of_rows(ours())) {
    if (!options_.wants(workload)) continue;
    result_.rows.emplace_back();
    result_.rows.back().workload = workload;
  }
  choose_depths();
  for (std::uint32_t round = 0; round < options_.rounds; ++round) run_round(round);
  if (options_.tune && targets_.size() == 1) {
    if (ours()) want(Target::Content::kPages);
    result_.tune = tune(bench_, *targets_.front(), options_.tune_seconds);
  }
  std::sort(result_.rows.begin(), result_.rows.end(),
            [](const Row& a, const Row& b) { return a.workload < b.workload; });
  for (Target* const target : targets_) {
    result_.written_bytes += target->written_bytes;
    result_.engines.push_back(target->engine().description());
  }
  return std::move(result_);
}

/// Fills the files for the first time. That shows how fast this drive writes, and so how much the
/// rows will write.
void Rounds::fill_first() {
  const auto filled = [](const Target* target) {
    return target->content == Target::Content::kPages;
  };
  if (!ours() || std::ranges::all_of(targets_, filled)) return;
  const Nanoseconds begun = monotonic_now();
  want(Target::Content::kPages);
  const double seconds = std::chrono::duration<double>(monotonic_now() - begun).count();
  const double rate = static_cast<double>(result_.file_bytes) / 1e9 / seconds;
  bench_.progress.line(
      fmt::format("{} was filled at {:.2f} GB/s; at that speed the rows will write about {:.0f} "
                  "GB, or more if overwriting is faster",
                  result_.label, rate, planned_write_gb(options_, rate)));
}

void Rounds::describe() {
  for (const Target* const target : targets_) {
    result_.paths.push_back(target->label());
    result_.drives.push_back(target->drive());
    result_.file_bytes += target->size_bytes();
    result_.label += (result_.label.empty() ? "" : " + ") + target->label();
  }
  result_.block_bytes = options_.block_bytes;
}

void Rounds::find_fio() {
  if (!options_.with_fio) {
    result_.fio_how = "fio was not run, because `no_fio` was given";
  } else if (targets_.size() > 1) {
    result_.fio_how = "fio was not run on several paths at once; see the rows of each path";
  } else {
    FioJob probe = fio_job(IoMix::kRead);
    probe.seconds = 0.1;
    // This is the largest depth of a trial, so that too few reserved pages show now.
    probe.depth = depth_for(kInFlightBytesMax);
    std::string why;
    fio_ = Fio::find(probe, why);
    result_.fio_how = fio_ ? fio_->how() : "fio was not run: " + why;
  }
}

FioJob Rounds::fio_job(IoMix kind) const {
  const Target& target = *targets_.front();
  return {.kind = kind,
          .path = target.path_for_others(),
          .size_bytes = target.size_bytes() / options_.block_bytes * options_.block_bytes,
          .seconds = options_.seconds,
          .depth = result_.fio_depth[kind].best,
          .block_bytes = options_.block_bytes,
          .read_only = !ours()};
}

/// Chooses our depths and fio's from the same list, each by short runs of the work that is measured
/// later.
void Rounds::choose_depths() {
  for (const IoMix kind : {IoMix::kRead, IoMix::kWrite, IoMix::kMix}) {
    const bool wanted = std::ranges::any_of(result_.rows, [&](const Row& row) {
      return stream_kind(row.workload) == kind || peer_of(row.workload) == kind;
    });
    if (!wanted) continue;
    result_.depth[kind] =
        options_.depth != 0 ? DepthChoice{options_.depth, options_.depth} : best_depth(kind);
    if (fio_) result_.fio_depth[kind] = best_fio_depth(kind);
  }
}

std::uint32_t Rounds::depth_of(IoMix kind) const { return result_.depth[kind].best; }

std::uint32_t Rounds::depth_for(std::uint64_t in_flight_bytes) const {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(in_flight_bytes / options_.block_bytes, 1, kDepthTriedMax));
}

/// Tries every depth several times and keeps its best figures, because other users of the machine
/// can only slow a trial down.
DepthChoice Rounds::try_depths(std::uint32_t depth_max, const Trial& trial) const {
  std::vector<TuneChoice> tried;
  for (const std::uint64_t bytes : kInFlightBytes) {
    const std::uint32_t depth = std::min(depth_for(bytes), depth_max);
    if (tried.empty() || tried.back().depth != depth)
      tried.push_back({options_.block_bytes, depth, 0, 1e9});
  }
  for (int pass = 0; pass < kTrialPasses; ++pass) {
    for (TuneChoice& each : tried) {
      const TuneChoice found = trial(each.depth);
      each.gb_per_s = std::max(each.gb_per_s, found.gb_per_s);
      each.cpu_s_per_gb = std::min(each.cpu_s_per_gb, found.cpu_s_per_gb);
    }
  }
  return choose_depth(tried);
}

DepthChoice Rounds::best_depth(IoMix kind) {
  if (kind != IoMix::kWrite) want(Target::Content::kPages);
  return try_depths(std::min(kDepthTriedMax, targets_.front()->engine().queue_depth()),
                    [&](std::uint32_t depth) -> TuneChoice {
                      bench_.progress.live(fmt::format("choosing a depth: {}", depth));
                      const Measurement found =
                          run_stream(bench_, targets_,
                                     {.name = "trial",
                                      .kind = kind,
                                      .seconds = std::min(kTrialSeconds, options_.seconds),
                                      .depth = depth,
                                      .block_bytes = options_.block_bytes,
                                      .sample_bytes = 0});
                      return {options_.block_bytes, depth, found.gb_per_s(), found.cpu_s_per_gb()};
                    });
}

DepthChoice Rounds::best_fio_depth(IoMix kind) {
  FioJob job = fio_job(kind);
  job.seconds = std::min(kTrialSeconds, options_.seconds);
  if (kind != IoMix::kRead) targets_.front()->content = Target::Content::kForeign;
  return try_depths(kDepthTriedMax, [&](std::uint32_t depth) -> TuneChoice {
    bench_.progress.live(fmt::format("choosing a depth for fio: {}", depth));
    job.depth = depth;
    const FioFigure found = fio_->run(job);
    targets_.front()->written_bytes += found.write_bytes;
    return {options_.block_bytes, depth, found.gb_per_s, found.cpu_s_per_gb};
  });
}

void Rounds::want(Target::Content content) {
  for (Target* const target : targets_) {
    if (!target->ours() || target->content == content) continue;
    if (content == Target::Content::kPages) {
      fill(bench_, *target);
    } else {
      make_records(bench_, *target);
    }
  }
}

void Rounds::run_round(std::uint32_t round) {
  for (Row& row : result_.rows) {
    const std::size_t done = row.rounds.size();
    if (beside_adam(row.workload) && result_.adam_alone_gb_per_s.size() == round)
      measure_adam_alone();
    bench_.progress.live(
        fmt::format("round {} of {}: {}", done + 1, options_.rounds, to_string(row.workload)));
    run_row(row, round);
    const Measurement& measured = row.rounds.back();
    const std::string peer =
        row.fio.empty() ? "" : fmt::format("; fio {:.2f} GB/s", row.fio.back().gb_per_s);
    bench_.progress.live(fmt::format("round {} of {}: {}: {:.2f} GB/s{}", done + 1, options_.rounds,
                                     to_string(row.workload), measured.gb_per_s(), peer));
  }
}

/// Measures AdamW alone right before the rows that run beside it, because the speed of a machine
/// changes within minutes.
void Rounds::measure_adam_alone() {
  bench_.progress.live("AdamW runs alone in memory");
  load_.start();
  const std::uint64_t bytes = load_.bytes();
  const Nanoseconds begun = monotonic_now();
  std::this_thread::sleep_for(
      std::chrono::duration<double>(std::min(kAloneSeconds, options_.seconds)));
  const double seconds = std::chrono::duration<double>(monotonic_now() - begun).count();
  result_.adam_alone_gb_per_s.push_back(static_cast<double>(load_.bytes() - bytes) / 1e9 / seconds);
  load_.stop();
}

void Rounds::run_row(Row& row, std::uint32_t round) {
  const std::optional<IoMix> kind = fio_ ? peer_of(row.workload) : std::nullopt;
  if (kind && round % 2 == 1) run_fio(row, *kind);
  Measurement measured = measure(row.workload);
  judge_row(measured);
  row.rounds.push_back(std::move(measured));
  if (row.workload == Workload::kRead) pace_gb_per_s_ = kPaceShare * row.rounds.back().gb_per_s();
  if (kind && round % 2 == 0) run_fio(row, *kind);
}

void Rounds::run_fio(Row& row, IoMix kind) {
  bench_.progress.live(fmt::format("fio beside {}", to_string(row.workload)));
  if (kind != IoMix::kRead) targets_.front()->content = Target::Content::kForeign;
  row.fio.push_back(fio_->run(fio_job(kind)));
  targets_.front()->written_bytes += row.fio.back().write_bytes;
  row.fio_work = row.workload == Workload::kSweep ? "its 50/50 mix" : "the same work";
}

Measurement Rounds::stream(Workload workload) {
  return run_stream(bench_, targets_,
                    {.name = to_string(workload),
                     .kind = stream_kind(workload),
                     .seconds = options_.seconds,
                     .depth = depth_of(stream_kind(workload)),
                     .block_bytes = options_.block_bytes});
}

Measurement Rounds::measure(Workload workload) {
  const bool sweeps = workload == Workload::kSweep || workload == Workload::kSweepAdam;
  const bool reads = stream_kind(workload) != IoMix::kWrite;
  if (sweeps) want(Target::Content::kRecords);
  if (!sweeps && reads) want(Target::Content::kPages);
  if (sweeps) {
    return run_sweep(bench_, targets_,
                     {.name = to_string(workload),
                      .seconds = options_.seconds,
                      .compute = workload == Workload::kSweepAdam});
  }
  const bool beside = beside_adam(workload);
  bench_.beside = beside ? &load_ : nullptr;
  if (beside) load_.start();
  Measurement measured =
      workload == Workload::kPrefetch || workload == Workload::kPrefetchBesideAdam
          ? run_prefetch(bench_, targets_,
                         {.name = to_string(workload),
                          .seconds = options_.seconds,
                          .depth = depth_of(IoMix::kRead),
                          .block_bytes = options_.block_bytes,
                          .unit_bytes = model_.unit_bytes(),
                          .pace_gb_per_s = pace_gb_per_s_})
          : stream(workload);
  if (beside) load_.stop();
  bench_.beside = nullptr;
  return measured;
}

void Rounds::judge_row(Measurement& measured) const {
  // A stalled transfer makes a short row longer but not steadier, so only the seconds that were
  // asked for are judged.
  const auto asked = static_cast<std::size_t>(options_.seconds);
  for (const Target* const target : targets_) {
    Evidence evidence;
    evidence.seconds = std::min(measured.seconds, options_.seconds);
    evidence.gb_per_second = measured.per_second();
    evidence.gb_per_second.resize(std::min(evidence.gb_per_second.size(), asked));
    evidence.gb_per_s = measured.gb_per_s() / static_cast<double>(targets_.size());
    evidence.file_bytes = target->size_bytes();
    evidence.drive_bytes = target->drive().size_bytes;
    evidence.extents = extent_facts(target->descriptor(), target->size_bytes());
    evidence.cache = cache_facts(target->descriptor(), target->size_bytes());
    evidence.sample = measured.sample;
    for (Flag& flag : judge(evidence)) {
      const bool known = std::any_of(measured.flags.begin(), measured.flags.end(),
                                     [&](const Flag& other) { return other.doubt == flag.doubt; });
      if (!known) measured.flags.push_back(std::move(flag));
    }
  }
}

}  // namespace ziggurat::measure
