// SPDX-License-Identifier: Apache-2.0
// tests/base/core_budget_test.cc: what launchers say, shares that neither overlap nor leave a core
// idle, and ranks that die.
#include "base/topology/core_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <limits>
#include <map>
#include <memory>

#include "base/error.h"

namespace ziggurat {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

Environment variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

LocalRank rank_of(std::size_t rank, std::size_t count) { return {rank, count, "LOCAL_RANK"}; }

TEST(LocalRank, IsWhatTheLauncherSays) {
  const LocalRank alone = local_rank(variables({}));
  EXPECT_EQ(alone.rank, 0u);
  EXPECT_EQ(alone.count, 1u);
  EXPECT_THAT(alone.source, IsEmpty());
  const auto expect = [](const Environment& environment, std::size_t rank, std::size_t count) {
    const LocalRank found = local_rank(environment);
    EXPECT_EQ(found.rank, rank) << found.source;
    EXPECT_EQ(found.count, count) << found.source;
  };
  expect(variables({{"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "8"}}), 3, 8);
  expect(variables({{"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), 1,
         2);
  expect(variables({{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "4"}}), 0, 4);
  expect(variables({{"SLURM_LOCALID", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "4"}}), 2, 4);
  // A rank alone, as Slurm's shells and some scripts set it, says nothing of neighbours.
  expect(variables({{"LOCAL_RANK", "3"}}), 0, 1);
  expect(variables({{"LOCAL_RANK", "3"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "4"}}), 0,
         4);
}

TEST(LocalRank, SlurmsListIsReadAtThisNode) {
  const auto count_at = [](const std::string& node) {
    return local_rank(variables({{"SLURM_LOCALID", "0"},
                                 {"SLURM_STEP_TASKS_PER_NODE", "8(x2),4,2(x3)"},
                                 {"SLURM_NODEID", node}}))
        .count;
  };
  EXPECT_EQ(count_at("0"), 8u);
  EXPECT_EQ(count_at("1"), 8u);
  EXPECT_EQ(count_at("2"), 4u);
  EXPECT_EQ(count_at("5"), 2u);
}

TEST(LocalRank, WhatMakesNoSenseIsAnErrorThatNamesTheVariables) {
  for (const auto& [rank, count] : std::map<std::string, std::string>{
           {"8", "8"}, {"-1", "8"}, {"0", "0"}, {"1", "two"}, {"one", "2"}}) {
    try {
      local_rank(variables({{"LOCAL_RANK", rank}, {"LOCAL_WORLD_SIZE", count}}));
      ADD_FAILURE() << rank << " of " << count;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(),
                  HasSubstr("LOCAL_RANK=" + rank + " does not fit LOCAL_WORLD_SIZE=" + count));
    }
  }
}

TEST(CoreBudget, AProcessOnItsOwnHasEveryPhysicalCore) {
  const CoreBudget budget =
      core_budget(Topology::from_synthetic("pack:2 core:2 pu:2"), {}, kNoQuota);
  EXPECT_EQ(budget.workers, 4u);
  EXPECT_THAT(budget.cpus, ElementsAre(0, 2, 4, 6));
}

TEST(CoreBudget, RanksHaveCoresOfTheirOwnOnOneNodeWhereTheyFit) {
  const Topology topology = Topology::from_synthetic("pack:2 [numa] core:4 pu:1");
  EXPECT_THAT(core_budget(topology, rank_of(0, 2), kNoQuota).cpus, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(core_budget(topology, rank_of(1, 2), kNoQuota).cpus, ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(core_budget(topology, rank_of(5, 8), kNoQuota).cpus, ElementsAre(5));
}

TEST(CoreBudget, SharesCoverTheCoresAndDoNotOverlap) {
  const Topology topology = Topology::from_synthetic("core:7 pu:2");
  for (std::size_t count = 1; count <= 7; ++count) {
    std::vector<int> all;
    for (std::size_t rank = 0; rank < count; ++rank) {
      const CoreBudget budget = core_budget(topology, rank_of(rank, count), kNoQuota);
      EXPECT_EQ(budget.workers, budget.cpus.size());
      EXPECT_GE(budget.workers, 7 / count);
      all.insert(all.end(), budget.cpus.begin(), budget.cpus.end());
    }
    EXPECT_EQ(all, topology.physical_cores) << count;
  }
}

TEST(CoreBudget, MoreRanksThanCoresHaveOneWorkerEachThatTheKernelPlaces) {
  const Topology topology = Topology::from_synthetic("core:2 pu:1");
  for (std::size_t rank = 0; rank < 8; ++rank) {
    const CoreBudget budget = core_budget(topology, rank_of(rank, 8), kNoQuota);
    EXPECT_EQ(budget.workers, 1u);
    EXPECT_THAT(budget.cpus, IsEmpty());
    EXPECT_THAT(budget.reason, HasSubstr("of 8 on this host (LOCAL_RANK), 2 physical cores"));
  }
}

TEST(CoreBudget, WhatALauncherBoundToARankIsItsShare) {
  Topology topology = Topology::from_synthetic("core:8 pu:1");
  topology.physical_cores = {4, 5};  // of 8: a fourth
  EXPECT_THAT(core_budget(topology, rank_of(2, 4), kNoQuota).cpus, ElementsAre(4, 5));
  // More than a fair share is bound to all of them.
  topology.physical_cores = {0, 1, 2, 3};
  EXPECT_THAT(core_budget(topology, rank_of(2, 4), kNoQuota).cpus, ElementsAre(2));
}

TEST(CoreBudget, AQuotaIsTimeWithoutAPlace) {
  const Topology topology = Topology::from_synthetic("core:8 pu:1");
  const auto budget = [&](std::size_t count, double quota) {
    return core_budget(topology, rank_of(0, count), quota);
  };
  EXPECT_EQ(budget(1, 2.5).workers, 2u);
  EXPECT_THAT(budget(1, 2.5).cpus, IsEmpty());
  EXPECT_THAT(budget(1, 2.5).reason, HasSubstr("a quota of 2.5 CPUs"));
  EXPECT_EQ(budget(1, 0.3).workers, 1u);
  EXPECT_EQ(budget(2, 4).workers, 2u);
  EXPECT_EQ(budget(2, 8).cpus.size(), 4u);  // no limit to a share of four cores
}

/// A process that says its share and stays until it is killed.
class Rank {
 public:
  Rank(std::size_t rank, std::size_t count) {
    int ends[2];
    if (::pipe(ends) != 0) throw system_error(errno, "pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      const CoreBudget budget = core_budget(Topology::discover(), rank_of(rank, count), kNoQuota);
      const int cpu = budget.cpus.empty() ? -1 : budget.cpus.front();
      const int said[2] = {static_cast<int>(budget.workers), cpu};
      if (::write(ends[1], said, sizeof(said)) == sizeof(said)) ::pause();
      ::_exit(1);
    }
    ::close(ends[1]);
    int said[2] = {};
    EXPECT_EQ(::read(ends[0], said, sizeof(said)), static_cast<ssize_t>(sizeof(said)));
    ::close(ends[0]);
    workers = said[0];
    first_cpu = said[1];
  }
  ~Rank() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Rank(const Rank&) = delete;

  int workers = 0;
  int first_cpu = -1;

 private:
  pid_t pid_ = -1;
};

TEST(CoreBudget, TheShareOfAKilledRankIsTheNextOnesAtOnce) {
  const std::size_t count = Topology::discover().physical_cores.size();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (std::size_t i = 0; i < count; ++i) ranks.push_back(std::make_unique<Rank>(i, count));
  const int cpu = ranks.back()->first_cpu;
  for (std::size_t i = 0; i + 1 < count; ++i) EXPECT_NE(ranks[i]->first_cpu, cpu);
  ranks.back().reset();  // SIGKILL
  const Rank next(count - 1, count);
  EXPECT_EQ(next.workers, 1);
  EXPECT_EQ(next.first_cpu, cpu);
}

}  // namespace
}  // namespace ziggurat
