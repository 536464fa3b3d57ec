// SPDX-License-Identifier: Apache-2.0
// tests/base/access_ledger_test.cc: which accesses that overlap in time and place are conflicts.
#include "base/access_ledger.h"

#include <gmock/gmock.h>

#include <array>

namespace ziggurat {
namespace access_ledger_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using enum AccessLedger::Kind;

class AccessLedgerTest : public ::testing::Test {
 protected:
  std::span<const std::byte> bytes(std::size_t from, std::size_t count) const {
    return std::span<const std::byte>(memory_).subspan(from, count);
  }
  std::array<std::byte, 100> memory_{};
  AccessLedger ledger_;
};

TEST_F(AccessLedgerTest, ReadersShareAndWritersDoNot) {
  const auto one = ledger_.begin(kRead, bytes(0, 50), "one");
  const auto other = ledger_.begin(kRead, bytes(0, 50), "other");
  EXPECT_THAT(ledger_.conflicts(), IsEmpty());
  const auto writer = ledger_.begin(kWrite, bytes(49, 10), "a writer");
  EXPECT_THAT(ledger_.conflicts(), SizeIs(2));
  EXPECT_THAT(ledger_.conflicts().front(),
              HasSubstr("a writer writes 10 B of which one reads a part at the same time"));
  const auto reader = ledger_.begin(kRead, bytes(58, 1), "late");
  EXPECT_THAT(ledger_.conflicts(), SizeIs(3));
}

TEST_F(AccessLedgerTest, NeighboursDoNotTouch) {
  const auto left = ledger_.begin(kWrite, bytes(0, 50), "left");
  const auto right = ledger_.begin(kWrite, bytes(50, 50), "right");
  const auto none = ledger_.begin(kWrite, bytes(10, 0), "none");
  EXPECT_THAT(ledger_.conflicts(), IsEmpty());
  EXPECT_EQ(ledger_.under_way(), 2U);
}

TEST_F(AccessLedgerTest, WhatHasEndedIsForgotten) {
  {
    const auto first = ledger_.begin(kWrite, bytes(0, 100), "first");
    auto moved = ledger_.begin(kRead, {}, "nothing");
    moved = {};
  }
  EXPECT_EQ(ledger_.under_way(), 0U);
  auto second = ledger_.begin(kWrite, bytes(0, 100), "second");
  second.end();
  const auto third = ledger_.begin(kWrite, bytes(0, 100), "third");
  EXPECT_THAT(ledger_.conflicts(), IsEmpty());
}

}  // namespace access_ledger_test
}  // namespace ziggurat
