// SPDX-License-Identifier: Apache-2.0
// tests/integrations/measure_optimizer_test.cc: `ziggurat bench optimizer` as a user meets it:
// every format beside its ceiling, and one clear line for what it cannot do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/numerics/simd_target.h"
#include "optimizer/state_format.h"
#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

Output run(const TemporaryFolder& folder, const Arguments& more) {
  return ziggurat(folder.path(), Arguments{"bench", "optimizer"} + more);
}

TEST(BenchOptimizer, MeasuresEveryFormatBesideItsCeiling) {
  const TemporaryFolder folder;
  const Output output = run(
      folder, {"--params", "1M", "--rounds", "2", "--threads", "1", "--json", folder / "out.json"});
  ASSERT_EQ(output.exit_code, 0) << output.err;
  const json result = json::parse(contents(folder.path() / "out.json"));
  EXPECT_EQ(result.at("optimizer"), "adamw");
  EXPECT_GE(result.at("params").get<std::uint64_t>(), 1'000'000U);
  ASSERT_EQ(result.at("rows").size(), state_format_names().size());
  for (std::size_t i = 0; i < state_format_names().size(); ++i) {
    const json& row = result.at("rows").at(i);
    EXPECT_EQ(row.at("format"), state_format_names()[i]);
    EXPECT_EQ(row.at("isa"), simd_targets().front());
    EXPECT_EQ(row.at("threads"), 1);
    EXPECT_EQ(row.at("seconds").size(), 2U);
    EXPECT_GT(row.at("gb_per_s").get<double>(), 0);
    EXPECT_GT(row.at("ceiling_gb_per_s").get<double>(), 0);
    EXPECT_GT(row.at("share_of_ceiling").get<double>(), 0);
    EXPECT_THAT(output.out, HasSubstr(std::string(state_format_names()[i])));
  }
  EXPECT_EQ(result.at("rows").at(0).at("record_bytes_per_param"), 12);
  EXPECT_EQ(result.at("rows").at(0).at("moved_bytes_per_param"), 28);
  EXPECT_EQ(result.at("rows").at(4).at("moved_bytes_per_param"), 14);
}

TEST(BenchOptimizer, MeasuresEachInstructionSetAndOptimizerThatIsAskedFor) {
  const TemporaryFolder folder;
  for (const std::string_view optimizer : optimizer_names()) {
    const Output output = run(
        folder, {"--params", "1", "--rounds", "1", "--threads", "1", "--format", "8bit", "--isa",
                 "all", "--optimizer", std::string(optimizer), "--json", folder / "out.json"});
    ASSERT_EQ(output.exit_code, 0) << output.err;
    const json result = json::parse(contents(folder.path() / "out.json"));
    std::set<std::string> isas;
    for (const json& row : result.at("rows")) isas.insert(row.at("isa"));
    EXPECT_EQ(isas.size(), simd_targets().size()) << optimizer;
  }
}

TEST(BenchOptimizer, WhatItCannotDoIsOneLineWithWhatItCan) {
  const TemporaryFolder folder;
  const auto complaint = [&](const Arguments& more, int exit_code) {
    const Output output = run(folder, more);
    EXPECT_EQ(output.exit_code, exit_code) << output.err;
    EXPECT_EQ(std::count(output.err.begin(), output.err.end(), '\n'), 1) << output.err;
    return output.err;
  };
  EXPECT_THAT(complaint({"--format", "fp8"}, 2),
              HasSubstr("fp32, bf16-moments, 8bit, split, bf16"));
  EXPECT_THAT(complaint({"--optimizer", "adamax"}, 2),
              HasSubstr("adamw, adam, lion, adagrad, sgd"));
  EXPECT_THAT(complaint({"--isa", "MMX"}, 2), HasSubstr("scalar"));
  EXPECT_THAT(complaint({"--params", "many"}, 2), HasSubstr("like 100M"));
  EXPECT_THAT(complaint({"--params", "0"}, 2), HasSubstr("like 100M"));
  EXPECT_THAT(complaint({"--params", "900B"}, 1), HasSubstr("are free"));
  EXPECT_THAT(complaint({"--threads", "4000"}, 1), HasSubstr("4000"));
}

}  // namespace
}  // namespace ziggurat::test
