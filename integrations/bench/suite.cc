// SPDX-License-Identifier: Apache-2.0
// integrations/bench/suite.cc: targets, pool and load made once; then each set of targets through
// its rounds.
#include "integrations/bench/suite.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/topology/limits.h"
#include "core/engine/runtime.h"
#include "integrations/bench/adam_load.h"
#include "integrations/bench/rounds.h"
#include "integrations/bench/streams.h"
#include "integrations/bench/target.h"

namespace ziggurat::bench {
namespace {

constexpr std::uint64_t kSampleBytes = 32 * DirectFile::kBlockBytes;
constexpr std::uint64_t kSweepBytes = 12 * 6 * kMiB;
constexpr std::uint32_t kDepthMost = 64;  // of those tried

/// The largest row holds a buffer of each kind a lane, and samples; the pool staggers its leases.
std::uint64_t pool_bytes(const BenchOptions& options, std::size_t targets) {
  const std::uint64_t depth = std::max(options.depth, kDepthMost);
  const std::uint64_t streams = 2 * depth * DirectFile::kBlockBytes + kSampleBytes;
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

  BenchResult run() {
    const Nanoseconds begun = monotonic_now();
    open_targets();
    make_pool();
    describe();
    load_ = std::make_unique<AdamLoad>(*runtime_->workers);
    measure_adam_alone();
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
    result_.degraded = degraded_modes();
    result_.wall_s = std::chrono::duration<double>(monotonic_now() - begun).count();
    return std::move(result_);
  }

 private:
  void open_targets() {
    if (!options_.file.empty()) {
      targets_.push_back(Target::open(runtime_->reactor, options_.file, options_.size_bytes,
                                      options_.allow_raw_device));
    }
    for (const std::string& path : options_.paths) {
      announce(path);
      targets_.push_back(Target::create(runtime_->reactor, path, options_.size_bytes));
    }
    for (const auto& target : targets_) {
      if (target->size_bytes() >= kSmallestFileBytes) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} of {} are too few to measure: at least {} are needed",
                              format_bytes(target->size_bytes()), target->label(),
                              format_bytes(kSmallestFileBytes)));
    }
  }

  /// Before anything is written: how much, against what the drive is made for. A drive that does
  /// not say is taken for one of 1 drive write a day, over the filesystem's size.
  void announce(const std::string& path) const {
    const DriveFacts drive = drive_facts(path);
    const double fills = static_cast<double>(options_.size_bytes) / 1e9 * 2.5 * options_.rounds;
    const double seconds = options_.seconds * options_.rounds * 3.5 * (options_.with_fio ? 1.5 : 1);
    constexpr double kGuess = 3;  // GB/s
    const double gb = fills + seconds * kGuess;
    progress_.line(fmt::format(
        "{}: {} on {}, {} free. Will write {} in a file without a name, in all about {:.0f} GB "
        "(at {} GB/s): {:.1f} % of a day's endurance, were it rated for 1 drive write a day",
        path, drive.filesystem, drive.device, format_bytes(drive.free_bytes),
        format_bytes(options_.size_bytes), gb, kGuess,
        drive.size_bytes > 0 ? 100 * gb * 1e9 / static_cast<double>(drive.size_bytes) : 0.0));
  }

  void make_pool() {
    pool_ = PinnedPool::create(runtime_->reactor,
                               {.budget_bytes = pool_bytes(options_, targets_.size()),
                                .reserves = {{Purpose::kStaging, DirectFile::kBlockBytes}},
                                .alignment_bytes = 4096,
                                .numa_node = -1,
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

  void measure_adam_alone() {
    progress_.live("AdamW alone, in memory");
    load_->start();
    const std::uint64_t bytes = load_->bytes();
    const Nanoseconds begun = monotonic_now();
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(1.0, options_.seconds)));
    const double seconds = std::chrono::duration<double>(monotonic_now() - begun).count();
    result_.adam_alone_gb_per_s = static_cast<double>(load_->bytes() - bytes) / 1e9 / seconds;
    load_->stop();
  }

  const BenchOptions& options_;
  const Progress& progress_;
  BenchResult result_;
  std::unique_ptr<Runtime> runtime_;
  // The ring holds the pool's pages: it goes first.
  std::unique_ptr<PinnedPool> pool_;
  std::vector<std::unique_ptr<Target>> targets_;
  std::unique_ptr<AdamLoad> load_;
};

}  // namespace

BenchResult run_bench(const BenchOptions& options, const Progress& progress) {
  Suite suite(options, progress);
  return suite.run();
}

}  // namespace ziggurat::bench
