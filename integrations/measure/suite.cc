// SPDX-License-Identifier: Apache-2.0
// integrations/measure/suite.cc: makes targets, pool and load once, and then runs the rounds of
// each set of targets.
#include "integrations/measure/suite.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/topology/limits.h"
#include "core/engine/runtime.h"
#include "integrations/measure/adam_load.h"
#include "integrations/measure/rounds.h"
#include "integrations/measure/streams.h"
#include "integrations/measure/target.h"

namespace ziggurat::measure {
namespace {

constexpr std::uint64_t kSweepBytes = 12 * 6 * kMiB;

/// Returns the bytes that the largest row needs: a buffer of each kind for every lane, and samples.
/// It needs a quarter more, because the pool staggers its leases.
std::uint64_t pool_bytes(const BenchOptions& options, std::size_t targets) {
  const std::uint64_t asked = std::uint64_t{options.depth} * options.block_bytes;
  const std::uint64_t streams = 2 * std::max(asked, kInFlightBytesMax) + kSampleBytes;
  const std::uint64_t one = std::max(streams, kSweepBytes);
  return round_up(targets * (one + one / 4) + 8 * kMiB, 2 * kMiB);
}

std::string now_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

class Suite {
 public:
  Suite(const BenchOptions& options, const Progress& progress)
      : options_(options), progress_(progress), runtime_(Runtime::create({})) {}

  ~Suite() {
    load_.reset();
    runtime_->reactor.block_on(close_targets());
  }

  BenchResult run() {
    const Nanoseconds begun = monotonic_now();
    open_targets();
    make_pool();
    describe();
    load_ = std::make_unique<AdamLoad>(*runtime_->workers);
    std::vector<std::vector<Target*>> sets;
    for (const auto& target : targets_) sets.push_back({target.get()});
    if (targets_.size() > 1) {
      sets.emplace_back();
      for (const auto& target : targets_) sets.back().push_back(target.get());
    }
    for (const std::vector<Target*>& targets : sets) {
      Rounds rounds({runtime_->reactor, *pool_, progress_, *runtime_->workers}, options_, targets,
                    *load_, result_.model);
      result_.sets.push_back(rounds.run());
    }
    std::vector<double> alone;
    for (const SetResult& set : result_.sets)
      alone.insert(alone.end(), set.adam_alone_gb_per_s.begin(), set.adam_alone_gb_per_s.end());
    result_.adam_alone_gb_per_s = median_of(alone);
    result_.degraded = degraded_modes();
    result_.wall_s = std::chrono::duration<double>(monotonic_now() - begun).count();
    return std::move(result_);
  }

 private:
  // A ring must be closed on the thread that submits to it.
  Task<> close_targets() {
    targets_.clear();
    co_return;
  }

  void open_targets() {
    if (!options_.file.empty()) {
      targets_.push_back(Target::open(runtime_->reactor, options_.file, options_.size_bytes,
                                      options_.allow_raw_device));
    }
    for (const std::string& path : options_.paths) {
      targets_.push_back(Target::create(runtime_->reactor, path, options_.size_bytes));
      announce(*targets_.back());
    }
    for (const auto& target : targets_) {
      const std::uint32_t depth_max = target->engine().queue_depth();
      if (options_.depth > depth_max) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("`depth={}` is too large: {} takes at most {} transfers at once",
                                options_.depth, target->engine().description(), depth_max));
      }
      if (target->size_bytes() >= kSmallestFileBytes) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} of {} are too few to measure; give at least {}",
                              format_bytes(target->size_bytes()), target->label(),
                              format_bytes(kSmallestFileBytes)));
    }
  }

  /// Says, before anything is written, how much the benchmark will write and what part of the
  /// drive's endurance that is. It assumes that the drive is made for 1 write of the whole
  /// filesystem's size a day.
  void announce(const Target& target) const {
    const DriveFacts& drive = target.drive();  // the facts from before our file was made
    constexpr double kGuess = 4;               // GB/s, assumed until the first fill shows it
    const double gb =
        static_cast<double>(options_.size_bytes) / 1e9 + planned_write_gb(options_, kGuess);
    progress_.line(fmt::format(
        "{} is on {} ({}), with {} free. The benchmark fills an unnamed file of {} and will write "
        "about {:.0f} GB in all if the drive writes {} GB/s, which is {:.0f} % of a day's "
        "endurance if the drive is rated for 1 drive write a day",
        target.label(), drive.filesystem, drive.device, format_bytes(drive.free_bytes),
        format_bytes(options_.size_bytes), gb, kGuess,
        drive.size_bytes > 0 ? 100 * gb * 1e9 / static_cast<double>(drive.size_bytes) : 0.0));
  }

  void make_pool() {
    pool_ = PinnedPool::create(runtime_->reactor,
                               {.budget_bytes = pool_bytes(options_, targets_.size()),
                                .reserves = {{Purpose::kStaging, DirectFile::kBlockBytes}},
                                .alignment_bytes = 4096,
                                .use_huge_pages = true});
    runtime_->reactor.block_on(register_memory());
  }

  Task<> register_memory() {
    for (const auto& target : targets_) target->engine().register_memory(pool_->mapping());
    co_return;
  }

  void describe() {
    result_.cpu_model = runtime_->topology.cpu_model;
    result_.kernel = kernel_release();
    result_.started_at = now_text();
    result_.workers = runtime_->workers->threads();
    result_.buffer_pages = pool_->page_kind();
    result_.seconds_per_row = options_.seconds;
    result_.rounds = options_.rounds;
    result_.model = options_.model;
  }

  const BenchOptions& options_;
  const Progress& progress_;
  BenchResult result_;
  std::unique_ptr<Runtime> runtime_;
  // Rings hold pages of the pool, so the targets are destroyed before the pool.
  std::unique_ptr<PinnedPool> pool_;
  std::vector<std::unique_ptr<Target>> targets_;
  std::unique_ptr<AdamLoad> load_;
};

}  // namespace

bool BenchOptions::wants(Workload workload) const {
  return rows.empty() || std::find(rows.begin(), rows.end(), workload) != rows.end();
}

double planned_write_gb(const BenchOptions& options, double gb_per_s) noexcept {
  // The rows that write, counted in rows that do nothing but write; a mix or a sweep is half of
  // one.
  double rows = 0;
  for (std::size_t i = 0; i < kWorkloads; ++i) {
    const auto workload = static_cast<Workload>(i);
    if (!options.wants(workload)) continue;
    const double share = write_share(workload);
    rows += share * (options.with_fio && peer_of(workload).has_value() ? 2 : 1);
  }
  // We and fio try depths with writes and with the mix.
  const double trials = (options.depth == 0 ? 6 : 0) + (options.with_fio ? 6 : 0);
  const double seconds = rows * options.seconds * options.rounds +
                         trials * std::min(1.0, options.seconds) +
                         (options.tune ? options.tune_seconds / 2 : 0);
  // Each round fills the pages again after fio or the records have overwritten them.
  const double fills = options.rounds * (options.with_fio ? 2.0 : 1.0) + options.rounds * 0.5;
  const auto size = static_cast<double>(options.size_bytes) / 1e9;
  const double once = seconds * gb_per_s + fills * size;
  return options.paths.size() > 1 ? 2 * once : once;  // each path alone, and all paths at once
}

BenchResult run_bench(const BenchOptions& options, const Progress& progress) {
  Suite suite(options, progress);
  return suite.run();
}

}  // namespace ziggurat::measure
