// SPDX-License-Identifier: Apache-2.0
// tests/integrations/measure_fill_test.cc: every byte that is wrong is seen, and bytes that a drive
// could make light of are told from those it cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "integrations/measure/fill.h"
#include "integrations/measure/latency.h"

namespace ziggurat::measure {
namespace {

constexpr std::uint64_t kSeed = 77;
constexpr std::uint64_t kOffset = 40 * kPageBytes;

std::vector<std::byte> written(std::size_t pages, std::uint32_t pass) {
  std::vector<std::byte> memory(pages * kPageBytes);
  make_pages(memory, kSeed, 5);
  stamp_pages(memory, {kSeed, pass}, kOffset);
  return memory;
}

TEST(BenchFill, WhatWasWrittenIsRight) {
  EXPECT_EQ(wrong_pages(written(8, 3), {kSeed, 3}, 1, kOffset), 0U);
}

TEST(BenchFill, AnyByteThatChangedMakesItsPageWrong) {
  for (std::size_t at : {std::size_t{0}, std::size_t{9}, std::size_t{17}, std::size_t{21},
                         std::size_t{30}, std::size_t{33}, kPageBytes - 1}) {
    auto memory = written(2, 3);
    memory[kPageBytes + at] ^= std::byte{1};
    EXPECT_EQ(wrong_pages(memory, {kSeed, 3}, 1, kOffset), 1U) << "byte " << at;
  }
}

TEST(BenchFill, APageOfAnotherPlaceFileOrPassIsWrong) {
  const auto memory = written(1, 3);
  EXPECT_EQ(wrong_pages(memory, {kSeed, 3}, 1, kOffset + kPageBytes), 1U) << "misdirected";
  EXPECT_EQ(wrong_pages(memory, {kSeed + 1, 3}, 1, kOffset), 1U) << "another file's";
  EXPECT_EQ(wrong_pages(memory, {kSeed, 4}, 4, kOffset), 1U) << "stale: a lost write";
  EXPECT_EQ(wrong_pages(memory, {kSeed, 2}, 1, kOffset), 1U) << "of a pass that never was";
}

TEST(BenchFill, OurPagesAreNeitherConstantNorThin) {
  const SampleFacts facts = look_at(written(64, 1));
  EXPECT_EQ(facts.pages, 64U);
  EXPECT_EQ(facts.constant_pages, 0U);
  EXPECT_EQ(facts.thin_pages, 0U);
}

TEST(BenchFill, PagesDifferFromEachOther) {
  auto memory = written(32, 1);
  for (std::size_t a = 0; a < 32; ++a) {
    for (std::size_t b = a + 1; b < 32; ++b) {
      EXPECT_NE(std::memcmp(&memory[a * kPageBytes + 64], &memory[b * kPageBytes + 64], 512), 0);
    }
  }
}

TEST(BenchFill, ZerosTextAndPatternsAreSeenThrough) {
  std::vector<std::byte> zeros(2 * kPageBytes);
  EXPECT_EQ(look_at(zeros).constant_pages, 2U);

  std::vector<std::byte> text(kPageBytes);
  const char* const words = "in the beginning was the word and the word ";
  for (std::size_t i = 0; i < text.size(); ++i)
    text[i] = static_cast<std::byte>(words[i % std::strlen(words)]);
  EXPECT_EQ(look_at(text).thin_pages, 1U);

  // Each byte value as often as any other, and yet it compresses to nothing.
  std::vector<std::byte> ramp(kPageBytes);
  for (std::size_t i = 0; i < ramp.size(); ++i) ramp[i] = static_cast<std::byte>(i);
  EXPECT_EQ(look_at(ramp).thin_pages, 1U);
}

TEST(BenchLatencies, QuantilesAreWithinABucketOfTheTruth) {
  Latencies latencies;
  for (int i = 1; i <= 1000; ++i) latencies.add(std::chrono::microseconds(i));
  EXPECT_EQ(latencies.count(), 1000U);
  EXPECT_NEAR(latencies.quantile_us(0.5), 500, 500 * 0.03);
  EXPECT_NEAR(latencies.quantile_us(0.99), 990, 990 * 0.03);
  EXPECT_LE(latencies.quantile_us(0.999), latencies.max_us());
  EXPECT_EQ(latencies.max_us(), 1000);
  std::uint64_t count = 0;
  for (const Latencies::Bucket& bucket : latencies.buckets()) count += bucket.count;
  EXPECT_EQ(count, 1000U);
}

TEST(BenchLatencies, ExtremesStayInside) {
  Latencies latencies;
  EXPECT_EQ(latencies.quantile_us(0.5), 0);
  latencies.add(std::chrono::nanoseconds(0));
  latencies.add(std::chrono::hours(1));
  EXPECT_EQ(latencies.count(), 2U);
  EXPECT_GT(latencies.quantile_us(1.0), 1e6);
}

}  // namespace
}  // namespace ziggurat::measure
