// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_bits_test.cc: what the command is told of placement, type, format, workers
// and SIMD target reaches the engine and never changes a bit of the loss. Every combination is
// compared in tests/core (EveryPlacement, EveryFormat, EverySweep, EngineDtype).
#include <gtest/gtest.h>

#include "base/numerics/simd_target.h"
#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace {

constexpr int kSteps = 6;

class CliBits : public testing::Test {
 protected:
  std::map<int, std::string> run(const Arguments& more, const Environment& environment = {}) {
    const Output output = ziggurat(
        folder_.path(), tiny_train(folder_, "store-" + std::to_string(++runs_), kSteps) + more,
        environment);
    EXPECT_EQ(output.exit_code, 0) << output.err;
    last_ = output.out;
    return loss_bits(output.out);
  }

  TemporaryFolder folder_;
  int runs_ = 0;
  std::string last_;  // what the last run printed
};

TEST_F(CliBits, AreTheSameWhereverStateIsForAnyNumberOfWorkersAndSimdTarget) {
  const auto expected = run({});
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(kSteps));
  EXPECT_NE(expected.at(1), expected.at(kSteps));
  EXPECT_EQ(run({"--placement", "all=nvme", "--threads", "1", "--slots", "1"},
                {{"ZIGGURAT_SIMD", "scalar"}}),
            expected);
  EXPECT_EQ(run({"--placement", "all=device", "--device-memory", "32MiB", "--threads", "3",
                 "--activation-checkpointing", "off"}),
            expected);
}

TEST_F(CliBits, OfFp32AreTheirOwnAndDoNotDependOnPlacement) {
  const Arguments fp32{"--dtype", "fp32"};
  const auto expected = run(fp32);
  EXPECT_EQ(run(fp32 + Arguments{"--placement", "all=host"}), expected);
  EXPECT_NE(run({}), expected);
}

// Attempts are skipped until the gradients fit; where state lives, and whether updates begin before
// that is known, changes nothing.
TEST_F(CliBits, OfFp16DoNotDependOnPlacementNorOnGuessesThatOverflowRefutes) {
  const Arguments fp16{"--dtype", "fp16", "--initial-scale-power", "22"};
  run(fp16);
  const auto expected = attempt_bits(last_);
  ASSERT_GT(expected.size(), kSteps + 2U) << last_;
  EXPECT_NE(last_.find("skipped: its gradients overflow"), std::string::npos) << last_;
  run(fp16 + Arguments{"--placement", "all=nvme", "--speculate", "always"});
  EXPECT_EQ(attempt_bits(last_), expected);
}

// The norm is above 2.1 in the first steps and stays around it.
TEST_F(CliBits, DoNotDependOnUpdatesBeforeTheNormNorOnRecordsKept) {
  const auto expected = run({"--clip", "2.1", "--speculate", "never"});
  EXPECT_EQ(run({"--clip", "2.1", "--speculate", "always", "--host-memory", "2MiB"}), expected);
  EXPECT_NE(run({"--clip", "0"}), expected);
}

TEST_F(CliBits, OfSplitMastersAreThoseOfFp32MastersAndOfEightBitsAreNot) {
  const Arguments lion{"--optimizer", "lion", "--lr", "1e-4"};
  const auto expected = run(lion);
  EXPECT_EQ(run(lion + Arguments{"--state-format", "split"}), expected);
  EXPECT_NE(run(lion + Arguments{"--state-format", "8bit"}), expected);
}

TEST_F(CliBits, AgreeAmongThemselvesWhereTheMatrixLibraryHasNoBf16) {
  const Environment avx2{{"ONEDNN_MAX_CPU_ISA", "AVX2"}};
  const auto expected = run({}, avx2);
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(kSteps));
  EXPECT_EQ(run({"--placement", "all=nvme", "--threads", "1"}, avx2), expected);
}

TEST_F(CliBits, AnUnknownSimdTargetIsAnErrorThatListsTheKnown) {
  const Output output =
      ziggurat(folder_.path(), tiny_train(folder_, "store", 1), {{"ZIGGURAT_SIMD", "abacus"}});
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_NE(output.err.find("abacus"), std::string::npos) << output.err;
  EXPECT_NE(output.err.find(std::string(simd_targets().front())), std::string::npos) << output.err;
}

}  // namespace
}  // namespace ziggurat::test
