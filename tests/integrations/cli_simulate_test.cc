// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_simulate_test.cc: `ziggurat simulate` plays the engine that a machine's
// figures make, says what it played, and writes it down.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_simulate_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CliSimulate : public ::testing::Test {
 protected:
  Output simulate(const Arguments& flags) {
    return ziggurat(folder_.path(), Arguments{"simulate"} + flags);
  }
  std::string shown(const Arguments& flags) {
    const Output output = simulate(flags);
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return output.out;
  }
  std::string complaint(const Arguments& flags, int exit_code = 2) {
    const Output output = simulate(flags);
    EXPECT_EQ(output.exit_code, exit_code) << output.out;
    return output.err;
  }
  nlohmann::json json(const Arguments& flags) {
    shown(flags + Arguments{"--json", folder_ / "steps.json"});
    return nlohmann::json::parse(contents(folder_ / "steps.json"));
  }
  TemporaryFolder folder_;
};

const Arguments kSmall{"--model", "4x512x8", "--context", "512"};

TEST_F(CliSimulate, ShowsEachStepBesideThePlan) {
  const std::string out = shown(kSmall + Arguments{"--machine", "4090", "--steps", "2"});
  EXPECT_THAT(out, AllOf(HasSubstr("1 rank on 4090"), HasSubstr("One rank is played."),
                         HasSubstr("bound by"), HasSubstr("copies from host to GPU"),
                         HasSubstr("by `ziggurat plan`'s formulas"), Not(HasSubstr("network"))));
  EXPECT_THAT(out, ::testing::ContainsRegex("\n +1 +[0-9.]+.*\n +2 +[0-9.]+"));
}

double sum_of(const nlohmann::json& report, const char* counter) {
  double sum = 0;
  for (const nlohmann::json& step : report.at("steps"))
    sum += step.at("counters").at(counter).get<double>();
  return sum;
}

/// A step writes all records, and moves each parameter twice.
TEST_F(CliSimulate, CountsTheBytesOfEveryLink) {
  const nlohmann::json report =
      json(kSmall + Arguments{"--machine", "4090", "--activation-checkpointing", "off"});
  const double count = report.at("parameters");
  EXPECT_EQ(report.at("steps").size(), 3U);
  EXPECT_GE(sum_of(report, "nvme_write_bytes"), 3 * 12 * count);
  EXPECT_LE(sum_of(report, "nvme_write_bytes"), 3 * (12 * 1.01 * count + 1e6));
  EXPECT_EQ(sum_of(report, "nvme_read_bytes"), 0) << "64 GB keep all records";
  EXPECT_GE(sum_of(report, "device_to_host_bytes"), 3 * 2 * count);
  EXPECT_EQ(report.at("steps").at(2).at("generation"), 3);
}

TEST_F(CliSimulate, OneRankStandsForManyAndItSaysSo) {
  const Arguments flags = kSmall + Arguments{"--ranks", "64", "--zero-stage", "3"};
  EXPECT_THAT(shown(flags + Arguments{"--play", "one"}),
              AllOf(HasSubstr("Rank 0 is played. The other 63 are taken to do the same"),
                    HasSubstr("the network to other nodes")));
  const nlohmann::json one = json({"--model", "4x512x8", "--ranks", "8", "--zero-stage", "3",
                                   "--play", "one", "--context", "512"});
  const nlohmann::json all = json({"--model", "4x512x8", "--ranks", "8", "--zero-stage", "3",
                                   "--play", "all", "--context", "512"});
  EXPECT_EQ(one.at("ranks_played"), 1);
  EXPECT_EQ(all.at("ranks_played"), 8);
  const double seconds = all.at("seconds");
  EXPECT_NEAR(one.at("seconds").get<double>(), seconds, 0.03 * seconds);
  EXPECT_EQ(sum_of(one, "nvme_write_bytes"), sum_of(all, "nvme_write_bytes"));
}

TEST_F(CliSimulate, ASlowDriveBindsTheStep) {
  write_file(folder_.path() / "slow.json",
             R"({"like": "4090", "drive_bandwidth": 1e8, "name": "slow"})");
  const nlohmann::json slow = json(kSmall + Arguments{"--machine", folder_ / "slow.json"});
  EXPECT_EQ(slow.at("bound_by"), "the node's drives");
  EXPECT_GT(slow.at("seconds").get<double>(), 12 * slow.at("parameters").get<double>() / 1e8);
}

TEST_F(CliSimulate, WritesATraceInVirtualTime) {
  shown(kSmall + Arguments{"--machine", "4090", "--steps", "1", "--trace", folder_ / "trace.json"});
  const nlohmann::json trace = nlohmann::json::parse(contents(folder_ / "trace.json"));
  double last_us = 0;
  int forwards = 0;
  for (const nlohmann::json& event : trace) {
    if (event.at("ph") != "X") continue;
    last_us = std::max(last_us, event.at("ts").get<double>() + event.at("dur").get<double>());
    forwards += event.at("name") == "forward" ? 1 : 0;
  }
  EXPECT_EQ(forwards, 6) << "embedding, 4 layers and the norm";
  EXPECT_GT(last_us, 0);
  EXPECT_LT(last_us, 60e6);
}

TEST_F(CliSimulate, PlaysASeedOfFaultsAndRepeatsIt) {
  const Arguments flags =
      kSmall + Arguments{"--ranks", "2", "--zero-stage", "3", "--faults", "11", "--steps", "2"};
  const std::string out = shown(flags);
  EXPECT_THAT(out, AllOf(HasSubstr("those of seed 11"), HasSubstr("Opened again"),
                         HasSubstr("Everything that must hold does.")));
  EXPECT_EQ(out, shown(flags));
}

TEST_F(CliSimulate, SaysWhatIsWrongWithAQuestion) {
  EXPECT_THAT(complaint({"--machine", "4090", "--ranks", "2"}),
              HasSubstr("4090 has 1 GPUs and no network"));
  EXPECT_THAT(complaint({"--model", "no-such-model"}), HasSubstr("not a known model"));
  EXPECT_THAT(complaint({"--steps", "0"}), HasSubstr("--steps 0"));
  EXPECT_THAT(complaint({"--play", "some"}), HasSubstr("--play some"));
  EXPECT_THAT(complaint({"--model", "4x512x8", "--context", "512", "--ranks", "12", "--zero-stage",
                         "3", "--play", "one"}),
              HasSubstr("--ranks 12: one rank can be played for all only where every node is full; "
                        "give a multiple of 8"));
  EXPECT_THAT(complaint({"--ranks", "2", "--play", "one", "--faults", "3"}),
              HasSubstr("faults strike single ranks"));
  EXPECT_THAT(complaint({"--model", "llama-3-70b", "--machine", "3090"}, 1),
              HasSubstr("is too small"));
}

}  // namespace cli_simulate_test
}  // namespace ziggurat::test
