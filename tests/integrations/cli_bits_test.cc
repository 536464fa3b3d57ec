// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_bits_test.cc: where state lives, how many workers there are and which SIMD
// target runs never change a bit of the loss.
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

const char* const kPlacements[] = {"all=host",
                                   "all=nvme",
                                   "params=nvme,grads=host,optimizer=host",
                                   "params=host,grads=nvme,optimizer=nvme",
                                   "params=device,grads=device,optimizer=host",
                                   "all=device"};

TEST_F(CliBits, DoNotDependOnPlacement) {
  const auto expected = run({});
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(kSteps));
  EXPECT_NE(expected.at(1), expected.at(kSteps));
  for (const char* placement : kPlacements) {
    EXPECT_EQ(run({"--placement", placement, "--device-memory", "32MiB"}), expected) << placement;
  }
}

TEST_F(CliBits, OfFp32DoNotDependOnPlacement) {
  const Arguments fp32{"--dtype", "fp32"};
  const auto expected = run(fp32);
  EXPECT_NE(expected, run({}));
  for (const char* placement : {"all=host", "all=nvme", "all=device"}) {
    EXPECT_EQ(run(fp32 + Arguments{"--placement", placement, "--device-memory", "32MiB"}), expected)
        << placement;
  }
}

// Attempts are skipped until the gradients fit; where state lives, and whether updates begin before
// that is known, changes nothing.
TEST_F(CliBits, OfFp16DoNotDependOnPlacementNorOnGuessesThatOverflowRefutes) {
  const Arguments fp16{"--dtype", "fp16", "--initial-scale-power", "22"};
  run(fp16);
  const auto expected = attempt_bits(last_);
  ASSERT_GT(expected.size(), kSteps + 2U) << last_;
  EXPECT_NE(last_.find("skipped: its gradients overflow"), std::string::npos) << last_;
  for (const Arguments& more : {Arguments{"--placement", "all=host", "--threads", "1"},
                                Arguments{"--placement", "all=nvme"},
                                Arguments{"--placement", "all=device", "--device-memory", "32MiB"},
                                Arguments{"--speculate", "always"},
                                Arguments{"--placement", "all=nvme", "--speculate", "always"}}) {
    run(fp16 + more);
    EXPECT_EQ(attempt_bits(last_), expected) << more[1];
  }
}

TEST_F(CliBits, DoNotDependOnPlacementWithoutClipping) {
  const auto expected = run({"--clip", "0"});
  EXPECT_NE(expected, run({}));
  for (const char* placement : {"all=host", "all=nvme"}) {
    EXPECT_EQ(run({"--clip", "0", "--placement", placement}), expected) << placement;
  }
}

TEST_F(CliBits, DoNotDependOnWorkersBudgetsOrCheckpointing) {
  const auto expected = run({"--threads", "1"});
  EXPECT_EQ(run({"--threads", "2"}), expected);
  EXPECT_EQ(run({"--threads", "3"}), expected);
  EXPECT_EQ(run({"--host-memory", "64MiB", "--device-memory", "64MiB"}), expected);
  EXPECT_EQ(run({"--slots", "1"}), expected);
  EXPECT_EQ(run({"--activation-checkpointing", "off"}), expected);
}

// The norm is above 2.1 in the first steps and stays around it.
TEST_F(CliBits, DoNotDependOnUpdatesBeforeTheNormNorOnRecordsKept) {
  const auto expected = run({"--clip", "2.1", "--speculate", "never"});
  for (const char* host : {"2MiB", "16MiB"}) {
    for (const char* speculate : {"auto", "always"}) {
      EXPECT_EQ(run({"--clip", "2.1", "--speculate", speculate, "--host-memory", host}), expected)
          << speculate << " " << host;
    }
  }
}

TEST_F(CliBits, OfSplitMastersAreThoseOfFp32Masters) {
  for (const Arguments& more : {Arguments{}, Arguments{"--optimizer", "lion", "--lr", "1e-4"}}) {
    const auto expected = run(more);
    EXPECT_EQ(run(more + Arguments{"--state-format", "split"}), expected);
  }
  EXPECT_NE(run({"--optimizer", "lion", "--lr", "1e-4"}), run({}));
}

TEST_F(CliBits, OfEveryFormatDoNotDependOnPlacement) {
  for (const char* format : {"bf16-moments", "8bit", "bf16"}) {
    const auto expected = run({"--state-format", format});
    for (const char* placement : {"all=host", "all=nvme"})
      EXPECT_EQ(run({"--state-format", format, "--placement", placement}), expected) << format;
  }
}

TEST_F(CliBits, DoNotDependOnTheSimdTarget) {
  const auto expected = run({});
  for (const std::string_view target : simd_targets()) {
    EXPECT_EQ(run({}, {{"ZIGGURAT_SIMD", std::string(target)}}), expected) << target;
  }
}

TEST_F(CliBits, AgreeAmongThemselvesWhereTheMatrixLibraryHasNoBf16) {
  const Environment avx2{{"ONEDNN_MAX_CPU_ISA", "AVX2"}};
  const auto expected = run({}, avx2);
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(kSteps));
  EXPECT_EQ(run({"--placement", "all=host"}, avx2), expected);
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
