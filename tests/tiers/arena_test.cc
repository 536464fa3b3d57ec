// SPDX-License-Identifier: Apache-2.0
// tests/tiers/arena_test.cc: the arena beside a bitmap that does the same slowly, and the account.
#include "tiers/pool/arena.h"

#include <gmock/gmock.h>

#include <random>
#include <set>
#include <vector>

#include "base/bytes.h"
#include "tiers/pool/account.h"

namespace ziggurat {
namespace arena_test {

/// The specification: one flag per alignment unit, searched from the left, or from the right.
class Bitmap {
 public:
  explicit Bitmap(std::size_t units) : used_(units, false) {}

  std::optional<std::uint64_t> allocate(std::size_t units) {
    std::size_t run = 0;
    for (std::size_t i = 0; i < used_.size(); ++i) {
      run = used_[i] ? 0 : run + 1;
      if (run == units) {
        mark(i + 1 - units, units, true);
        return i + 1 - units;
      }
    }
    return std::nullopt;
  }
  /// In [begin, end).
  std::optional<std::uint64_t> allocate_within(std::size_t units, std::size_t begin,
                                               std::size_t end, bool from_right) {
    for (std::size_t i = 0; begin + units + i <= end; ++i) {
      const std::size_t first = from_right ? end - units - i : begin + i;
      const auto run = used_.begin() + static_cast<std::ptrdiff_t>(first);
      if (std::find(run, run + static_cast<std::ptrdiff_t>(units), true) !=
          run + static_cast<std::ptrdiff_t>(units))
        continue;
      mark(first, units, true);
      return first;
    }
    return std::nullopt;
  }
  void free(std::size_t first, std::size_t units) { mark(first, units, false); }
  std::size_t free_units() const {
    return static_cast<std::size_t>(std::count(used_.begin(), used_.end(), false));
  }
  std::size_t longest() const {
    std::size_t run = 0;
    std::size_t best = 0;
    for (const bool used : used_) best = std::max(best, run = used ? 0 : run + 1);
    return best;
  }

 private:
  void mark(std::size_t first, std::size_t units, bool used) {
    for (std::size_t i = first; i < first + units; ++i) used_[i] = used;
  }
  std::vector<bool> used_;
};

TEST(Arena, does_what_a_bitmap_does) {
  constexpr std::uint64_t kAlignment = 512;
  constexpr std::size_t kUnits = 256;
  for (unsigned seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    Arena arena(kUnits * kAlignment, kAlignment);
    Bitmap bitmap(kUnits);
    struct Range {
      std::uint64_t offset;
      std::uint64_t size;
    };
    std::vector<Range> out;
    for (int step = 0; step < 500; ++step) {
      if (out.empty() || random() % 5 < 3) {
        const std::uint64_t size = 1 + random() % (random() % 8 == 0 ? 60000 : 6000);
        const std::size_t units = (size + kAlignment - 1) / kAlignment;
        const std::size_t begin = random() % kUnits;
        const std::size_t end = begin + random() % (kUnits - begin + 1);
        const auto side = random() % 2 == 0 ? Arena::Side::kLowest : Arena::Side::kHighest;
        const bool anywhere = random() % 3 == 0;
        const auto got = anywhere
                             ? arena.allocate(size)
                             : arena.allocate_within(
                                   size, {begin * kAlignment, (end - begin) * kAlignment}, side);
        const auto expected =
            anywhere ? bitmap.allocate(units)
                     : bitmap.allocate_within(units, begin, end, side == Arena::Side::kHighest);
        ASSERT_EQ(got.has_value(), expected.has_value());
        if (got) {
          ASSERT_EQ(*got, *expected * kAlignment);
          out.push_back({*got, size});
        }
      } else {
        std::swap(out[random() % out.size()], out.back());
        arena.free(out.back().offset, out.back().size);
        bitmap.free(out.back().offset / kAlignment,
                    (out.back().size + kAlignment - 1) / kAlignment);
        out.pop_back();
      }
      ASSERT_EQ(arena.free_bytes(), bitmap.free_units() * kAlignment);
      ASSERT_EQ(arena.largest_free_bytes(), bitmap.longest() * kAlignment);
    }
  }
}

TEST(Arena, a_size_near_the_end_of_the_number_range_does_not_wrap_around) {
  Arena arena(8192, 4096);
  EXPECT_FALSE(arena.allocate(~std::uint64_t{0}));
  EXPECT_FALSE(arena.allocate(8193));
  EXPECT_TRUE(arena.allocate(8192));
}

TEST(Arena, a_size_that_is_not_whole_units_is_rounded_down) {
  const Arena arena(10000, 4096);
  EXPECT_EQ(arena.size_bytes(), 8192u);
}

// What is left between two that grow towards each other is one range, wherever they meet.
TEST(Arena, filled_from_both_ends_keeps_one_free_range) {
  Arena arena(16 * 4096, 4096);
  const FreeRange lower{0, 8 * 4096};
  const FreeRange upper{8 * 4096, 8 * 4096};
  EXPECT_EQ(arena.allocate_within(3 * 4096, lower, Arena::Side::kLowest), 0u);
  EXPECT_EQ(arena.allocate_within(3 * 4096, upper, Arena::Side::kHighest), 13u * 4096);
  EXPECT_EQ(arena.allocate_within(3 * 4096, lower, Arena::Side::kLowest), 3u * 4096);
  EXPECT_EQ(arena.allocate_within(3 * 4096, lower, Arena::Side::kLowest), std::nullopt);
  EXPECT_EQ(arena.largest_free_bytes(), 7u * 4096);
  EXPECT_TRUE(arena.allocate(7 * 4096));
  EXPECT_EQ(arena.free_bytes(), 0u);
}

TEST(ArenaDeathTest, freeing_twice_is_found_out) {
  Arena arena(8192, 4096);
  arena.allocate(4096);
  arena.free(0, 4096);
  EXPECT_DEATH(arena.free(0, 4096), "freed twice");
}

TEST(Staggering, large_neighbours_of_one_size_have_distinct_residues_of_2_mib) {
  for (const std::uint64_t size : {256 * kKiB, kMiB, 2 * kMiB, 12 * kMiB, 2 * kMiB - 4096}) {
    const std::uint64_t stride = staggered_bytes(size, 4096);
    EXPECT_LE(stride, size + 4096);
    std::set<std::uint64_t> residues;
    for (std::uint64_t i = 0; i < 512; ++i) residues.insert(i * stride % (2 * kMiB));
    EXPECT_EQ(residues.size(), 512u) << size;
  }
}

TEST(Staggering, small_arrays_are_only_rounded_up) {
  EXPECT_EQ(staggered_bytes(1, 4096), 4096u);
  EXPECT_EQ(staggered_bytes(128 * kKiB, 4096), 128 * kKiB);
}

TEST(Account, keeps_use_and_peak_by_purpose) {
  Account account(1000);
  account.add(Purpose::kParams, 300);
  account.add(Purpose::kGradients, 500);
  account.subtract(Purpose::kGradients, 400);
  account.add(Purpose::kParams, 100);
  EXPECT_EQ(account.used_bytes(), 500u);
  EXPECT_EQ(account.peak_bytes(), 800u);
  EXPECT_EQ(account.used_bytes(Purpose::kParams), 400u);
  EXPECT_EQ(account.peak_bytes(Purpose::kGradients), 500u);
  EXPECT_EQ(account.used_bytes(Purpose::kOptimizer), 0u);
}

TEST(Account, reads_largest_first) {
  Account account(384 * kMiB);
  EXPECT_EQ(account.text(), "nothing of 384.0 MiB");
  account.add(Purpose::kGradients, 12 * kMiB);
  account.add(Purpose::kParams, 100 * kMiB);
  EXPECT_EQ(account.text(), "params 100.0 MiB, gradients 12.0 MiB of 384.0 MiB");
}

TEST(AccountDeathTest, more_than_the_capacity_or_less_than_nothing_is_found_out) {
  Account account(10);
  EXPECT_DEATH(account.add(Purpose::kParams, 11), "11 bytes used of 10");
  EXPECT_DEATH(account.subtract(Purpose::kParams, 1), "0 are out");
}

}  // namespace arena_test
}  // namespace ziggurat
