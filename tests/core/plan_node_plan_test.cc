// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_node_plan_test.cc: on which NUMA node each chunk lives, on machines described in
// words.
#include "core/plan/node_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/bytes.h"

namespace ziggurat {
namespace plan_node_plan_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* kTwoNodes = "pack:2 [numa] core:2 pu:1";
constexpr const char* kFourNodes = "pack:4 [numa] core:1 pu:1";

/// A model of eight equal chunks, and what is asked about it.
class Nodes : public ::testing::Test {
 protected:
  static ModelSpec model() {
    ModelSpec model{.name = "m", .units = {}};
    for (int u = 0; u < 4; ++u)
      model.units.push_back({"unit", {{.name = "weight", .shape = {8, 16'384}}}});
    return model;
  }
  NodePlan plan(const std::string& machine) {
    const Topology topology = Topology::from_synthetic(machine);
    const HostPlan host = plan_host(table_, placement_, {}, budget_bytes_);
    return plan_nodes(table_, host,
                      {.topology = topology,
                       .worker_nodes = worker_nodes_,
                       .chunk_drive_nodes = drive_nodes_,
                       .placement = placement_,
                       .host_budget_bytes = budget_bytes_});
  }
  static std::vector<int> nodes_of(const NodePlan& plan) {
    std::vector<int> nodes;
    for (const PoolNode& node : plan.pool) nodes.push_back(node.numa_node);
    return nodes;
  }

  ChunkTable table_{model(), 4, {}, {}};
  Placement placement_{};
  std::uint64_t budget_bytes_ = 64 * kMiB;
  std::vector<int> worker_nodes_ = {0, 0, 1, 1};
  std::vector<int> drive_nodes_ = {0, 1, 0, 1, 0, 1, 0, 1};
};

TEST_F(Nodes, OfOneNothingIsPlaced) {
  const NodePlan nothing = plan("pack:1 [numa] core:4 pu:1");
  EXPECT_THAT(nothing.pool, IsEmpty());
  EXPECT_THAT(nothing.chunk_nodes, IsEmpty());
  EXPECT_EQ(nothing.why_not, "");
}

TEST_F(Nodes, AChunkLivesOnTheNodeOfItsDrive) {
  ASSERT_EQ(table_.chunks().size(), 8U);
  const NodePlan both = plan(kTwoNodes);
  EXPECT_EQ(both.chunk_nodes, drive_nodes_);
  EXPECT_THAT(nodes_of(both), ElementsAre(0, 1));
  EXPECT_EQ(both.pool[0].weight, both.pool[1].weight);
  EXPECT_THAT(both.pool[1].cpus, ElementsAre(2, 3));
}

TEST_F(Nodes, MemoryIsDividedAsTheChunksAre) {
  drive_nodes_ = {0, 1, 1, 1, 0, 1, 1, 1};
  const NodePlan uneven = plan(kTwoNodes);
  EXPECT_EQ(3 * uneven.pool[0].weight, uneven.pool[1].weight);
  drive_nodes_.assign(8, 1);
  EXPECT_THAT(nodes_of(plan(kTwoNodes)), ElementsAre(1)) << "one drive: all of it is there";
}

TEST_F(Nodes, WithoutADriveThatIsKnownChunksAreSpreadByWorkers) {
  drive_nodes_.assign(8, -1);
  EXPECT_THAT(plan(kTwoNodes).chunk_nodes, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1));
  worker_nodes_ = {0, 1, 1, 1};
  const NodePlan uneven = plan(kTwoNodes);
  EXPECT_EQ(std::ranges::count(uneven.chunk_nodes, 1), 6);
}

TEST_F(Nodes, StateInMemoryIsSpreadByWorkersWhereverTheCheckpointsGo) {
  placement_.optimizer = Tier::kHost;
  drive_nodes_.assign(8, 1);
  EXPECT_THAT(plan(kTwoNodes).chunk_nodes, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1));
}

TEST_F(Nodes, ANodeWithoutWorkersOfThisRankHoldsNothing) {
  worker_nodes_ = {1, 1};
  const NodePlan one = plan(kTwoNodes);
  EXPECT_THAT(one.chunk_nodes, Each(1)) << "though half of the records are on a drive of node 0";
  EXPECT_THAT(nodes_of(one), ElementsAre(1));
}

TEST_F(Nodes, WorkersThatAreNotPinnedCountAsTheCpusThatTheyMayUse) {
  worker_nodes_.clear();
  drive_nodes_.assign(8, -1);
  EXPECT_THAT(plan(kTwoNodes).chunk_nodes, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1));
}

TEST_F(Nodes, MoreThanTwoNeedABudgetThatTheLongestLeaseFitsHoweverItIsDivided) {
  worker_nodes_ = {0, 1, 2, 3};
  drive_nodes_ = {0, 1, 2, 3, 0, 1, 2, 3};
  EXPECT_THAT(nodes_of(plan(kFourNodes)), ElementsAre(0, 1, 2, 3));
  budget_bytes_ = plan_host(table_, placement_, {}, budget_bytes_).smallest_bytes();
  const NodePlan tight = plan(kFourNodes);
  EXPECT_THAT(tight.pool, IsEmpty());
  EXPECT_THAT(tight.chunk_nodes, IsEmpty());
  EXPECT_THAT(tight.why_not, HasSubstr("too small to be divided among 4 NUMA nodes"));
}

}  // namespace plan_node_plan_test
}  // namespace ziggurat
