// SPDX-License-Identifier: Apache-2.0
// tests/integrations/measure_result_test.cc: medians, ratios and predictions; what fio said; the
// fragment that two programs load; a page that is well-formed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "integrations/measure/html_report.h"
#include "integrations/measure/result_json.h"
#include "integrations/measure/svg.h"
#include "integrations/measure/table.h"
#include "integrations/measure/tune.h"

namespace ziggurat::measure {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Measurement measured(double gb_per_s) {
  Measurement round;
  round.seconds = 5;
  round.read_bytes = static_cast<std::uint64_t>(gb_per_s * 5e9);
  round.io_cpu_s = 0.05;
  round.gb_per_tenth.assign(51, gb_per_s / 10);
  for (int i = 0; i < 100; ++i) round.latency.add(std::chrono::microseconds(300 + i * i));
  return round;
}

Row row_of(Workload workload, double gb_per_s) {
  Row row;
  row.workload = workload;
  row.rounds = {measured(gb_per_s)};
  if (workload == Workload::kPrefetch)
    row.rounds[0].deadlines = Deadlines{.units = 10, .missed = 1};
  if (workload == Workload::kRead) {
    row.fio = {{.gb_per_s = 2.0, .cpu_s_per_gb = 0.01, .depth = 16}};
    row.fio_work = "the same work";
  }
  return row;
}

BenchResult sample() {
  BenchResult result;
  result.cpu_model = "CPU <&\">";
  result.started_at = "2026-11-21T12:00:00Z";
  result.rounds = 1;
  result.model = {"2B", 2e9, 20};
  result.adam_alone_gb_per_s = 50;
  SetResult set;
  set.label = "/data/<a&b>";
  set.paths = {set.label};
  set.drives.resize(1);
  set.drives[0].device = "/dev/x";
  set.drives[0].filesystem = "ext4";
  set.engines = {"io_uring"};
  set.block_bytes = 1 << 20;
  set.depth = {{{{64, 32}, {4, 4}, {16, 8}}}};
  set.adam_alone_gb_per_s = {50};
  set.fio_how = "fio-3 & co";
  for (std::size_t i = 0; i < kWorkloads; ++i)
    set.rows.push_back(row_of(static_cast<Workload>(i), 1.5 + static_cast<double>(i)));
  set.tune = TuneResult{.cells = {{131072, 2, 1, 2, 1.5}, {1048576, 16, 3, 4, 3.5}},
                        .read = {1048576, 16, 3},
                        .write = {1048576, 8, 4},
                        .mix = {524288, 32, 3.5}};
  result.sets = {set};
  return result;
}

TEST(BenchRow, FiguresAreMediansAndRatiosAreTakenRoundByRound) {
  Row row;
  row.rounds = {measured(1), measured(4), measured(2)};
  row.fio = {{.gb_per_s = 2}, {.gb_per_s = 4}, {.gb_per_s = 1}};
  EXPECT_DOUBLE_EQ(row.gb_per_s(), 2);
  EXPECT_DOUBLE_EQ(row.median().gb_per_s(), 2);
  EXPECT_DOUBLE_EQ(*row.fio_gb_per_s(), 2);
  EXPECT_DOUBLE_EQ(*row.ratio(), 1.0) << "median of 0.5, 1.0 and 2.0";
  row.fio.clear();
  EXPECT_FALSE(row.ratio());
}

TEST(BenchRow, ADoubtOfAnyRoundIsTheRows) {
  Row row;
  row.rounds = {measured(1), measured(2), measured(3)};
  row.rounds[2].flags = {{Doubt::kCached, true, "seen once"}};
  EXPECT_TRUE(refused(row.flags()));
}

TEST(BenchMeasurement, SecondsAreWholeOnes) {
  Measurement round = measured(2);
  EXPECT_EQ(round.per_second().size(), 5U);
  EXPECT_NEAR(round.per_second()[4], 2, 1e-9);
  round.seconds = 0.9;
  round.gb_per_tenth.resize(9);
  EXPECT_TRUE(round.per_second().empty());
}

TEST(BenchResult, PredictsTheOptimizersStepFromTheSweep) {
  BenchResult result = sample();
  const double sweep = result.sets[0].find(Workload::kSweepAdam)->gb_per_s();
  EXPECT_DOUBLE_EQ(*optimizer_seconds(result.sets[0], result.model), 2e9 * 24 / (sweep * 1e9));
  for (Row& row : result.sets[0].rows)
    row.rounds[0].flags = {{Doubt::kZeros, true, "nothing there"}};
  EXPECT_FALSE(optimizer_seconds(result.sets[0], result.model)) << "not from a refused figure";
}

TEST(BenchResult, JsonHasEachRowWithItsSeriesHistogramAndFlags) {
  const auto object = json::parse(to_json(sample()).dump());
  const json& rows = object.at("sets").at(0).at("rows");
  ASSERT_EQ(rows.size(), kWorkloads);
  for (std::size_t i = 0; i < kWorkloads; ++i) {
    EXPECT_EQ(rows[i].at("workload"), key_of(static_cast<Workload>(i)));
    const json& round = rows[i].at("rounds").at(0);
    EXPECT_EQ(round.at("gb_per_second").size(), 5U);
    EXPECT_FALSE(round.at("latency").at("buckets_from_to_count").empty());
    EXPECT_TRUE(rows[i].at("flags").is_array());
    EXPECT_FALSE(rows[i].at("refused").get<bool>());
  }
  EXPECT_DOUBLE_EQ(rows[0].at("fio_ratio").get<double>(), 0.75);
  EXPECT_TRUE(rows[1].at("fio_ratio").is_null());
}

TEST(BenchProfile, KeepsWhatIsBelievedAndNothingElse) {
  BenchResult result = sample();
  result.sets[0].rows[1].rounds[0].flags = {{Doubt::kUnsteady, false, "it drifts"}};
  result.sets[0].rows[2].rounds[0].flags = {{Doubt::kCached, true, "a memcpy"}};
  MachineProfile profile = updated_profile({}, result);
  ASSERT_EQ(profile.drives.size(), 1U);
  EXPECT_DOUBLE_EQ(profile.drives[0].read_gb_per_s, 1.5);
  EXPECT_DOUBLE_EQ(profile.drives[0].write_gb_per_s, 2.5);
  EXPECT_EQ(profile.drives[0].mix_gb_per_s, 0) << "refused";
  EXPECT_THAT(profile.drives[0].flags, ElementsAre("unsteady", "cached"));
  EXPECT_EQ(profile.drives[0].block_bytes, 524'288U) << "as tuned";
  result.sets[0].rows[0].rounds[0].flags = {{Doubt::kHole, true, "a hole"}};
  EXPECT_TRUE(updated_profile({}, result).drives.empty()) << "nothing to plan with";
}

TEST(BenchProfile, TheFragmentIsOursAndItsAioIsDeepSpeeds) {
  const std::string fragment = to_json_text(updated_profile({}, sample()));
  EXPECT_EQ(parse_profile(fragment, "fragment").aio->queue_depth, 32U);
  const json aio = json::parse(fragment).at("aio");
  std::vector<std::string> keys;
  for (const auto& [key, value] : aio.items()) keys.push_back(key);
  // What DeepSpeed's configuration reads under "aio", in its types.
  EXPECT_THAT(keys,
              testing::UnorderedElementsAre("block_size", "queue_depth", "intra_op_parallelism",
                                            "single_submit", "overlap_events", "use_gds"));
  for (const char* number : {"block_size", "queue_depth", "intra_op_parallelism"})
    EXPECT_TRUE(aio.at(number).is_number_unsigned()) << number;
  for (const char* flag : {"single_submit", "overlap_events", "use_gds"})
    EXPECT_TRUE(aio.at(flag).is_boolean()) << flag;
}

TEST(BenchTune, TakesTheFewestBytesInFlightNearTheBest) {
  const TuneChoice chosen = choose({{1 << 20, 64, 3.00}, {1 << 20, 8, 2.97}, {1 << 18, 8, 2.5}});
  EXPECT_EQ(chosen.depth, 8U);
  EXPECT_EQ(chosen.block_bytes, 1U << 20);
}

TEST(BenchTune, ARowRunsAtTheCheapestOfTheFastestAndTrainingAtTheFewestThatAreNearThem) {
  const DepthChoice chosen =
      choose_depth({{1 << 20, 4, 2.0}, {1 << 20, 8, 2.97}, {1 << 20, 64, 3.0}, {1 << 20, 32, 2.9}});
  EXPECT_EQ(chosen.best, 64U);
  EXPECT_EQ(chosen.enough, 8U);
  const DepthChoice cheaper = choose_depth({{4 << 20, 1, 2.0, 0.001},
                                            {4 << 20, 2, 3.0, 0.009},
                                            {4 << 20, 8, 2.9, 0.004},
                                            {4 << 20, 16, 2.95, 0.005}});
  EXPECT_EQ(cheaper.best, 8U) << "as fast as any, for the least processor time";
  EXPECT_EQ(cheaper.enough, 2U);
  SetResult set;
  set.depth = {{{{64, 32}, {4, 4}, {16, 8}}}};
  EXPECT_EQ(set.training_depth(), 8U) << "the optimizer reads and writes";
  set.depth = {{{{64, 32}, {0, 0}, {0, 0}}}};
  EXPECT_EQ(set.training_depth(), 32U) << "a file that is only read has no mix";
}

TEST(BenchFio, ReadsWhatFioWrites) {
  const char* const text = R"(fio: a warning
{"jobs": [{"error": 0, "usr_cpu": 2.5, "sys_cpu": 7.5, "job_runtime": 2000,
  "read": {"io_bytes": 3000000000, "runtime": 2000,
           "clat_ns": {"percentile": {"50.000000": 250000, "99.000000": 900000}}},
  "write": {"io_bytes": 1000000000, "runtime": 2000, "clat_ns": {}}}]})";
  FioJob job;
  job.kind = IoMix::kMix;
  const FioFigure figure = parse_fio(text, job);
  EXPECT_DOUBLE_EQ(figure.gb_per_s, 2);
  EXPECT_DOUBLE_EQ(figure.cpu_s_per_gb, 0.05);
  EXPECT_DOUBLE_EQ(figure.p99_us, 900);
  EXPECT_THROW(parse_fio("fio: cannot open", {}), Error);
  EXPECT_THROW(parse_fio(R"({"jobs": []})", {}), Error);
}

TEST(BenchTable, KeepsToAHundredColumnsAndNamesEachRow) {
  const BenchResult result = sample();
  std::string all;
  for (const std::string& line : table(result)) {
    EXPECT_LE(line.size(), 100U) << line;
    all += line + "\n";
  }
  for (const Row& row : result.sets[0].rows) EXPECT_THAT(all, HasSubstr(to_string(row.workload)));
  EXPECT_THAT(all, HasSubstr("of each step on this drive"));
}

TEST(BenchTable, NamesTheDepthsThatWereMeasured) {
  SetResult set = sample().sets[0];
  EXPECT_EQ(depth_text(set), "blocks of 1.0 MiB, in flight 64 (read), 4 (write), 16 (mix)");
  set.depth[IoMix::kWrite] = {};  // of a file that is only read
  EXPECT_EQ(depth_text(set), "blocks of 1.0 MiB, in flight 64 (read)");
}

TEST(BenchTable, ARefusedFigureIsNotPrinted) {
  BenchResult result = sample();
  result.sets[0].rows[0].rounds[0].flags = {{Doubt::kHole, true, "a hole"}};
  std::string all;
  for (const std::string& line : table(result)) all += line + "\n";
  EXPECT_THAT(all, HasSubstr("REFUSED: hole"));
  EXPECT_THAT(all, Not(HasSubstr("1.50  ")));
}

TEST(BenchReport, HasEveryPlotAndNothingFromOutside) {
  const std::string page = html_report(sample());
  const auto count = [&](const std::string& what) {
    std::size_t found = 0;
    for (std::size_t at = page.find(what); at != std::string::npos; at = page.find(what, at + 1))
      ++found;
    return found;
  };
  EXPECT_EQ(count("<svg class=\"bandwidth\""), kWorkloads);
  EXPECT_EQ(count("<svg class=\"latency\""), kWorkloads);
  EXPECT_EQ(count("<svg class=\"fio\""), 1U);
  EXPECT_EQ(count("<svg class=\"heat\""), 3U);
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("url(")));
  EXPECT_THAT(page, HasSubstr("/data/&lt;a&amp;b&gt;"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace ziggurat::measure
