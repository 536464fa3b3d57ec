// SPDX-License-Identifier: Apache-2.0
// tests/aio/paged_bytes_test.cc: bytes whose copies share pages are still bytes of their own.
#include "aio/paged_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace ziggurat {
namespace paged_bytes_test {

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

TEST(PagedBytes, AreWhatAPlainArrayIsWhateverIsWrittenWhere) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    PagedBytes bytes;
    std::vector<std::byte> expected;
    for (int i = 0; i < 60; ++i) {
      const std::uint64_t size = random() % (4 * kPage) + 1;
      bytes.resize(size);
      expected.resize(size);
      const std::uint64_t at = random() % size;
      std::vector<std::byte> written(random() % (size - at) + 1);
      const std::uint64_t words[] = {random(), 0, random() % 2 == 0 ? random() : 0};
      const std::uint64_t stretch = 8 * (random() % 5000 + 1);  // of one word, or less than one
      for (std::size_t b = 0; b < written.size(); ++b) {
        const std::uint64_t word = i % 3 == 0 ? random() : words[b / stretch % 3];
        written[b] = static_cast<std::byte>(word >> (b % 8 * 8));
      }
      bytes.write(at, written);
      std::ranges::copy(written, expected.begin() + static_cast<std::ptrdiff_t>(at));
      ASSERT_EQ(bytes.all(), expected) << round << ", " << i;
      PagedBytes again;
      again.resize(size);
      again.write(0, expected);
      ASSERT_TRUE(again == bytes);
    }
  }
}

TEST(PagedBytes, WhatRepeatsAWordTakesNoMemory) {
  PagedBytes bytes;
  bytes.resize(1000 * kPage);
  std::vector<std::byte> words(100 * kPage + 8);
  for (std::size_t at = 0; at < words.size(); at += 8) std::memset(words.data() + at, 3, 8);
  for (std::uint64_t at = 8; at + words.size() < bytes.size(); at += words.size())
    bytes.write(at, words);
  EXPECT_LT(bytes.memory_bytes(), kPage);
}

TEST(PagedBytes, WhereNothingWasWrittenNothingIsStored) {
  PagedBytes bytes;
  constexpr std::uint64_t kFile = std::uint64_t{24} << 40;
  bytes.resize(kFile);
  const std::uint64_t empty = bytes.memory_bytes();
  EXPECT_LT(empty, 32 << 20);
  bytes.write(kFile / 3, filled(kPage, 0));
  EXPECT_EQ(bytes.memory_bytes(), empty) << "zeros are not stored";
  PagedBytes copy = bytes;
  copy.write(kFile - 10, filled(10, 5));
  EXPECT_FALSE(copy == bytes);
  EXPECT_LT(copy.memory_bytes(), empty + kPage);
  std::vector<std::byte> end(20);
  copy.read(kFile - 20, end);
  std::vector<std::byte> expected = filled(20, 5);
  std::fill_n(expected.begin(), 10, std::byte{0});
  EXPECT_EQ(end, expected);
  bytes.read(kFile - 20, end);
  EXPECT_EQ(end, filled(20, 0)) << "the other copy is as it was";
}

}  // namespace paged_bytes_test
}  // namespace ziggurat
