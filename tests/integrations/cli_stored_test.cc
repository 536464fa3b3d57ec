// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_stored_test.cc: `export` and `sample` of a state that somebody else has: a
// checkpoint, a store of several ranks, a store whose run goes on meanwhile and never notices.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_stored_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class CliStored : public ::testing::Test {
 protected:
  /// The file's bytes.
  std::string exported(const std::string& from) {
    const std::string file = folder_ / "model.safetensors";
    const Output output =
        ziggurat(folder_.path(), {"export", "--store", from, "--to", file, "--force"});
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return contents(file);
  }
  Output said(const std::string& from) {
    return ziggurat(folder_.path(),
                    {"sample", "--store", from, "--prompt", "and the", "--bytes", "9"});
  }

  TemporaryFolder folder_;
};

std::string steps_of(const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  return nlohmann::json::parse(file.substr(8, length)).at("__metadata__").at("steps");
}

TEST_F(CliStored, StateInACheckpointIsThatOfTheStore) {
  for (const char* ranks : {"1", "2"}) {
    const std::string store = folder_ / (std::string("store") + ranks);
    const std::string checkpoints = folder_ / (std::string("checkpoints") + ranks);
    const Output run =
        ziggurat(folder_.path(), tiny_train(folder_, std::string("store") + ranks, 4) +
                                     Arguments{"--nproc", ranks, "--checkpoint-dir", checkpoints,
                                               "--checkpoint-every", "2", "--zero-stage", "3"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const std::string weights = exported(store);
    EXPECT_EQ(steps_of(weights), "4");
    EXPECT_EQ(exported(checkpoints), weights);  // the newest
    EXPECT_EQ(exported(checkpoints + "/step-000000004"), weights);
    EXPECT_NE(exported(checkpoints + "/step-000000002"), weights);
    const Output spoken = said(store);
    ASSERT_EQ(spoken.exit_code, 0) << spoken.err;
    EXPECT_THAT(spoken.out, StartsWith("and the"));
    EXPECT_EQ(said(checkpoints).out, spoken.out);
  }
}

TEST_F(CliStored, StateOfARunThatGoesOnIsThatOfOneOfItsSteps) {
  const Output whole = ziggurat(folder_.path(), tiny_train(folder_, "whole", 12));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  std::string weights;
  Output run;
  {
    Process owner(folder_.path(), tiny_train(folder_, "store", 100'000));
    ASSERT_TRUE(owner.wait_for_output("step 3 loss-bits")) << owner.err();
    for (int look = 0; look < 5; ++look) weights = exported(folder_ / "store");
    EXPECT_EQ(said(folder_ / "store").exit_code, 0);
    EXPECT_FALSE(owner.ended());
    owner.signal(SIGTERM);
    run = owner.wait();
  }
  EXPECT_EQ(run.exit_code, 130) << run.err;
  // It was never disturbed.
  std::map<int, std::string> losses = loss_bits(run.out);
  for (const auto& [step, bits] : loss_bits(whole.out)) EXPECT_EQ(losses[step], bits) << step;
  // And what was read is what a run has that ends there.
  const int step = std::stoi(steps_of(weights));
  EXPECT_GE(step, 2);
  const Output until = ziggurat(folder_.path(), tiny_train(folder_, "until", step));
  ASSERT_EQ(until.exit_code, 0) << until.err;
  EXPECT_TRUE(exported(folder_ / "until") == weights);
}

TEST_F(CliStored, StateIsHeldInNoMoreMemoryThanParametersNeed) {
  ASSERT_EQ(ziggurat(folder_.path(), tiny_train(folder_, "store", 1)).exit_code, 0);
  const Output small =
      ziggurat(folder_.path(), {"sample", "--store", folder_ / "store", "--host-memory", "100KiB"});
  EXPECT_EQ(small.exit_code, 1);
  EXPECT_THAT(small.err, HasSubstr("--host-memory 100.0 KiB is too small; the smallest"));
  EXPECT_EQ(ziggurat(folder_.path(), {"sample", "--store", folder_ / "store", "--bytes", "3",
                                      "--host-memory", "2MiB"})
                .exit_code,
            0);
}

TEST_F(CliStored, WeightsOfOthersAreExportedAndHaveNoRunToSpeakOf) {
  ASSERT_EQ(ziggurat(folder_.path(), tiny_train(folder_, "store", 1)).exit_code, 0);
  ASSERT_EQ(
      ziggurat(folder_.path(), {"ckpt", "to-hf", folder_ / "store", folder_ / "hf"}).exit_code, 0);
  EXPECT_GT(exported(folder_ / "hf").size(), 0U);
  const Output spoken = said(folder_ / "hf");
  EXPECT_EQ(spoken.exit_code, 1);
  EXPECT_THAT(spoken.err, HasSubstr("another trainer"));
}

}  // namespace cli_stored_test
}  // namespace ziggurat::test
