// SPDX-License-Identifier: Apache-2.0
// tests/collectives/mesh_test.cc: who is in a group with whom, by hand and by law.
#include "collectives/mesh.h"

#include <gmock/gmock.h>

#include <numeric>
#include <set>

#include "base/error.h"

namespace ziggurat {
namespace mesh_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Group = std::vector<int>;

template <class Call>
Error refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "accepted";
  return Error(ErrorCode::kCancelled, "");
}

TEST(Mesh, NeighboursShareTheirTensorParallelGroup) {
  const Mesh mesh({.dp = 4, .tp = 2}, {.ranks = 8, .ranks_per_node = 4});
  EXPECT_THAT(mesh.groups(Axis::kTensor),
              ElementsAre(Group{0, 1}, Group{2, 3}, Group{4, 5}, Group{6, 7}));
  EXPECT_THAT(mesh.groups(Axis::kData), ElementsAre(Group{0, 2, 4, 6}, Group{1, 3, 5, 7}));
  EXPECT_EQ(mesh.index(5, Axis::kTensor), 1);
  EXPECT_EQ(mesh.index(5, Axis::kData), 2);
}

TEST(Mesh, APlaceSaysWhereARankStandsAndWithWhom) {
  const Place place = place_of(/*rank=*/5, /*world_size=*/8, /*tensor=*/2);
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.data, 2);
  EXPECT_EQ(place.tensor, 1);
  EXPECT_THAT(place.data_group, ElementsAre(1, 3, 5, 7));
  EXPECT_THAT(place.tensor_group, ElementsAre(4, 5));
  EXPECT_EQ(place.data_ranks(), 4);
  EXPECT_EQ(place.tensor_ranks(), 2);
  EXPECT_THAT(refusal([] { place_of(0, 3, 2); }).what(), HasSubstr("does not divide the 3 ranks"));
}

TEST(Mesh, AnAxisOfOneIsAGroupOfOne) {
  const Mesh mesh({.dp = 3}, {.ranks = 3, .ranks_per_node = 3});
  EXPECT_THAT(mesh.group(2, Axis::kTensor), ElementsAre(2));
  EXPECT_THAT(mesh.group(2, Axis::kPipeline), ElementsAre(2));
  EXPECT_THAT(mesh.group(2, Axis::kData), ElementsAre(0, 1, 2));
}

TEST(Mesh, EveryAxisPartitionsTheWorldAndTwoAxesMeetInOneRank) {
  for (const MeshShape shape :
       {MeshShape{.dp = 6, .tp = 1}, MeshShape{.dp = 2, .tp = 8}, MeshShape{.dp = 5, .tp = 3}}) {
    const int world = shape.dp * shape.tp;
    const Mesh mesh(shape, {.ranks = world, .ranks_per_node = world});
    for (const Axis axis : {Axis::kData, Axis::kTensor, Axis::kPipeline, Axis::kContext}) {
      std::set<int> seen;
      for (const Group& group : mesh.groups(axis)) {
        EXPECT_EQ(group.size(), static_cast<std::size_t>(mesh.size(axis)));
        for (std::size_t i = 0; i < group.size(); ++i) {
          EXPECT_TRUE(seen.insert(group[i]).second) << to_string(axis) << " has it twice";
          EXPECT_EQ(mesh.index(group[i], axis), static_cast<int>(i));
          EXPECT_EQ(mesh.group(group[i], axis), group);
        }
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(world));
    }
    for (int rank = 0; rank < world; ++rank) {
      Group both;
      const Group dp = mesh.group(rank, Axis::kData);
      const Group tp = mesh.group(rank, Axis::kTensor);
      std::ranges::set_intersection(dp, tp, std::back_inserter(both));
      EXPECT_THAT(both, ElementsAre(rank));
    }
  }
}

TEST(Mesh, TheAxesMustMultiplyToTheWorldAndTheMessageShowsTheArithmetic) {
  const Error error = refusal([] { Mesh({.dp = 4, .tp = 2}, {.ranks = 6, .ranks_per_node = 6}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(),
              HasSubstr("dp 4 x tp 2 x pp 1 x cp 1 makes 8 ranks, but the world has 6"));
  // A product that would wrap around in 32 bits is no match for any world.
  EXPECT_THAT(
      refusal([] { Mesh({.dp = 65536, .tp = 65536}, {.ranks = 1, .ranks_per_node = 1}); }).what(),
      HasSubstr("4294967296 ranks"));
  EXPECT_THAT(refusal([] { Mesh({.dp = 0}, {.ranks = 1, .ranks_per_node = 1}); }).what(),
              HasSubstr("dp 0: give 1 or more"));
}

TEST(Mesh, WhatIsNotBuiltIsRefusedByNameNotIgnored) {
  const Error pipeline =
      refusal([] { Mesh({.dp = 2, .pp = 2}, {.ranks = 4, .ranks_per_node = 4}); });
  EXPECT_EQ(pipeline.code(), ErrorCode::kUnimplemented);
  EXPECT_THAT(pipeline.what(), HasSubstr("pipeline parallelism is not supported yet; set pp to 1"));
  const Error context =
      refusal([] { Mesh({.dp = 2, .cp = 2}, {.ranks = 4, .ranks_per_node = 4}); });
  EXPECT_EQ(context.code(), ErrorCode::kUnimplemented);
  EXPECT_THAT(context.what(), HasSubstr("context parallelism is not supported yet; set cp to 1"));
}

TEST(Mesh, DataParallelismIsWhatTheOtherAxesLeave) {
  EXPECT_EQ(with_dp_of_world({.dp = 99, .tp = 4}, 24), (MeshShape{.dp = 6, .tp = 4}));
  EXPECT_THAT(refusal([] { with_dp_of_world({.tp = 4}, 6); }).what(),
              HasSubstr("tp 4 x pp 1 x cp 1 = 4 does not divide the 6 ranks"));
}

TEST(Mesh, PartsByNodeAndTheirCounterparts) {
  const Mesh mesh({.dp = 4, .tp = 2}, {.ranks = 8, .ranks_per_node = 4});
  const SubGroups of_5 = mesh.by_node(5, mesh.group(5, Axis::kData));
  EXPECT_THAT(of_5.inner, ElementsAre(5, 7));
  EXPECT_THAT(of_5.outer, ElementsAre(1, 5));
}

TEST(Mesh, PartsByNodeNeedAsManyRanksOnEveryNode) {
  const Mesh mesh({.dp = 6}, {.ranks = 6, .ranks_per_node = 4});
  EXPECT_THAT(refusal([&] { mesh.by_node(0, mesh.group(0, Axis::kData)); }).what(),
              HasSubstr("node 0 has 4 ranks of a group of 6, but node 1 has 2"));
}

TEST(Mesh, WarnsWhenTensorParallelGroupsSpanNodes) {
  EXPECT_EQ(Mesh({.dp = 2, .tp = 4}, {.ranks = 8, .ranks_per_node = 4}).warning(), "");
  EXPECT_THAT(Mesh({.dp = 1, .tp = 8}, {.ranks = 8, .ranks_per_node = 4}).warning(),
              HasSubstr("groups of 8 ranks span nodes of 4"));
  // 3 does not divide 4: ranks 3, 4 and 5 are a group on two nodes.
  EXPECT_THAT(Mesh({.dp = 4, .tp = 3}, {.ranks = 12, .ranks_per_node = 4}).warning(),
              HasSubstr("tp 1 stays within a node"));
}

TEST(Mesh, RunsOfAGroupAreShardGroupsAndTheirReplicas) {
  const Group members{1, 3, 5, 7, 9, 11};
  const SubGroups of_7 = in_runs_of(2, 7, members);
  EXPECT_THAT(of_7.inner, ElementsAre(5, 7));
  EXPECT_THAT(of_7.outer, ElementsAre(3, 7, 11));
  EXPECT_THAT(in_runs_of(6, 7, members).outer, ElementsAre(7));
  EXPECT_THAT(refusal([&] { in_runs_of(4, 7, members); }).what(), HasSubstr("runs of 4"));
  EXPECT_THAT(refusal([&] { in_runs_of(2, 2, members); }).what(), HasSubstr("rank 2 is not in"));
}

}  // namespace mesh_test
}  // namespace ziggurat
