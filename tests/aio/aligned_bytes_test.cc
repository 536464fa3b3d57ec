// SPDX-License-Identifier: Apache-2.0
// tests/aio/aligned_bytes_test.cc: memory of transfers lies as it should, and is used again.
#include "aio/aligned_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "base/bytes.h"

namespace ziggurat {
namespace aligned_bytes_test {

std::uintptr_t address(const AlignedBytes& bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes.span().data());
}

TEST(AlignedBytes, BeginWhereTheyAreToldTo) {
  AlignedPool pool;
  for (const std::uint64_t size : {std::uint64_t{1}, 100 * kKiB, 128 * kKiB, 3 * kMiB + 5}) {
    for (const std::uint64_t lead : {0U, 8U, 4095U}) {
      for (const AlignedBytes& bytes : {AlignedBytes(size, lead), pool.take(size, lead)}) {
        EXPECT_EQ(address(bytes) % AlignedBytes::kAlignment, lead);
        ASSERT_EQ(bytes.span().size(), size);
        std::ranges::fill(bytes.span(), std::byte{1});
      }
    }
  }
}

TEST(AlignedPool, GivesWhatCameBack) {
  AlignedPool pool;
  std::uintptr_t first = 0;
  {
    const AlignedBytes bytes = pool.take(kMiB);
    first = address(bytes);
  }
  {
    const AlignedBytes a = pool.take(kMiB - 1000, 8);
    EXPECT_EQ(address(a), first + 8);
    const AlignedBytes b = pool.take(kMiB);
    EXPECT_NE(address(b), first);
  }
  const AlignedBytes larger = pool.take(8 * kMiB);
  std::ranges::fill(larger.span(), std::byte{1});
}

TEST(AlignedPool, TwoUsesAtATimeHaveMemoryOfTheirOwn) {
  std::mt19937_64 random(3);
  AlignedPool pool;
  struct Use {
    AlignedBytes bytes;
    std::byte value;
  };
  std::vector<Use> uses;
  for (int i = 0; i < 500; ++i) {
    uses.push_back({pool.take(random() % (2 * kMiB) + 1, random() % 4096), std::byte(i % 251)});
    std::ranges::fill(uses.back().bytes.span(), uses.back().value);
    if (uses.size() < 8) continue;
    const auto ended = uses.begin() + static_cast<std::ptrdiff_t>(random() % uses.size());
    EXPECT_TRUE(std::ranges::all_of(ended->bytes.span(),
                                    [&](std::byte byte) { return byte == ended->value; }));
    std::swap(*ended, uses.back());
    uses.pop_back();
  }
}

TEST(AlignedPool, MayEndBeforeWhatItMade) {
  auto pool = std::make_unique<AlignedPool>();
  const AlignedBytes bytes = pool->take(kMiB);
  pool.reset();
  std::ranges::fill(bytes.span(), std::byte{2});
}

}  // namespace aligned_bytes_test
}  // namespace ziggurat
