// SPDX-License-Identifier: Apache-2.0
// tests/tiers/node_parts_test.cc: shares by weight, and where ranges near a node lie.
#include "tiers/pool/node_parts.h"

#include <gmock/gmock.h>

#include <random>
#include <vector>

#include "base/bytes.h"

namespace ziggurat {
namespace node_parts_test {

using ::testing::ElementsAre;
using ::testing::Field;

TEST(PartsByWeight, AreWholePagesInProportionAndAllOfTheBytes) {
  std::minstd_rand random(1);
  for (int i = 0; i < 1000; ++i) {
    std::vector<PoolNode> nodes;
    std::uint64_t weights = 0;
    for (unsigned n = 0; n < 1 + random() % 4; ++n) {
      nodes.push_back({.numa_node = static_cast<int>(n), .weight = 1 + random() % 100});
      weights += nodes.back().weight;
    }
    const std::uint64_t size = (1 + random() % 4000) * 4 * kKiB;
    const std::uint64_t page = random() % 2 == 0 ? 2 * kMiB : 4 * kKiB;
    std::uint64_t begin = 0;
    for (const NodePart& part : parts_by_weight(size, page, nodes)) {
      EXPECT_GT(part.size_bytes, 0U);
      EXPECT_EQ(begin % page, 0U);
      const PoolNode& node = nodes[static_cast<std::size_t>(part.numa_node)];
      const double share = static_cast<double>(size) * static_cast<double>(node.weight) /
                           static_cast<double>(weights);
      EXPECT_NEAR(static_cast<double>(part.size_bytes), share, static_cast<double>(page));
      begin += part.size_bytes;
    }
    EXPECT_EQ(begin, size);
  }
}

TEST(PartsByWeight, OfLessThanAPageTheLastNodeGetsAll) {
  const std::vector<PoolNode> nodes{{.numa_node = 3}, {.numa_node = 5}};
  EXPECT_THAT(parts_by_weight(64 * kKiB, 2 * kMiB, nodes),
              ElementsAre(Field(&NodePart::numa_node, 5)));
}

/// Two nodes, 7 and 9, of ten units each, and an arena over all but the first two units.
struct TwoNodes {
  static constexpr std::uint64_t kUnit = 4 * kKiB;
  static constexpr std::uint64_t kBase = 2 * kUnit;
  NodeParts parts{std::vector<NodePart>{{.numa_node = 7, .size_bytes = 10 * kUnit},
                                        {.numa_node = 9, .size_bytes = 10 * kUnit}}};
  Arena arena{18 * kUnit, kUnit};

  /// The unit of the mapping where it begins; 100: nowhere.
  std::uint64_t allocate(std::uint64_t units, int numa_node) {
    const auto offset = parts.allocate(arena, kBase, units * kUnit, numa_node);
    return offset ? (kBase + *offset) / kUnit : 100;
  }
};

TEST(NodeParts, ARangeLiesInItsNodesPartWhileThatHasRoomAndThenAnywhere) {
  TwoNodes two;
  EXPECT_EQ(two.allocate(3, 7), 2U) << "the first part from its begin, as the arena has it";
  EXPECT_EQ(two.allocate(3, 9), 17U) << "the second from its end";
  EXPECT_EQ(two.allocate(4, 9), 13U);
  EXPECT_EQ(two.allocate(4, 9), 5U) << "three units are left of its own part";
  EXPECT_EQ(two.allocate(3, 9), 10U);
  EXPECT_EQ(two.allocate(2, 9), 100U) << "one unit is free";
}

TEST(NodeParts, WhatIsFreeOfNeighboursLiesTogether) {
  TwoNodes two;
  two.allocate(4, 7);
  two.allocate(6, 9);
  EXPECT_EQ(two.allocate(8, 7), 6U) << "over the border";
}

TEST(NodeParts, ANodeWithoutAPartAndNoneAreAnywhere) {
  TwoNodes two;
  EXPECT_EQ(two.allocate(1, 8), 2U);
  EXPECT_EQ(two.allocate(1, -1), 3U);
}

TEST(NodeParts, ARangeIsOnANodeIfAllOfItIs) {
  constexpr std::uint64_t kUnit = TwoNodes::kUnit;
  const TwoNodes two;
  EXPECT_TRUE(two.parts.on_node(9, {10 * kUnit, 10 * kUnit}));
  EXPECT_FALSE(two.parts.on_node(9, {9 * kUnit, 2 * kUnit}));
  EXPECT_FALSE(two.parts.on_node(7, {9 * kUnit, 2 * kUnit}));
  EXPECT_FALSE(two.parts.on_node(8, {0, kUnit}));
}

}  // namespace node_parts_test
}  // namespace ziggurat
