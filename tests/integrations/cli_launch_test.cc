// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_launch_test.cc: `ziggurat launch`: ranks that start, speak and end
// together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_launch_test {

using ::testing::HasSubstr;
using ::testing::Not;

/// Each rank runs `script` in a shell.
Arguments launched(int ranks, const std::string& script) {
  return {"launch", "--nproc", std::to_string(ranks), "--", "sh", "-c", script};
}

TEST(CliLaunch, EveryRankKnowsItsPlaceAndWhereTheOthersAre) {
  const TemporaryFolder folder;
  const Output output =
      ziggurat(folder.path(), launched(3,
                                       "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE "
                                       "${ZIGGURAT_RENDEZVOUS%:*} ${#ZIGGURAT_SECRET}"));
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, HasSubstr("0/3 0/3 127.0.0.1 64\n"));
  EXPECT_THAT(output.out, HasSubstr("[rank 1] 1/3 1/3 127.0.0.1 64\n"));
  EXPECT_THAT(output.out, HasSubstr("[rank 2] 2/3 2/3 127.0.0.1 64\n"));
}

TEST(CliLaunch, TheSecondMachineGoesOnCounting) {
  const TemporaryFolder folder;
  const Output output =
      ziggurat(folder.path(),
               {"launch", "--nproc", "2", "--nnodes", "2", "--node-rank", "1", "--rendezvous",
                "node0:4000", "--", "sh", "-c", "echo $RANK/$WORLD_SIZE at $ZIGGURAT_RENDEZVOUS"});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, HasSubstr("2/4 at node0:4000\n"));
  EXPECT_THAT(output.out, HasSubstr("[rank 3] 3/4 at node0:4000\n"));
}

TEST(CliLaunch, ARankThatFailsIsNamedAndItsCodeIsTheJobs) {
  const TemporaryFolder folder;
  const Output output = ziggurat(folder.path(), launched(2, "test $RANK = 0 || exit 7"));
  EXPECT_EQ(output.exit_code, 7);
  EXPECT_THAT(output.err, HasSubstr("rank 1 (process "));
  EXPECT_THAT(output.err, HasSubstr("ended with exit code 7"));
}

TEST(CliLaunch, ARankThatIsKilledEndsTheOthers) {
  const TemporaryFolder folder;
  const Output output =
      ziggurat(folder.path(), launched(2, "test $RANK = 1 && kill -9 $$; exec sleep 100"));
  EXPECT_EQ(output.exit_code, 128 + SIGKILL);
  EXPECT_THAT(output.err, HasSubstr("was killed by signal 9"));
}

TEST(CliLaunch, AnInterruptReachesEveryRankOnce) {
  const TemporaryFolder folder;
  Process process(folder.path(), launched(2,
                                          "trap 'echo told; exit 130' INT; echo $RANK is ready; "
                                          "while :; do sleep 0.05; done"));
  ASSERT_TRUE(process.wait_for_output("0 is ready"));
  ASSERT_TRUE(process.wait_for_output("1 is ready"));
  process.signal(SIGINT);
  const Output output = process.wait();
  EXPECT_EQ(output.exit_code, 130);
  EXPECT_THAT(output.out, HasSubstr("\ntold\n"));
  EXPECT_THAT(output.out, HasSubstr("[rank 1] told\n"));
  EXPECT_THAT(output.err, Not(HasSubstr("ended with")));
}

TEST(CliLaunch, WhatCannotBeStartedIsNamed) {
  const TemporaryFolder folder;
  const Output output =
      ziggurat(folder.path(), {"launch", "--nproc", "2", "--", "no-such-program"});
  EXPECT_EQ(output.exit_code, 127);
  EXPECT_THAT(output.err, HasSubstr("no-such-program: ENOENT"));
}

TEST(CliLaunch, SeveralMachinesNeedAPlaceToMeet) {
  const TemporaryFolder folder;
  const Output output =
      ziggurat(folder.path(), {"launch", "--nproc", "1", "--nnodes", "2", "--", "true"});
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_THAT(output.err, HasSubstr("--rendezvous"));
}

TEST(CliLaunch, BenchCollectivesStartsItsOwnRanks) {
  const TemporaryFolder folder;
  const Output output = ziggurat(folder.path(), {"bench", "collectives", "--nproc", "3",
                                                 "--largest", "64KiB", "--rounds", "1"});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  for (const char* operation : {"memory   all_reduce", "tcp      all_reduce", "reduce_scatter",
                                "all_gather", "all_to_all", "send", "barrier"}) {
    EXPECT_THAT(output.out, HasSubstr(operation));
  }
}

}  // namespace cli_launch_test
}  // namespace ziggurat::test
