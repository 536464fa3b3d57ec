// SPDX-License-Identifier: Apache-2.0
// tests/aio/paged_bytes_test.cc: bytes whose copies share pages are still bytes of their own.
#include "aio/paged_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace ziggurat {
namespace {

constexpr std::uint64_t kPage = 64 * 1024;

std::vector<std::byte> filled(std::size_t size, int value) {
  return std::vector<std::byte>(size, static_cast<std::byte>(value));
}

TEST(PagedBytes, ReadsWhatWasWrittenAcrossPagesAndZerosElsewhere) {
  PagedBytes bytes;
  bytes.resize(3 * kPage + 100);
  bytes.write(kPage - 10, filled(kPage + 20, 7));
  std::vector<std::byte> expected = filled(3 * kPage + 100, 0);
  std::fill_n(expected.begin() + kPage - 10, kPage + 20, std::byte{7});
  EXPECT_EQ(bytes.all(), expected);
  std::vector<std::byte> piece(30);
  bytes.read(kPage - 20, piece);
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), expected.begin() + kPage - 20));
}

TEST(PagedBytes, AWriteIsSeenByItsOwnCopyOnly) {
  PagedBytes first;
  first.resize(2 * kPage);
  first.write(0, filled(2 * kPage, 1));
  PagedBytes second = first;
  EXPECT_TRUE(first == second);
  second.write(kPage, filled(1, 2));
  EXPECT_FALSE(first == second);
  EXPECT_EQ(first.all(), filled(2 * kPage, 1));
  second.write(kPage, filled(1, 1));
  EXPECT_TRUE(first == second) << "the same bytes in other pages";
}

TEST(PagedBytes, WhatWasCutOffIsZerosWhenTheFileGrowsAgain) {
  PagedBytes bytes;
  bytes.resize(2 * kPage);
  bytes.write(0, filled(2 * kPage, 9));
  const PagedBytes before = bytes;
  bytes.resize(100);
  bytes.resize(2 * kPage);
  std::vector<std::byte> expected = filled(2 * kPage, 0);
  std::fill_n(expected.begin(), 100, std::byte{9});
  EXPECT_EQ(bytes.all(), expected);
  EXPECT_EQ(before.all(), filled(2 * kPage, 9));
}

}  // namespace
}  // namespace ziggurat
