// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_reshard_test.cc: `ckpt reshard`: a store cut anew by one command, for
// ranks that go on from it as from its checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <set>
#include <thread>

#include "tests/integrations/cli_process.h"
#include "tests/support/loop_filesystem.h"

namespace ziggurat::test {
namespace cli_reshard_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSteps = 6;

class CliReshard : public ::testing::Test {
 protected:
  Output train(const std::string& store, int steps, const Arguments& more) {
    return ziggurat(folder_.path(), tiny_train(folder_, store, steps) + more);
  }
  Output reshard(const Arguments& more, const std::string& store = "store") {
    return ziggurat(folder_.path(), Arguments{"ckpt", "reshard", folder_ / store} + more);
  }
  int ckpt(const Arguments& arguments) {
    return ziggurat(folder_.path(), Arguments{"ckpt"} + arguments).exit_code;
  }
  std::set<std::string> names() const {
    std::set<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_ / "store"))
      all.insert(entry.path().filename().string());
    return all;
  }

  TemporaryFolder folder_;
};

const Arguments kTwo{"--nproc", "2", "--accumulate", "3"};
const Arguments kThree{"--nproc", "3", "--accumulate", "2"};

TEST_F(CliReshard, IsWhatALoadOnTheNewRanksWouldHave) {
  ASSERT_EQ(train("store", 4, kTwo).exit_code, 0);
  fs::copy(folder_ / "store", folder_ / "copy");
  const Output cut = reshard({"--nproc", "3"});
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  EXPECT_THAT(cut.out, AllOf(HasSubstr("is now divided for 3 ranks (before: 2)"), HasSubstr("/s"),
                             HasSubstr("--nproc 3 --accumulate 2"), HasSubstr("from step 4")));
  EXPECT_EQ(names(), (std::set<std::string>{"rank00000.ziggurat", "rank00001.ziggurat",
                                            "rank00002.ziggurat"}));
  EXPECT_EQ(ckpt({"verify", folder_ / "store"}), 0);
  EXPECT_EQ(ckpt({"diff", folder_ / "store", folder_ / "copy"}), 0);
  const Output loaded = train("loaded", kSteps, kThree + Arguments{"--load", folder_ / "copy"});
  const Output resumed = train("store", kSteps, kThree);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_EQ(loss_bits(resumed.out).size(), 2U);
  EXPECT_EQ(loss_bits(resumed.out), loss_bits(loaded.out));
  EXPECT_THAT(reshard({"--nproc", "3"}).out, HasSubstr("is already divided like that"));
}

TEST_F(CliReshard, KnowsStagesDegreesAndFormats) {
  ASSERT_EQ(train("store", 2, kTwo).exit_code, 0);
  const Output divided = reshard({"--nproc", "4", "--tp", "2", "--zero-stage", "0"});
  ASSERT_EQ(divided.exit_code, 0) << divided.err;
  const Arguments four{"--nproc", "4", "--tp", "2", "--zero-stage", "0", "--accumulate", "3"};
  const Output run = train("store", 3, four);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("resumed at step 2"));
  // And back to one, in another format: what it rounds is said.
  const Output one = reshard({"--nproc", "1", "--state-format", "bf16-moments"});
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, HasSubstr("F32 to BF16, rounded"));
  EXPECT_EQ(names(), std::set<std::string>{"rank00000.ziggurat"});
  const Output last = train("store", 4, {"--accumulate", "6", "--state-format", "bf16-moments"});
  ASSERT_EQ(last.exit_code, 0) << last.err;
  EXPECT_THAT(last.out, HasSubstr("resumed at step 3"));
}

TEST_F(CliReshard, KnowsSeveralDrivesAndFrozenParameters) {
  const std::string a = folder_ / "a";
  const std::string b = folder_ / "b";
  const Arguments frozen{"--param-groups", "wte.*:frozen", "--store", a + "," + b};
  ASSERT_EQ(train("none", 2, kTwo + frozen).exit_code, 0);
  const Output cut = ziggurat(folder_.path(), {"ckpt", "reshard", b + "," + a, "--nproc", "3"});
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  const Output run = train("none", 3, kThree + frozen);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("resumed at step 2"));
}

TEST_F(CliReshard, RefusesWhatCannotGoOn) {
  ASSERT_EQ(train("store", 2, kTwo).exit_code, 0);
  fs::copy(folder_ / "store", folder_ / "copy");
  const auto refusal = [&](const Arguments& more) {
    const Output output = reshard(more);
    EXPECT_NE(output.exit_code, 0);
    return output.err;
  };
  EXPECT_THAT(refusal({}), HasSubstr("--nproc"));
  EXPECT_THAT(refusal({"--nproc", "4"}), HasSubstr("6 micro-batches"));
  EXPECT_THAT(refusal({"--nproc", "3", "--tp", "2"}), HasSubstr("1 would be left over"));
  EXPECT_THAT(refusal({"--nproc", "3", "--tp", "3"}), HasSubstr("heads, which 3 ranks cannot"));
  EXPECT_THAT(refusal({"--nproc", "2", "--strategy", "hybrid", "--shard-group", "3"}),
              HasSubstr("3"));
  EXPECT_EQ(reshard({"--nproc", "2"}, "nothing").exit_code, 1);
  EXPECT_FALSE(fs::exists(folder_ / "nothing"));
  {
    Process owner(folder_.path(), tiny_train(folder_, "store", 100'000) + kTwo);
    ASSERT_TRUE(owner.wait_for_output("step 3 loss-bits")) << owner.err();
    EXPECT_THAT(refusal({"--nproc", "3"}), HasSubstr("in use"));
    EXPECT_FALSE(owner.ended());
  }
  EXPECT_EQ(ckpt({"verify", folder_ / "store"}), 0);
}

TEST_F(CliReshard, NeedsRoomForBothStoresAndSaysHowMuch) {
  const LoopFilesystem disk(std::uint64_t{64} << 20);
  if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
  const Arguments there{"--store", disk / "store"};
  ASSERT_EQ(train("none", 2, kTwo + there).exit_code, 0);
  disk.fill_up_to(std::uint64_t{1} << 20);
  const Arguments three{"ckpt", "reshard", disk / "store", "--nproc", "3"};
  const Output full = ziggurat(folder_.path(), three);
  EXPECT_EQ(full.exit_code, 1);
  EXPECT_THAT(full.err, AllOf(HasSubstr(disk / "store"), HasSubstr("beside the old one and needs"),
                              HasSubstr(" are free")));
  EXPECT_EQ(ckpt({"verify", disk / "store"}), 0);
  fs::remove(disk.path() / "filler");
  EXPECT_EQ(ziggurat(folder_.path(), three).exit_code, 0);
  EXPECT_EQ(train("none", 3, kThree + there).exit_code, 0);
}

TEST_F(CliReshard, LeavesOneStoreWheneverItIsKilled) {
  ASSERT_EQ(train("store", 2, kTwo).exit_code, 0);
  fs::copy(folder_ / "store", folder_ / "copy");
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay_ms(0, 150);
  int ranks = 2;
  for (int kill = 0; kill < 10; ++kill) {
    ranks = 5 - ranks;
    const std::string wanted = std::to_string(ranks);
    {
      Process run(folder_.path(), {"ckpt", "reshard", folder_ / "store", "--nproc", wanted});
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms(random)));
      run.signal(SIGKILL);
      run.wait();
    }
    const Output next = reshard({"--nproc", wanted});
    ASSERT_EQ(next.exit_code, 0) << next.err;
    EXPECT_EQ(ckpt({"verify", folder_ / "store"}), 0);
    EXPECT_EQ(ckpt({"diff", folder_ / "store", folder_ / "copy"}), 0);
  }
}

}  // namespace cli_reshard_test
}  // namespace ziggurat::test
