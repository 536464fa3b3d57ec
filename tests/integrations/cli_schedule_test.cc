// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_schedule_test.cc: a run follows the schedule that `ziggurat schedule`
// shows, over a resume too; what changed at a resume is said.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_schedule_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

const Arguments kOneCycle{"--schedule",     "OneCycle", "--cycle-min-lr",          "1e-4",
                          "--cycle-max-lr", "1e-2",     "--cycle-first-step-size", "2"};
const Arguments kGroups{"--param-groups", "*.bias:lr-scale=3,beta2=0.9;wte.*:weight-decay=0"};

class CliSchedule : public ::testing::Test {
 protected:
  Output train(const std::string& store, int steps, const Arguments& more) {
    Output output = ziggurat(folder_.path(), tiny_train(folder_, store, steps) + more);
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return output;
  }
  std::vector<double> rates_in(const std::string& report) {
    const auto json = nlohmann::json::parse(contents(report));
    std::vector<double> rates;
    for (const auto& step : json.at("steps")) rates.push_back(step.at("learning_rate"));
    return rates;
  }
  TemporaryFolder folder_;
};

TEST_F(CliSchedule, ARunTakesTheRatesThatTheCommandShows) {
  const Arguments flags = kOneCycle + Arguments{"--steps", "6"};
  const Output shown =
      ziggurat(folder_.path(), Arguments{"schedule", "--json", folder_ / "shown.json"} + flags);
  ASSERT_EQ(shown.exit_code, 0) << shown.err;
  train("store", 6, flags + Arguments{"--json", folder_ / "run.json"});
  const std::vector<double> expected = rates_in(folder_ / "shown.json");
  const std::vector<double> got = rates_in(folder_ / "run.json");
  ASSERT_EQ(got.size(), 6U);
  ASSERT_EQ(expected.size(), 6U);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_FLOAT_EQ(static_cast<float>(got[i]), static_cast<float>(expected[i])) << i;
  EXPECT_GT(got[2], 10 * got[0]);
}

TEST_F(CliSchedule, TheTableHasTheFirstStepAndTheLast) {
  const Output output =
      ziggurat(folder_.path(), {"schedule", "--schedule", "cosine", "--steps", "5000"});
  ASSERT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, AllOf(HasSubstr("\n         1  6e-05 "), HasSubstr("\n      5000  "),
                                HasSubstr("####")));
  const Output typo = ziggurat(folder_.path(), {"schedule", "--schedule", "cosin"});
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_THAT(typo.err, AllOf(HasSubstr("--schedule cosin"), HasSubstr("WarmupCosineLR")));
}

TEST_F(CliSchedule, AResumedRunGoesOnWithItsScheduleBitForBit) {
  const Arguments flags = Arguments{"--schedule", "WarmupCosineLR",    "--warmup-num-steps",
                                    "2",          "--total-num-steps", "6"} +
                          kGroups;
  const auto whole = loss_bits(train("whole", 6, flags).out);
  train("parts", 3, flags);
  const Output rest = train("parts", 6, flags);
  for (const auto& [step, bits] : loss_bits(rest.out)) EXPECT_EQ(bits, whole.at(step)) << step;
  EXPECT_THAT(rest.out, ::testing::Not(HasSubstr("changed: schedule")));
}

TEST_F(CliSchedule, AnotherScheduleAtAResumeIsAllowedAndSaid) {
  train("store", 2, {});
  const Output other = train("store", 3, Arguments{"--schedule", "cosine"} + kGroups);
  EXPECT_THAT(other.out, AllOf(HasSubstr("changed: schedule constant -> cosine"),
                               HasSubstr("changed: param-groups none -> *.bias:lr-scale=3")));
}

TEST_F(CliSchedule, MomentumAndGroupsReachTheEngine) {
  const auto with_both = loss_bits(train("a", 5, kOneCycle + kGroups).out);
  const auto without_groups = loss_bits(train("b", 5, kOneCycle).out);
  const auto without_momentum =
      loss_bits(train("c", 5, kOneCycle + Arguments{"--cycle-momentum", "false"}).out);
  EXPECT_NE(with_both, without_groups);
  EXPECT_NE(without_groups, without_momentum);
}

}  // namespace cli_schedule_test
}  // namespace ziggurat::test
