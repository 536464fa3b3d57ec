// SPDX-License-Identifier: Apache-2.0
// integrations/measure/tune.cc: spends two thirds of the time on the grid, and one third on the
// finalists.
#include "integrations/measure/tune.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/bytes.h"

namespace ziggurat::measure {
namespace {

constexpr std::array<std::uint32_t, 4> kBlocks{256 * kKiB, kMiB, 2 * kMiB, 4 * kMiB};
constexpr std::array<std::uint32_t, 6> kDepths{2, 4, 8, 16, 32, kDepthTriedMax};
constexpr double kGridShare = 2.0 / 3;
constexpr std::size_t kFinalists = 3;
constexpr std::size_t kFinalRounds = 3;
static_assert(kBlocks.back() == DirectFile::kBlockBytes, "the engine sends no larger requests");

class Tuner {
 public:
  Tuner(const Bench& bench, Target& target, double seconds)
      : bench_(bench), target_(target), seconds_(seconds) {
    kinds_ = target.ours() ? std::vector{IoMix::kRead, IoMix::kWrite, IoMix::kMix}
                           : std::vector{IoMix::kRead};
  }

  TuneResult run() {
    const Nanoseconds begun = monotonic_now();
    grid();
    for (const IoMix kind : kinds_) choice(kind) = refine(kind);
    result_.seconds = std::chrono::duration<double>(monotonic_now() - begun).count();
    return result_;
  }

 private:
  double rate(IoMix kind, std::uint32_t block, std::uint32_t depth, double seconds) {
    Target* const one[] = {&target_};
    return run_stream(bench_, one,
                      {.name = fmt::format("tuning: {} x {}", format_bytes(block), depth),
                       .kind = kind,
                       .seconds = seconds,
                       .depth = depth,
                       .block_bytes = block,
                       .sample_bytes = 0})
        .gb_per_s();
  }

  static double& cell_rate(TuneCell& cell, IoMix kind) {
    if (kind == IoMix::kRead) return cell.read_gb_per_s;
    return kind == IoMix::kWrite ? cell.write_gb_per_s : cell.mix_gb_per_s;
  }

  TuneChoice& choice(IoMix kind) {
    if (kind == IoMix::kRead) return result_.read;
    return kind == IoMix::kWrite ? result_.write : result_.mix;
  }

  void grid() {
    for (const std::uint32_t block : kBlocks) {
      for (const std::uint32_t depth : kDepths) {
        if (depth > target_.engine().queue_depth() || block * depth > kInFlightBytesMax) continue;
        result_.cells.push_back({.block_bytes = block, .depth = depth});
      }
    }
    const auto cells = static_cast<double>(result_.cells.size());
    const double each = seconds_ * kGridShare / (cells * static_cast<double>(kinds_.size()));
    for (std::size_t i = 0; i < result_.cells.size(); ++i) {
      TuneCell& cell = result_.cells[i];
      bench_.progress.live(fmt::format("tuning has done {:.0f} % of the grid, now {} x {}",
                                       100 * static_cast<double>(i) / cells,
                                       format_bytes(cell.block_bytes), cell.depth));
      for (const IoMix kind : kinds_)
        cell_rate(cell, kind) = rate(kind, cell.block_bytes, cell.depth, each);
    }
  }

  /// Measures the fastest few cells again, in turn and several times, because each cell of the grid
  /// was measured only for a moment.
  TuneChoice refine(IoMix kind) {
    std::vector<TuneCell> order = result_.cells;
    std::sort(order.begin(), order.end(),
              [&](TuneCell& a, TuneCell& b) { return cell_rate(a, kind) > cell_rate(b, kind); });
    order.resize(std::min(order.size(), kFinalists));
    const double each = seconds_ * (1 - kGridShare) /
                        static_cast<double>(kFinalists * kFinalRounds * kinds_.size());
    std::vector<std::vector<double>> rates(order.size());
    for (std::size_t round = 0; round < kFinalRounds; ++round) {
      for (std::size_t i = 0; i < order.size(); ++i)
        rates[i].push_back(rate(kind, order[i].block_bytes, order[i].depth, each));
    }
    std::vector<TuneChoice> measured;
    for (std::size_t i = 0; i < order.size(); ++i)
      measured.push_back({order[i].block_bytes, order[i].depth, median_of(rates[i])});
    return choose(measured);
  }

  const Bench& bench_;
  Target& target_;
  double seconds_;
  std::vector<IoMix> kinds_;
  TuneResult result_;
};

}  // namespace

TuneChoice choose(const std::vector<TuneChoice>& measured) {
  double best = 0;
  for (const TuneChoice& each : measured) best = std::max(best, each.gb_per_s);
  TuneChoice chosen;
  for (const TuneChoice& each : measured) {
    if (each.gb_per_s < best * (1 - kTuneSlack)) continue;
    if (chosen.depth == 0 || each.outstanding_bytes() < chosen.outstanding_bytes()) chosen = each;
  }
  return chosen;
}

DepthChoice choose_depth(const std::vector<TuneChoice>& measured) {
  const auto fastest = std::ranges::max_element(measured, {}, &TuneChoice::gb_per_s);
  TuneChoice best = *fastest;
  for (const TuneChoice& each : measured) {
    const bool as_fast = each.gb_per_s >= fastest->gb_per_s * (1 - kRowSlack);
    if (as_fast && each.cpu_s_per_gb < best.cpu_s_per_gb) best = each;
  }
  return {best.depth, choose(measured).depth};
}

TuneResult tune(const Bench& bench, Target& target, double seconds) {
  return Tuner(bench, target, seconds).run();
}

}  // namespace ziggurat::measure
