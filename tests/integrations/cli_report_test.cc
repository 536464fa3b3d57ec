// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_report_test.cc: the parts of a step sum to it; the table and --json say
// the same; advice is ranked.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/disk_full.h"
#include "base/memory_exhausted.h"
#include "integrations/cli/json_report.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/report.h"
#include "integrations/cli/run_state.h"

namespace ziggurat::cli {
namespace cli_report_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

CounterSnapshot counters(const std::map<Counter, std::uint64_t>& values) {
  Metrics metrics;
  for (const auto& [counter, value] : values) metrics.add(counter, value);
  return CounterSnapshot::of(metrics);
}

/// One second: 0.1 data, 0.2 forward, 0.4 backward, 0.05 optimizer, 0.15 sweep, 0.05 durable, 0.05
/// other.
StepTimes one_second() {
  StepTimes times;
  times.data_s = 0.1;
  times.passes_s = 0.8;
  times.step_call_s = 0.1;
  times.forward_compute_s = 0.2;
  times.backward_compute_s = 0.4;
  times.passes = counters({{Counter::kWaitSweepNs, 150'000'000}});
  times.step_call = counters({{Counter::kWaitDurableNs, 50'000'000}});
  return times;
}

StepRecord record(std::uint64_t step) {
  StepRecord result;
  result.step = step;
  result.loss = 3.0F - 0.01F * static_cast<float>(step);
  result.wall_s = 1.0;
  result.split = split_of(one_second());
  result.counters = counters({{Counter::kNvmeReadBytes, 1'000'000'000},
                              {Counter::kNvmeWriteBytes, 1'000'000'000},
                              {Counter::kNvmeBusyNs, 500'000'000}});
  return result;
}

RunFacts facts() {
  RunFacts result;
  result.parameters = 86'000'000;
  result.tokens_per_step = 2048;
  result.device = Account(160 * kMiB);
  result.device.add(Purpose::kActivations, 100 * kMiB);
  result.host = Account(384 * kMiB);
  result.host.add(Purpose::kParams, 164 * kMiB);
  return result;
}

CounterSnapshot totals_of(const StepLog& log) {
  CounterSnapshot totals;
  for (const StepRecord& one : log.newest()) totals += one.counters;
  return totals;
}

TEST(CliReport, ThePartsOfAStepSumToIt) {
  const StepSplit split = split_of(one_second());
  EXPECT_NEAR(split.optimizer_s, 0.05, 1e-12);
  EXPECT_NEAR(split.other_s, 0.05, 1e-12);
  EXPECT_NEAR(split.waiting_s(), 0.2, 1e-12);
  EXPECT_NEAR(split.wall_s(), 1.0, 1e-12);
}

TEST(CliReport, SteadyStepsLeaveTheFirstOnesOut) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 12; ++step) {
    StepRecord one = record(step);
    if (step <= StepLog::kWarmUpSteps) one.wall_s = 100;
    log.add(one);
  }
  EXPECT_EQ(log.steady().steps, 10U);
  EXPECT_DOUBLE_EQ(log.steady().wall_s, 1.0);
  EXPECT_DOUBLE_EQ(log.steady().nvme_bytes_per_s, 4e9);
  EXPECT_EQ(log.steady().counters[Counter::kNvmeReadBytes], 1'000'000'000U);
  EXPECT_NEAR(log.mean_loss(10), 3.0 - 0.01 * 7.5, 1e-6);
  EXPECT_DOUBLE_EQ(log.recent_wall_s(), 1.0);
}

TEST(CliReport, ALongRunKeepsTotalsAndOnlyTheNewestSteps) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 3 * StepLog::kRecordsMax; ++step) log.add(record(step));
  EXPECT_EQ(log.steps(), 3 * StepLog::kRecordsMax);
  EXPECT_EQ(log.newest().size(), StepLog::kRecordsMax);
  EXPECT_EQ(log.steady().steps, StepLog::kRecordsMax);
}

TEST(CliReport, SkippedStepsAreCountedAndTimedAndNothingElse) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 6; ++step) {
    StepRecord one = record(step);
    one.loss_scale = 1024;
    if (step == 4) {
      StepRecord skipped = one;
      skipped.skipped = true;
      skipped.loss = 99;
      log.add(skipped);
    }
    log.add(one);
  }
  RunFacts with = facts();
  with.loss_scale = 512;
  const RunReport report = make_report(with, log, totals_of(log));
  EXPECT_EQ(report.steps, 6U);
  EXPECT_EQ(report.skipped, 1U);
  EXPECT_EQ(report.first_step, 1U);
  EXPECT_EQ(report.wall_s, 7);
  EXPECT_LT(report.mean_loss_last_10, 3);
  const std::vector<std::string> lines = table(report);
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr("the loss scale is 512; 1 of 7 attempts")));
  EXPECT_EQ(to_json(report).at("skipped"), 1);
  EXPECT_EQ(to_json(report).at("loss_scale"), 512);
  EXPECT_EQ(to_json(log.newest().front()).at("skipped"), false);
}

TEST(CliReport, EachRanksWaitIsSaidOnceInLinesOfOneScreen) {
  StepLog log;
  log.add(record(1));
  RunFacts with = facts();
  constexpr std::size_t kRanks = 12;
  with.ranks.resize(kRanks);
  for (std::size_t rank = 0; rank < kRanks; ++rank)
    with.waited_for_s.push_back(static_cast<double>(rank) / 2);
  std::string said;
  for (const std::string& line : table(make_report(with, log, totals_of(log)))) {
    if (!line.starts_with("  waited for ")) continue;
    EXPECT_LE(line.substr(0, line.find(" (the")).size(), 90U) << line;
    said += line.substr(std::string_view("  waited for ").size()) + "; ";
  }
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    const std::string one = fmt::format("rank {} {:.2f} s", rank, static_cast<double>(rank) / 2);
    const std::size_t at = said.find(one);
    ASSERT_NE(at, said.npos) << one << " in " << said;
    EXPECT_EQ(said.find(one, at + 1), said.npos) << one << " twice in " << said;
  }
}

TEST(CliReport, BytesOfTheDriveAreDividedAsPlacementUsesThem) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 5; ++step) log.add(record(step));
  RunFacts with = facts();
  StepWork work = step_work(with, log.steady());
  EXPECT_EQ(work.sweep_nvme_bytes, 2'000'000'000U);
  EXPECT_EQ(work.forward_nvme_bytes + work.backward_nvme_bytes, 0U);

  with.placement = {Tier::kNvme, Tier::kNvme, Tier::kNvme};
  work = step_work(with, log.steady());
  EXPECT_NEAR(static_cast<double>(work.forward_nvme_bytes), 2e9 * 2 / 34, 2);
  EXPECT_NEAR(static_cast<double>(work.backward_nvme_bytes), 2e9 * 4 / 34, 2);
  EXPECT_NEAR(static_cast<double>(work.sweep_nvme_bytes), 2e9 * 28 / 34, 2);

  with.state.format = StateFormat::kSplit;  // 12 read: the parameter is not in memory
  EXPECT_EQ(step_work(with, log.steady()).sweep_nvme_bytes, work.sweep_nvme_bytes);
  with.placement.params = Tier::kHost;  // 10 read
  work = step_work(with, log.steady());
  EXPECT_NEAR(static_cast<double>(work.sweep_nvme_bytes), 2e9 * 24 / 26, 2);

  with.placement = {Tier::kHost, Tier::kHost, Tier::kHost};
  EXPECT_EQ(step_work(with, log.steady()).sweep_nvme_bytes, 0U);
}

TEST(CliReport, TheTableNamesEveryPartAndTheLimit) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 12; ++step) log.add(record(step));
  const RunReport report = make_report(facts(), log, totals_of(log));
  // Compute 0.75 s with data and optimizer; the sweep's 2 GB at 4 GB/s outlast the 0.2 s of forward
  // by 0.3 s.
  EXPECT_NEAR(report.bound.seconds, 1.05, 1e-9);
  EXPECT_EQ(report.bound.limit, StepLimit::kNvmeForward);
  std::string text;
  for (const std::string& line : table(report)) text += line + "\n";
  for (const char* part : {"device", "160.0 MiB", "host", "nvme", "NVMe read", "NVMe write",
                           "host to device", "device to host", "data", "forward", "backward",
                           "optimizer", "waiting: sweep", "waiting: params", "waiting: grads",
                           "waiting: durable", "binding limit: NVMe", "tokens/s"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

// A neighbour that takes the processor for some steps makes them slow, and no less slow to beat.
TEST(CliReport, TheBoundRestsOnEachPartsBestAndSaysSo) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 12; ++step) {
    StepTimes times = one_second();
    if (step % 2 == 0) times.forward_compute_s += 0.3;
    if (step % 3 == 0) times.backward_compute_s += 0.3;
    StepRecord one = record(step);
    one.split = split_of(times);
    log.add(one);
  }
  RunFacts with = facts();
  RunReport report = make_report(with, log, totals_of(log));
  EXPECT_NEAR(report.bound.compute_s, 0.75, 1e-9);
  EXPECT_NEAR(report.bound.seconds, 1.05, 1e-9);
  EXPECT_THAT(table(report), Contains(AllOf(HasSubstr("its best of 10 steps"),
                                            HasSubstr("the speed of the drive in its best step"),
                                            HasSubstr("the machine profile does not have it"))));
  with.profiled_nvme_bytes_per_s = 5e9;
  report = make_report(with, log, totals_of(log));
  EXPECT_NEAR(report.bound.seconds, 0.2 + 0.2 + 0.4 + 0.15, 1e-9);
  EXPECT_THAT(table(report), Contains(HasSubstr("the speed of the drive in the machine profile")));
  // The drive has done better than its profile: that was no limit.
  with.profiled_nvme_bytes_per_s = 3e9;
  report = make_report(with, log, totals_of(log));
  EXPECT_NEAR(report.bound.seconds, 1.05, 1e-9);
  EXPECT_THAT(table(report), Contains(HasSubstr("(the machine profile has less, 3.00 GB/s)")));
}

TEST(CliReport, WhatWasGuessedKeptAndWastedHasItsLinesAndOnlyThen) {
  const auto text_of = [](const CounterSnapshot& more) {
    StepLog log;
    for (std::uint64_t step = 1; step <= 12; ++step) {
      StepRecord one = record(step);
      if (step > 4) one.counters += more;
      log.add(one);
    }
    std::string text;
    for (const std::string& line : table(make_report(facts(), log, totals_of(log))))
      text += line + "\n";
    return text;
  };
  EXPECT_THAT(text_of({}), AllOf(Not(HasSubstr("before the norm was known")),
                                 Not(HasSubstr("kept in host memory")),
                                 Not(HasSubstr("read again")), Not(HasSubstr("NUMA"))));
  const std::string text = text_of(counters({{Counter::kSpeculations, 1},
                                             {Counter::kSpeculationWasteBytes, kMiB},
                                             {Counter::kRecordCacheHits, 3},
                                             {Counter::kRecordCacheHitBytes, 6 * kMiB},
                                             {Counter::kStateReadAgainBytes, 2 * kMiB},
                                             {Counter::kLeasesOnNode, 5},
                                             {Counter::kLeasesElsewhere, 1},
                                             {Counter::kJobsOnNode, 4}}));
  EXPECT_THAT(text,
              HasSubstr("40 of 48 leases and 32 of 32 jobs were on the NUMA node of their chunk"));
  EXPECT_THAT(text, HasSubstr("8 of 12 steps were updated before the norm was known; 0 of them "
                              "were made again, and 8.0 MiB were moved in vain"));
  EXPECT_THAT(text, HasSubstr("48.0 MiB"));
  EXPECT_THAT(text, HasSubstr("records were kept in host memory"));
  EXPECT_THAT(text, ContainsRegex("read again +16.0 MiB +.*needed sooner"));
}

TEST(CliReport, TheStatesTrafficIsShownAParameterAndStep) {
  StepLog log;
  for (std::uint64_t step = 1; step <= 4; ++step) {
    StepRecord one = record(step);
    one.counters += counters(
        {{Counter::kStateReadBytes, 860'000'000}, {Counter::kStateWriteBytes, 1'032'000'000}});
    log.add(one);
  }
  RunFacts with = facts();
  with.state = {OptimizerKind::kAdam, StateFormat::kSplit};
  EXPECT_THAT(table(make_report(with, log, totals_of(log))),
              Contains("state over NVMe: each step read 10.00 and wrote 12.00 bytes per parameter; "
                       "adam in split"));
}

TEST(CliReport, TheBoundOfARunIsThatOfItsStepsThatWaitedForTheNormAndOfThoseThatDidNot) {
  const auto bound_of = [](std::uint64_t speculated, std::uint64_t redone) {
    StepLog log;
    for (std::uint64_t step = 1; step <= 2 + 10; ++step) {
      StepRecord one = record(step);
      if (step > 12 - speculated) one.counters += counters({{Counter::kSpeculations, 1}});
      if (step > 12 - redone) one.counters += counters({{Counter::kSpeculationsRedone, 1}});
      log.add(one);
    }
    return make_report(facts(), log, totals_of(log)).bound;
  };
  EXPECT_NEAR(bound_of(0, 0).seconds, 1.05, 1e-9);
  EXPECT_NEAR(bound_of(10, 0).seconds, 0.75, 1e-9) << "the sweep hides under all of the step";
  EXPECT_EQ(bound_of(10, 0).limit, StepLimit::kCompute);
  EXPECT_NEAR(bound_of(5, 0).seconds, 0.9, 1e-9);
  EXPECT_NEAR(bound_of(10, 10).seconds, 1.05, 1e-9);
}

TEST(CliReport, JsonIsValidAfterEveryStep) {
  const std::string path =
      (std::filesystem::current_path() / fmt::format("cli-report-{}.json", ::getpid())).string();
  const auto parsed = [&] {
    std::ifstream file(path);
    return nlohmann::json::parse(file);
  };
  StepLog log;
  {
    JsonReport report(path, {{"model", "2x64x2"}});
    EXPECT_EQ(parsed().at("steps").size(), 0U);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      log.add(record(step));
      report.add_step(to_json(record(step)));
      EXPECT_EQ(parsed().at("steps").size(), step);
    }
    report.finish(to_json(make_report(facts(), log, totals_of(log))));
  }
  const nlohmann::json file = parsed();
  EXPECT_EQ(file.at("run").at("model"), "2x64x2");
  EXPECT_EQ(file.at("steps").at(1).at("step"), 2);
  EXPECT_EQ(file.at("steps").at(1).at("counters").at("nvme_read_bytes"), 1'000'000'000);
  EXPECT_EQ(file.at("steps").at(0).at("loss_bits").get<std::string>().size(), 10U);
  EXPECT_EQ(file.at("total").at("counters").at("nvme_read_bytes"), 3'000'000'000);
  EXPECT_EQ(file.at("total").at("tiers").at("device").at("peak_bytes"), 100 * kMiB);
  const nlohmann::json& bound = file.at("total").at("bound");
  EXPECT_THAT(bound.at("limit").get<std::string>(), HasSubstr("NVMe"));
  EXPECT_NEAR(bound.at("share").get<double>(), 1.05, 1e-9);  // of steps of one second
  std::filesystem::remove(path);
}

// A limit on files stands for a disk that is full.
TEST(CliReport, JsonThatHasNoRoomIsGivenUpAndStaysValid) {
  const std::string path =
      (std::filesystem::current_path() / fmt::format("cli-full-{}.json", ::getpid())).string();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const sighandler_t handler = ::signal(SIGXFSZ, SIG_IGN);
  std::size_t steps = 0;
  ::testing::internal::CaptureStderr();
  {
    JsonReport report(path, {{"model", "2x64x2"}});
    const rlimit small{.rlim_cur = 5000, .rlim_max = before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    for (; report.whole() && steps < 1000; ++steps) report.add_step(to_json(record(steps + 1)));
    report.add_step(to_json(record(steps + 1)));
    report.finish({{"steps", steps}});
    EXPECT_FALSE(report.whole());
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  }
  ::signal(SIGXFSZ, handler);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, AllOf(HasSubstr(path), HasSubstr("EFBIG"), HasSubstr("training goes on")));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  std::ifstream file(path);
  const nlohmann::json report = nlohmann::json::parse(file);
  EXPECT_EQ(report.at("steps").size(), steps - 1);
  EXPECT_FALSE(report.contains("total"));
  std::filesystem::remove(path);
}

TEST(CliRunState, IdentityAndBlobComeBackAsTheyWent) {
  const RunIdentity identity{.model = gpt::parse_model("2x64x2"),
                             .data_hash = 0xdeadbeef01234567,
                             .seed = 3,
                             .batch = 2,
                             .accumulate = 4,
                             .context = 32};
  const RunIdentity parsed = RunIdentity::parse(identity.text());
  EXPECT_EQ(parsed.text(), identity.text());
  EXPECT_EQ(parsed.model, identity.model);
  EXPECT_THROW(RunIdentity::parse("something else"), Error);
  EXPECT_THROW(RunIdentity::parse("model=2x64x2 data=zz seed=1 batch=1 accumulate=1 context=1"),
               Error);

  RunState state{
      .steps_done = 17, .attempts = 19, .loss_scale = {}, .settings = {{"lr", "0.0006"}}};
  RunState decoded = RunState::decode(state.encode());
  EXPECT_EQ(decoded.steps_done, 17U);
  EXPECT_EQ(decoded.attempts, 19U);
  EXPECT_EQ(decoded.loss_scale, std::nullopt);
  EXPECT_EQ(decoded.settings, state.settings);
  state.loss_scale = {.scale = 0x1p40 / 3, .hysteresis_left = 1, .steps_since_overflow = 5};
  EXPECT_EQ(RunState::decode(state.encode()).loss_scale, state.loss_scale);
  EXPECT_THROW(RunState::decode(std::as_bytes(std::span("nonsense", 8))), Error);
}

// Stores made before steps could be skipped.
TEST(CliRunState, WithoutAttemptsThereWasOneForEachStep) {
  const std::string_view text = R"({"version":1,"steps_done":17,"settings":{}})";
  EXPECT_EQ(RunState::decode(std::as_bytes(std::span(text))).attempts, 17U);
}

TEST(CliRunState, ChangesAreNamedAndNothingElse) {
  EXPECT_THAT(differences({{"lr", "1"}, {"clip", "1"}, {"gone", "x"}},
                          {{"lr", "2"}, {"clip", "1"}, {"fresh", "y"}}),
              ::testing::ElementsAre("lr 1 -> 2"));
}

TrainOptions tiny() {
  Settings settings(train_settings());
  settings.apply_flag("data", "text");
  settings.apply_flag("store", "state");
  settings.apply_flag("model", "2x64x2");
  settings.apply_flag("context", "32");
  settings.apply_flag("activation-checkpointing", "off");
  settings.apply_flag("device-memory", "1MiB");
  return read_train_options(settings);
}

TEST(CliAdvice, ADeviceTooSmallIsToldTheSmallestAndWhatHelpsMostFirst) {
  const TrainOptions options = tiny();
  try {
    plan_run(run_request(options, 2));
    FAIL() << "1 MiB was enough";
  } catch (const MemoryExhausted& error) {
    EXPECT_EQ(error.shortage().budget, MemoryBudget::kDevice);
    EXPECT_THAT(error.what(), HasSubstr("`device_memory` 1.0 MiB"));
    EXPECT_THAT(error.what(), HasSubstr("smallest"));
    const std::vector<std::string> lines = advice(error, options, 2);
    ASSERT_GE(lines.size(), 3U);
    EXPECT_THAT(lines.front(), HasSubstr("--device-memory"));
    EXPECT_THAT(lines, Contains(HasSubstr("--activation-checkpointing block")));
    EXPECT_THAT(lines, Not(Contains(HasSubstr("optimizer=host"))));  // it is not on the device
  }
}

TEST(CliAdvice, AHostTooSmallIsToldWhichClassToMove) {
  TrainOptions options = tiny();
  // Whatever its words.
  const MemoryExhausted error({.budget = MemoryBudget::kHost, .had_bytes = kMiB}, "device");
  options.engine.placement = {Tier::kHost, Tier::kHost, Tier::kHost};
  EXPECT_THAT(advice(error, options, 2).front(), HasSubstr("optimizer=nvme"));
  options.engine.placement = {Tier::kHost, Tier::kNvme, Tier::kNvme};
  EXPECT_THAT(advice(error, options, 2).front(), HasSubstr("params=nvme"));
  EXPECT_THAT(advice(error, options, 2), Contains(HasSubstr("--host-memory")));
}

TEST(CliAdvice, SizesAreThoseOfTheFormat) {
  TrainOptions options = tiny();
  const auto written = [&](StateFormat format) {
    options.engine.optimizer.state.format = format;
    return static_cast<double>(write_plan(options).per_step_bytes);
  };
  const double fp32 = written(StateFormat::kFp32);
  EXPECT_NEAR(written(StateFormat::k8Bit) / fp32, 6.03125 / 12, 1e-5);
  EXPECT_EQ(written(StateFormat::kSplit), fp32);
  EXPECT_NEAR(written(StateFormat::kBf16) / fp32, 0.5, 1e-5);
}

// Slices at home, and whole units beside them while they are used.
TEST(CliAdvice, SizesOfARankAreThoseOfItsSlices) {
  TrainOptions options = tiny();
  const Strategy four = resolve({.zero_stage = 3}, 4);
  EXPECT_EQ(write_plan(options, four).per_step_bytes, write_plan(options).per_step_bytes / 4);
  const Strategy copies = resolve({.zero_stage = 0}, 4);
  EXPECT_EQ(write_plan(options, copies).per_step_bytes, write_plan(options).per_step_bytes);
}

// The numbers say which budget, whatever the message says.
TEST(CliAdvice, TheSmallestThatWorksComesFirst) {
  const MemoryExhausted error(
      {.budget = MemoryBudget::kHost, .had_bytes = kMiB, .smallest_bytes = 7 * kMiB}, "too small");
  EXPECT_THAT(advice(error, tiny(), 2).front(),
              HasSubstr("--host-memory 7MiB: this is the smallest for these settings"));
}

TEST(CliAdvice, AFullDiskIsNoQuestionOfMemory) {
  const DiskFull error("state/rank-0", "state: no space", ENOSPC);
  EXPECT_THAT(advice(error, tiny(), 2), Contains(HasSubstr("--slots 1")));
  EXPECT_TRUE(advice(Error(ErrorCode::kUnavailable, "in use"), tiny(), 2).empty());
}

// Another --store does not help a report, nor a checkpoint.
TEST(CliAdvice, ADiskThatIsNotTheStoresGetsNoAdviceAboutTheStore) {
  EXPECT_TRUE(advice(DiskFull("stated/file", "no space", ENOSPC), tiny(), 2).empty());
  EXPECT_TRUE(advice(Error(ErrorCode::kResourceExhausted, "no space", ENOSPC), tiny(), 2).empty());
}

}  // namespace cli_report_test
}  // namespace ziggurat::cli
