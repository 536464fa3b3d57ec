// SPDX-License-Identifier: Apache-2.0
// tests/core/rehearsal_script_test.cc: what a rehearsal plays and tells beside the bounds of
// rehearsal_test.cc: one rank for all, a head that is the embedding, the trace, the progress.
#include <fstream>
#include <sstream>

#include "core/rehearsal/rehearsal.h"
#include "tests/core/rehearsed_units.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace rehearsal_script_test {

using namespace std::chrono_literals;
using namespace testing::rehearsed;

/// What one rank does that stands for all is what it does among ranks which exist.
TEST(RehearsalScript, OneRankStandsForAll) {
  struct Case {
    const char* name;
    int ranks, per_node, stage, group, hpz;
    bool gpu;
    Route route;
  };
  for (const Case& its : {Case{"stage 3", 4, 4, 3, 0, 0, false, Route::kDirect},
                          Case{"stage 3 on two nodes", 8, 4, 3, 0, 0, false, Route::kDirect},
                          Case{"stage 3 on GPUs, in rings", 8, 4, 3, 0, 0, true, Route::kRing},
                          Case{"stage 2 on GPUs", 4, 2, 2, 0, 0, true, Route::kDirect},
                          Case{"stage 0", 4, 2, 0, 0, 0, false, Route::kDirect},
                          Case{"groups of a node", 8, 4, 3, 4, 0, true, Route::kDirect},
                          Case{"hpZ", 8, 4, 3, 0, 4, true, Route::kDirect}}) {
    SCOPED_TRACE(its.name);
    RehearsalRequest request = equal_run(Tier::kNvme);
    request.config.host_budget_bytes = 2 * kGiB;
    request.config.strategy = {.zero_stage = its.stage};
    if (its.group > 0)
      request.config.strategy = {
          .zero_stage = its.stage, .name = StrategyName::kHybrid, .shard_group = its.group};
    request.config.strategy.hpz = its.hpz;
    request.machine.device.host_accessible = !its.gpu;
    request.machine.drive.read_bytes_per_second = 6e9;
    request.machine.drive.write_bytes_per_second = 6e9;
    request.machine.network = {.ranks = its.ranks,
                               .ranks_per_node = its.per_node,
                               .within_node = {.bytes_per_s = 20e9, .latency = 1us},
                               .between_nodes = {.bytes_per_s = 10e9, .latency = 5us},
                               .route = its.route};
    const std::vector<RehearsedRank> all = rehearse(request);
    request.mirrored = true;
    const std::vector<RehearsedRank> one = rehearse(request);
    ASSERT_EQ(one.size(), 1U);
    for (const Counter counter : kLinks)
      EXPECT_EQ(one[0].counted(counter), all[0].counted(counter)) << to_string(counter);
    EXPECT_EQ(one[0].device.peak_bytes(), all[0].device.peak_bytes());
    expect_within(steady(one[0]), steady(all[0]), 0.02);
    expect_within(seconds_of(one[0]), seconds_of(all[0]), 0.02);
    const auto sent = [](const RehearsedRank& rank) {
      double sum = 0;
      for (const RehearsedStep& step : rank.steps)
        sum += static_cast<double>(step.sent_in_node + step.sent_to_nodes);
      return sum;
    };
    expect_within(sent(one[0]), sent(all[0]), 0.02);
  }
}

/// A head whose matrix is the embedding is computed while its unit is held, and costs what it says.
TEST(RehearsalScript, AHeadThatIsTheEmbeddingIsHeld) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.config.trainer_held_units = {0};
  request.costs.front().between_s = 0.5;
  const RehearsedRank rank = rehearse(request).front();
  EXPECT_GT(steady(rank), 0.5);
  EXPECT_LT(steady(rank), 0.6);
}

/// What a trainer on the CPU computes takes its cores from the update, and the other way round.
TEST(RehearsalScript, ATrainerOnTheCpuSharesTheCoresWithTheUpdate) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.costs.assign(kUnits, {.forward_s = 0.02, .backward_s = 0.04});
  request.machine.workers.bytes_per_second = 20e9;
  const auto jobs_s = [&](const RehearsedRank& rank) {
    return rank.steps[2].workers_busy_s / static_cast<double>(request.machine.workers.threads);
  };
  const RehearsedRank beside = rehearse(request).front();
  request.machine.workers_compute = true;
  const RehearsedRank shared = rehearse(request).front();
  const double compute_s = kUnits * 0.06;
  EXPECT_GT(jobs_s(shared), 0.1);
  EXPECT_LT(steady(beside), compute_s + 0.7 * jobs_s(beside));
  EXPECT_GE(steady(shared), 0.99 * (compute_s + jobs_s(shared)));
  EXPECT_LE(steady(shared), 1.1 * (compute_s + jobs_s(shared)));
}

TEST(RehearsalScript, TracesInVirtualTime) {
  const testing::ScratchDirectory scratch;
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.machine.device.host_accessible = false;
  request.machine.drive.write_bytes_per_second = 1e9;
  request.config.host_budget_bytes = kGiB;
  request.costs.assign(kUnits, {.forward_s = 1, .backward_s = 2});
  request.trace_path = scratch.path() + "/trace.json";
  const RehearsedRank rank = rehearse(request).front();
  std::ostringstream text;
  text << std::ifstream(request.trace_path).rdbuf();
  for (const char* const part :
       {"forward", "backward", "nvme write", "worker 0", "copies: host to device",
        "kernels: trainer", "\"dur\":2000000.000"})
    EXPECT_NE(text.str().find(part), std::string::npos) << part;
}

std::uint64_t progress_of(const RehearsalRequest& request, std::uint64_t& of) {
  RehearsalRequest told = request;
  std::uint64_t last = 0;
  told.progress = [&](std::uint64_t done, std::uint64_t all) {
    EXPECT_EQ(done, last + 1);
    last = done;
    of = all;
  };
  rehearse(told);
  return last;
}

TEST(RehearsalScript, TellsHowFarItIs) {
  std::uint64_t of = 0;
  EXPECT_EQ(progress_of(equal_run(Tier::kHost), of), 2 * kUnits * 4);
  EXPECT_EQ(of, 2 * kUnits * 4);
}

}  // namespace rehearsal_script_test
}  // namespace ziggurat
