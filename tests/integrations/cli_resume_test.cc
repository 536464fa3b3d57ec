// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_resume_test.cc: what a run goes on from when its store is gone or lost:
// the newest checkpoint that verifies, said so, with the same losses, and nothing of the store
// given up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <thread>

#include "tests/integrations/cli_process.h"
#include "tests/support/loop_filesystem.h"

namespace ziggurat::test {
namespace cli_resume_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSteps = 6;
using Files = std::map<std::string, std::string>;

Files files_in(const std::string& directory) {
  Files files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.is_regular_file()) files[entry.path().filename()] = contents(entry.path());
  }
  return files;
}

/// A byte of every page in a part of the file, both slots of the records there among them.
void damage(const fs::path& file) {
  std::string bytes = contents(file);
  for (std::size_t at = bytes.size() / 2; at < bytes.size() * 3 / 4; at += 4096) bytes[at] ^= 1;
  write_file(file, bytes);
}
void damage_shards(const fs::path& checkpoint) {
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    if (entry.path().extension() == ".safetensors") damage(entry.path());
  }
}

/// By ranks: runs of 2 ranks have a file each.
class CliResume : public ::testing::TestWithParam<int> {
 protected:
  Output train(const std::string& store, int steps, const Arguments& more = {}) {
    return ziggurat(folder_.path(), arguments(store, steps) + more);
  }
  Arguments arguments(const std::string& store, int steps) {
    return tiny_train(folder_, store, steps) +
           Arguments{"--nproc", std::to_string(GetParam()), "--checkpoint-every",
                     "2",       "--checkpoint-dir",         folder_ / (store + "-checkpoints")};
  }
  /// A run of four steps with checkpoints of the steps 2 and 4, and the losses of one that goes on.
  void run_four_steps() {
    const Output whole = train("whole", kSteps);
    ASSERT_EQ(whole.exit_code, 0) << whole.err;
    losses_ = loss_bits(whole.out);
    for (const int steps : {2, 4}) ASSERT_EQ(train("store", steps).exit_code, 0);
    ASSERT_TRUE(fs::exists(checkpoint(2) + "/manifest.json"));
    ASSERT_TRUE(fs::exists(checkpoint(4) + "/manifest.json"));
  }
  std::string checkpoint(int step) const {
    return folder_ / ("store-checkpoints/step-00000000" + std::to_string(step));
  }
  std::string store_file() const {
    return folder_ / ("store/rank0000" + std::to_string(GetParam() - 1) + ".ziggurat");
  }
  void expect_losses_after(int step, const Output& output) {
    std::map<int, std::string> expected = losses_;
    for (int done = 1; done <= step; ++done) expected.erase(done);
    EXPECT_EQ(loss_bits(output.out), expected);
  }

  TemporaryFolder folder_;
  std::map<int, std::string> losses_;
};

TEST_P(CliResume, WithoutAStoreGoesOnFromTheNewestCheckpoint) {
  run_four_steps();
  fs::remove_all(folder_ / "store");
  const Output gone = train("store", kSteps);
  ASSERT_EQ(gone.exit_code, 0) << gone.err;
  EXPECT_THAT(gone.out, AllOf(HasSubstr("there is no store in"), HasSubstr("step-000000004"),
                              HasSubstr("resumed at step 4"), Not(HasSubstr("lost"))));
  expect_losses_after(4, gone);
  // What is asked for by name goes before it.
  fs::remove_all(folder_ / "store");
  const Output named = train("store", kSteps, {"--load", checkpoint(2)});
  ASSERT_EQ(named.exit_code, 0) << named.err;
  expect_losses_after(2, named);
  const Output anew = train("store", 3, {"--resume", "never"});
  ASSERT_EQ(anew.exit_code, 0) << anew.err;
  EXPECT_TRUE(loss_bits(anew.out).contains(1));
}

TEST_P(CliResume, WithALostStoreGoesOnFromTheNewestCheckpointAndKeepsTheStore) {
  run_four_steps();
  damage(store_file());
  const Files lost = files_in(folder_ / "store");
  const Arguments alone =
      tiny_train(folder_, "store", kSteps) + Arguments{"--nproc", std::to_string(GetParam())};
  const Output refused = ziggurat(folder_.path(), alone);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("no generation is whole"), HasSubstr("checksum"),
                                 HasSubstr("--checkpoint-dir")));
  EXPECT_EQ(files_in(folder_ / "store"), lost);

  const Output replaced = train("store", kSteps);
  ASSERT_EQ(replaced.exit_code, 0) << replaced.err << replaced.out;
  EXPECT_THAT(replaced.out,
              AllOf(HasSubstr("is lost: "), HasSubstr("checksum"), HasSubstr("kept in lost-1"),
                    HasSubstr("step-000000004"), HasSubstr("resumed at step 4")));
  expect_losses_after(4, replaced);
  EXPECT_EQ(files_in(folder_ / "store/lost-1"), lost);
  EXPECT_EQ(ziggurat(folder_.path(), {"ckpt", "verify", folder_ / "store"}).exit_code, 0);

  const Output again = train("store", kSteps + 1);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out, AllOf(Not(HasSubstr("lost")), HasSubstr("resumed at step 6")));
  // Another loss, another folder.
  damage(store_file());
  const Output twice = train("store", kSteps + 2);
  ASSERT_EQ(twice.exit_code, 0) << twice.err;
  EXPECT_THAT(twice.out, HasSubstr("kept in lost-2"));
  EXPECT_EQ(files_in(folder_ / "store/lost-1"), lost);
}

TEST_P(CliResume, PassesOverCheckpointsThatAreDamagedAndNamesThem) {
  run_four_steps();
  damage(store_file());
  damage_shards(checkpoint(4));
  const Output older = train("store", kSteps);
  ASSERT_EQ(older.exit_code, 0) << older.err;
  EXPECT_THAT(older.out, AllOf(HasSubstr("step-000000004 does not verify and is passed over"),
                               HasSubstr("resumed at step 2")));
  expect_losses_after(2, older);
}

TEST_P(CliResume, ChangesNothingWhereNoCheckpointVerifies) {
  run_four_steps();
  damage(store_file());
  damage_shards(checkpoint(4));
  write_file(checkpoint(2) + "/manifest.json", "{}");
  const Files lost = files_in(folder_ / "store");
  const Output none = train("store", kSteps);
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.out, AllOf(HasSubstr("step-000000004 does not"), HasSubstr("step-000000002 does "
                                                                              "not")));
  EXPECT_THAT(none.err, HasSubstr("none of the checkpoints in "));
  EXPECT_EQ(files_in(folder_ / "store"), lost);
  EXPECT_FALSE(fs::exists(folder_ / "store/lost-1"));
  fs::remove_all(folder_ / "store");
  EXPECT_EQ(train("store", kSteps).exit_code, 1) << "a run that has checkpoints is not begun anew";
}

TEST_P(CliResume, DoesNotTakeAnotherRunsCheckpoints) {
  run_four_steps();
  damage(store_file());
  const Files lost = files_in(folder_ / "store");
  const Output other = train("store", kSteps, {"--seed", "9"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, HasSubstr("seed"));
  EXPECT_EQ(files_in(folder_ / "store"), lost);
  fs::remove_all(folder_ / "store");
  const Output gone = train("store", kSteps, {"--seed", "9"});
  EXPECT_EQ(gone.exit_code, 1);
  EXPECT_THAT(gone.err,
              AllOf(HasSubstr("step-000000004"), HasSubstr("the seed of the saved run is 1")));
}

TEST_P(CliResume, KeepsTheLostStoreInTheFolderThatAKilledRunLeftEmpty) {
  run_four_steps();
  damage(store_file());
  const Files lost = files_in(folder_ / "store");
  fs::create_directory(folder_ / "store/lost-1");
  const Output on = train("store", kSteps);
  ASSERT_EQ(on.exit_code, 0) << on.err << on.out;
  EXPECT_TRUE(files_in(folder_ / "store/lost-1") == lost);
  EXPECT_FALSE(fs::exists(folder_ / "store/lost-2"));
}

/// A kill while the new store takes the lost one's place leaves one of them there.
TEST_P(CliResume, GoesOnThoughReplacingTheStoreIsKilled) {
  run_four_steps();
  damage(store_file());
  const Files lost = files_in(folder_ / "store");
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay_ms(50, 400);
  for (int kill = 0; kill < 5; ++kill) {
    Process run(folder_.path(), arguments("store", kSteps));
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms(random)));
    run.signal(SIGKILL);
    run.wait();
  }
  const Output last = train("store", kSteps);
  ASSERT_EQ(last.exit_code, 0) << last.err << last.out;
  for (const auto& [step, bits] : loss_bits(last.out)) EXPECT_EQ(bits, losses_[step]) << step;
  EXPECT_TRUE(files_in(folder_ / "store/lost-1") == lost);
  EXPECT_FALSE(fs::exists(folder_ / "store/lost-2"));
  EXPECT_EQ(ziggurat(folder_.path(), {"ckpt", "verify", folder_ / "store"}).exit_code, 0);
}

TEST_P(CliResume, EndsWhereThereIsNoRoomForAnotherStoreAndGoesOnWhenThereIs) {
  const LoopFilesystem disk(std::uint64_t{64} << 20);
  if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
  run_four_steps();
  damage(store_file());
  fs::copy(folder_ / "store", disk / "store");
  const Files lost = files_in(disk / "store");
  disk.fill_up_to(std::uint64_t{1} << 20);
  const Arguments there{"--store", disk / "store"};
  const Output full = train("store", kSteps, there);
  EXPECT_EQ(full.exit_code, 1);
  EXPECT_THAT(full.err, AllOf(HasSubstr(disk / "store"), HasSubstr("free")));
  EXPECT_EQ(files_in(disk / "store"), lost);
  fs::remove(disk.path() / "filler");
  const Output room = train("store", kSteps, there);
  ASSERT_EQ(room.exit_code, 0) << room.err;
  expect_losses_after(4, room);
  EXPECT_EQ(files_in(disk / "store/lost-1"), lost);
  EXPECT_FALSE(fs::exists(disk / "store/lost-2"));
}

INSTANTIATE_TEST_SUITE_P(Ranks, CliResume, ::testing::Values(1, 2));

}  // namespace cli_resume_test
}  // namespace ziggurat::test
