// SPDX-License-Identifier: Apache-2.0
// tests/collectives/exchange/peer_memory_test.cc: reading another process' memory, and for how long
// it may be read.
#include "collectives/exchange/peer_memory.h"

#include <gmock/gmock.h>

#include <memory>
#include <vector>

namespace ziggurat {
namespace peer_memory_test {

TEST(PeerMemory, OfThisProcessCanBeRead) { EXPECT_EQ(why_not_readable(own_memory_probe()), ""); }

TEST(PeerMemory, ANumberThatAnotherProcessHasIsNotTakenForIt) {
  MemoryProbe probe = own_memory_probe();
  ++probe.value;
  EXPECT_THAT(why_not_readable(probe),
              ::testing::HasSubstr("its process number belongs to another process"));
}

TEST(Permission, IsGivenToTheFirstAndTakenBackAfterTheLast) {
  std::vector<bool> heard;
  Permission permission([&](bool allowed) { heard.push_back(allowed); });
  auto first = permission.take();
  auto second = permission.take();
  EXPECT_THAT(heard, ::testing::ElementsAre(true));
  first.reset();
  EXPECT_THAT(heard, ::testing::ElementsAre(true));
  second.reset();
  EXPECT_THAT(heard, ::testing::ElementsAre(true, false));
  permission.take().reset();
  EXPECT_THAT(heard, ::testing::ElementsAre(true, false, true, false));
}

}  // namespace peer_memory_test
}  // namespace ziggurat
