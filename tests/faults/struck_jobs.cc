// SPDX-License-Identifier: Apache-2.0
// tests/faults/struck_jobs.cc: one strike after the other, and what is left.
#include "tests/faults/struck_jobs.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>

#include "tests/faults/campaign.h"

namespace ziggurat::testing {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::uint64_t strike_calls(Strike strike, const std::vector<std::uint64_t>& calls,
                           std::uint64_t usual,
                           const std::function<bool(const Strike&)>& strike_at) {
  const std::uint64_t struck = for_each_call(
      calls[static_cast<std::size_t>(strike.rank)], usual,
      [&](std::uint64_t call) {
        strike.call = call;
        SCOPED_TRACE(to_string(strike));
        return strike_at(strike);
      },
      [] { return ::testing::Test::HasFailure(); });
  EXPECT_GT(struck, 0U);
  return struck;
}

void expect_killed(const std::vector<RankReport>& ranks, const Strike& strike) {
  const int status = ranks[static_cast<std::size_t>(strike.rank)].status;
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
}

States states_of_steps(Job job) {
  job.save_every = 1;
  job.keep_last = 0;
  States states;
  if (const std::string wrong = trouble(run_job(job)); !wrong.empty()) {
    ADD_FAILURE() << wrong;
    return states;
  }
  states[0] = tensors_of(job.opened_copy + "/" + checkpoint_name(0));
  for (std::uint64_t step = 1; step <= job.last_step; ++step)
    states[step] = tensors_of(job.target + "/" + checkpoint_name(step));
  return states;
}

void expect_kept(const Job& job, const States& expected, const std::vector<RankReport>& ranks) {
  const FoundCheckpoints found = look_at_checkpoints(job.target, expected);
  EXPECT_THAT(found.problems, IsEmpty());
  const std::set<std::uint64_t> promised = saved(ranks);
  if (promised.empty()) return;
  // The newest stays; older ones go when a newer one is whole.
  ASSERT_THAT(found.whole, ::testing::Not(IsEmpty())) << *promised.rbegin() << " is lost";
  EXPECT_GE(*found.whole.rbegin(), *promised.rbegin());
}

void expect_next_goes_on(const Job& next, const States& expected,
                         const std::vector<RankReport>& ranks) {
  std::filesystem::remove_all(next.opened_copy);
  std::filesystem::remove_all(next.last_copy);
  const std::vector<RankReport> reports = run_job(next);
  ASSERT_EQ(trouble(reports), "");
  const std::uint64_t opened = reports[0].opened.value();
  EXPECT_GE(opened, durable(ranks));
  EXPECT_THAT(look_at_checkpoints(next.opened_copy, expected).whole, ElementsAre(opened));
  EXPECT_THAT(look_at_checkpoints(next.last_copy, expected).whole, ElementsAre(next.last_step));
  const FoundCheckpoints found = look_at_checkpoints(next.target, expected);
  EXPECT_THAT(found.problems, IsEmpty());
  EXPECT_THAT(found.whole, ElementsAre(next.last_step));
  EXPECT_THAT(found.leftovers, IsEmpty());
}

}  // namespace ziggurat::testing
