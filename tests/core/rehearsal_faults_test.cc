// SPDX-License-Identifier: Apache-2.0
// tests/core/rehearsal_faults_test.cc: the engine on twins while drives, ranks and messages are
// slow, fail or lose power, by seeds.
//
// ZIGGURAT_SEEDS=10000 plays so many seeds (tests/long.py); ZIGGURAT_FIRST_SEED=N begins with seed
// N, and prints what it does, to look at a seed that a failure names.
#include "core/rehearsal/rehearsal_faults.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "tests/support/environment_number.h"

namespace ziggurat {
namespace rehearsal_faults_test {

using namespace std::chrono_literals;

ModelSpec uneven_units() {
  ModelSpec model{.name = "uneven", .units = {}};
  for (const std::int64_t count : {900'000, 40'000, 1'700'000, 1'700'000, 1'700'000, 20'000}) {
    const std::string name = "unit" + std::to_string(model.units.size());
    model.units.push_back({.name = name, .params = {{.name = name + ".weight", .shape = {count}}}});
  }
  return model;
}

/// A machine on which nothing takes much longer than the rest.
RehearsedMachine even_machine(int ranks) {
  RehearsedMachine machine;
  machine.workers = {.threads = 3, .bytes_per_second = 20e9, .latency = 2us};
  const CostedLink link{.bytes_per_second = 10e9, .latency = 5us};
  machine.device = {.memory_bytes = 64 * kMiB,
                    .host_accessible = true,
                    .to_device = link,
                    .to_host = link,
                    .own_memory = {.bytes_per_second = 200e9, .latency = 0us}};
  machine.drive = {.read_bytes_per_second = 4e9,
                   .write_bytes_per_second = 3e9,
                   .latency = 50us,
                   .queue_depth = 16,
                   .jitter = 2};
  machine.network = {
      .ranks = ranks, .ranks_per_node = 2, .within_node = {5e9, 3us}, .between_nodes = {2e9, 10us}};
  return machine;
}

struct Setting {
  const char* name;
  const char* placement;
  int ranks;
  int stage;
  bool gpu;
  std::uint64_t host_bytes;
};
constexpr Setting kSettings[] = {
    {"one rank, records on NVMe", "params=host,grads=host,optimizer=nvme", 1, 0, false, 48 * kMiB},
    {"one rank, all on NVMe", "all=nvme", 1, 0, true, 32 * kMiB},
    {"two ranks, stage 3, NVMe", "params=host,grads=host,optimizer=nvme", 2, 3, false, 160 * kMiB},
    {"four ranks, stage 2, GPUs", "params=host,grads=host,optimizer=nvme", 4, 2, true, 160 * kMiB},
    {"two ranks, stage 3, host", "params=host,grads=host,optimizer=host", 2, 3, true, 192 * kMiB},
    {"two ranks, stage 0, GPUs", "params=host,grads=host,optimizer=nvme", 2, 0, true, 160 * kMiB},
};

RehearsalRequest request_of(const Setting& setting) {
  RehearsalRequest request;
  request.model = uneven_units();
  request.config.store = {{"store"}};
  request.config.placement = parse_placement(setting.placement);
  request.config.strategy.zero_stage = setting.stage;
  request.config.host_budget_bytes = setting.host_bytes;
  request.config.reduce_bucket_elements = 1 << 20;
  request.machine = even_machine(setting.ranks);
  request.machine.device.host_accessible = !setting.gpu;
  request.costs.assign(request.model.units.size(), {.forward_s = 2e-4, .backward_s = 4e-4});
  request.steps = 4;
  return request;
}

std::string text_of(const FaultReport& report) {
  std::string text = "seed " + std::to_string(report.seed);
  for (const std::string& fault : report.faults) text += "\n  " + fault;
  text += "\n  generation " + std::to_string(report.generation) + ", went on from " +
          std::to_string(report.went_on_from) + ", events " + std::to_string(report.events) +
          "\n  ended with: " + report.ended_with;
  for (const std::string& broken : report.broken) text += "\n  BROKEN: " + broken;
  return text;
}

TEST(RehearsalFaults, HoldWhatMustBeTrue) {
  const std::uint64_t seeds = testing::number_of("ZIGGURAT_SEEDS", 100);
  const std::uint64_t shown = testing::number_of("ZIGGURAT_FIRST_SEED", 0);
  const std::uint64_t first = std::max<std::uint64_t>(shown, 1);
  std::vector<FaultCampaign> campaigns;
  for (const Setting& setting : kSettings) campaigns.emplace_back(request_of(setting));
  std::uint64_t ended = 0;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    const std::size_t which = seed % std::size(kSettings);
    SCOPED_TRACE(kSettings[which].name);
    const FaultReport report = campaigns[which].play(seed);
    if (shown > 0) std::printf("%s\n", text_of(report).c_str());
    std::fflush(stdout);  // so that it is there if the next seed ends the program
    ended += report.ended_with.empty() ? 0 : 1;
    ASSERT_THAT(report.broken, ::testing::IsEmpty()) << text_of(report);
  }
  std::printf("%llu of %llu runs ended with an error\n", static_cast<unsigned long long>(ended),
              static_cast<unsigned long long>(seeds));
}

/// A run of one slot writes over its only generation: one that ends meanwhile has none.
TEST(RehearsalFaults, OfARunOfOneSlotMayLeaveNothing) {
  RehearsalRequest request = request_of(kSettings[0]);
  request.config.slots = 1;
  const FaultCampaign campaign(std::move(request));
  std::uint64_t lost = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const FaultReport report = campaign.play(seed);
    ASSERT_THAT(report.broken, ::testing::IsEmpty()) << text_of(report);
    EXPECT_TRUE(report.did_not_open.empty() || !report.ended_with.empty()) << text_of(report);
    lost += report.did_not_open.empty() ? 0 : 1;
  }
  EXPECT_GT(lost, 0U) << "no seed ends a run within a sweep";
}

TEST(RehearsalFaults, ASeedRepeatsARunToTheEvent) {
  const FaultCampaign campaign(request_of(kSettings[2]));
  for (const std::uint64_t seed : {3, 4, 5, 6, 7, 8}) {
    const FaultReport one = campaign.play(seed);
    const FaultReport other = campaign.play(seed);
    EXPECT_EQ(one.history, other.history) << seed;
    EXPECT_EQ(text_of(one), text_of(other));
    EXPECT_NE(one.history, campaign.play(seed + 100).history) << seed;
  }
}

TEST(RehearsalFaults, OfEachKindAreDrawn) {
  const FaultTargets targets{.reads = 100,
                             .writes = 100,
                             .syncs = 10,
                             .messages = 100,
                             .disk_events = 1000,
                             .disk_bytes = 1000,
                             .ranks = 4,
                             .steps = 3};
  bool slow = false;
  bool fails = false;
  bool rank = false;
  bool message = false;
  bool full = false;
  bool cut = false;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    const RehearsalFaults faults = draw_faults(seed, targets);
    for (const RehearsalFaults::OfDrive& its : faults.drives) {
      slow |= its.fault.effect == Fault::Effect::kDelay;
      fails |= its.fault.effect == Fault::Effect::kErrno;
      EXPECT_LT(its.rank, 4);
    }
    rank |= !faults.slow_ranks.empty();
    message |= !faults.late_messages.empty();
    full |= faults.disk_bytes > 0;
    cut |= faults.power_cut_events > 0;
    EXPECT_EQ(faults.text(), draw_faults(seed, targets).text());
  }
  EXPECT_TRUE(slow && fails && rank && message && full && cut);
}

TEST(RehearsalFaults, NeedEveryRank) {
  RehearsalRequest request = request_of(kSettings[2]);
  request.mirrored = true;
  EXPECT_THROW(FaultCampaign{request}, Error);
}

}  // namespace rehearsal_faults_test
}  // namespace ziggurat
