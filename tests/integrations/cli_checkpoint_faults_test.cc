// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_checkpoint_faults_test.cc: a run that saves checkpoints is asked to end at
// random moments, and its target has no room: what is there verifies, what is not whole is not
// there, and training is what it would be.
//
// ZIGGURAT_KILLS: how often SIGTERM is sent (4).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <thread>

#include "base/bytes.h"
#include "tests/integrations/cli_process.h"
#include "tests/support/loop_filesystem.h"

namespace ziggurat::test {
namespace cli_checkpoint_faults_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

/// What a cluster leaves between SIGTERM and SIGKILL, as Slurm and Kubernetes do by default.
constexpr std::chrono::seconds kGraceTime(30);

std::string step_name(int step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(9 - digits.size(), '0') + digits;
}

/// The checkpoints of a folder, each of which verifies; nothing else that begins like one is there.
std::set<std::string> verified_checkpoints(const TemporaryFolder& folder, const fs::path& target) {
  std::set<std::string> names;
  if (!fs::exists(target)) return names;
  for (const auto& entry : fs::directory_iterator(target)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("step-")) continue;
    EXPECT_TRUE(fs::exists(entry.path() / "manifest.json")) << name << " was left by half";
    const Output output = ziggurat(folder.path(), {"ckpt", "verify", entry.path().string()});
    EXPECT_EQ(output.exit_code, 0) << output.err;
    EXPECT_THAT(output.out, HasSubstr("every byte"));
    names.insert(name);
  }
  return names;
}

int terminations_wanted() {
  const char* const wanted = std::getenv("ZIGGURAT_KILLS");
  return wanted != nullptr ? std::atoi(wanted) : 4;
}

/// By turns one rank and two, each with its own store.
TEST(CliCheckpointFaults, ARunThatIsAskedToEndLeavesWholeCheckpointsAloneAndItsLastStepAmongThem) {
  const TemporaryFolder folder;
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay_ms(0, 1500);
  int in_training = 0;
  for (int round = 0; round < terminations_wanted(); ++round) {
    const std::string ranks = std::to_string(1 + round % 2);
    const fs::path target = folder / ("checkpoints" + ranks);
    Process run(folder.path(), tiny_train(folder, "store" + ranks, 100'000) +
                                   Arguments{"--nproc", ranks, "--checkpoint-dir", target.string(),
                                             "--checkpoint-every", "3", "--keep-last", "2"});
    const int delay = delay_ms(random);
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, SIGTERM after " << delay << " ms");
    // Every other time in the midst of training, whatever a start takes on this machine.
    if (round % 4 >= 2) {
      ASSERT_TRUE(run.wait_for_output("loss-bits")) << run.err();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    run.signal(SIGTERM);
    const Output output = run.wait(kGraceTime);
    EXPECT_NE(output.signal, SIGKILL) << "its grace time was over: " << output.out << output.err;
    const std::set<std::string> names = verified_checkpoints(folder, target);
    const auto steps = loss_bits(output.out);
    if (steps.empty()) continue;  // it was not so far
    ++in_training;
    EXPECT_EQ(output.exit_code, 130) << output.out << output.err;
    EXPECT_TRUE(names.contains(step_name(steps.rbegin()->first))) << output.out;
  }
  EXPECT_GT(in_training, 0);
}

TEST(CliCheckpointFaults, AFullTargetCostsTheSaveAndIsNamedAndTheNextRunSaves) {
  const TemporaryFolder folder;
  const LoopFilesystem disk(64 * kMiB);
  if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
  const Output whole = ziggurat(folder.path(), tiny_train(folder, "whole", 6));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  disk.fill_up_to(200 * kKiB);  // the state has more
  const std::string target = disk / "checkpoints";
  const auto train = [&](int steps) {
    return ziggurat(folder.path(),
                    tiny_train(folder, "run", steps) +
                        Arguments{"--checkpoint-dir", target, "--checkpoint-every", "2"});
  };
  const Output run = train(6);
  EXPECT_EQ(run.exit_code, 1) << "its last checkpoint was not made: " << run.err;
  EXPECT_EQ(loss_bits(run.out), loss_bits(whole.out));
  EXPECT_THAT(run.out, AllOf(HasSubstr("the checkpoint of step 2 failed, and training goes on"),
                             HasSubstr(target + "/" + step_name(2)), HasSubstr("no room"),
                             HasSubstr("ENOSPC"), HasSubstr("the checkpoint of step 6 failed")));
  EXPECT_TRUE(verified_checkpoints(folder, target).empty());
  fs::remove(disk.path() / "filler");
  const Output room = train(8);
  EXPECT_EQ(room.exit_code, 0) << room.err;
  EXPECT_THAT(room.out, Not(HasSubstr("failed")));
  EXPECT_TRUE(verified_checkpoints(folder, target).contains(step_name(8)));
}

}  // namespace cli_checkpoint_faults_test
}  // namespace ziggurat::test
