// SPDX-License-Identifier: Apache-2.0
// tests/tiers/pool_quarantine_test.cc: host memory that a device was lost under never comes back.
#include <gmock/gmock.h>
#include <sys/mman.h>

#include "base/bytes.h"
#include "base/error.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {
namespace pool_quarantine_test {

constexpr std::uint64_t kBudget = 64 * kKiB;

/// A device that was lost while it copied to one place.
class LostUnder final : public HostRegistration {
 public:
  bool quarantined(std::span<const std::byte> memory) const noexcept override {
    return memory.data() <= at && at < memory.data() + memory.size();
  }
  const std::byte* at = nullptr;
};

LeaseRequest request(std::uint64_t size_bytes) {
  return {.purpose = Purpose::kStaging, .size_bytes = size_bytes, .need = {}, .holder = "test"};
}

TEST(PoolQuarantine, what_a_lost_device_may_write_to_is_not_lent_again) {
  Reactor reactor;
  const auto registration = std::make_shared<LostUnder>();
  std::byte* written = nullptr;
  {
    const auto pool = PinnedPool::create(
        reactor, {.budget_bytes = kBudget, .reserves = {}, .use_huge_pages = false});
    pool->keep_registered(registration);
    Lease under = pool->try_acquire(request(16 * kKiB));
    Lease other = pool->try_acquire(request(16 * kKiB));
    written = under.bytes().data();
    registration->at = written + 5000;
    under.reset();
    other.reset();
    EXPECT_EQ(pool->free_bytes(), kBudget - 16 * kKiB) << "the other one is free again";
    EXPECT_THAT(pool->holder_table(), ::testing::HasSubstr("a lost device"));
    for (int round = 0; round < 2; ++round) {
      Lease rest = pool->try_acquire(request(48 * kKiB));
      ASSERT_TRUE(rest);
      EXPECT_FALSE(pool->try_acquire(request(4 * kKiB)));
    }
  }
  EXPECT_EQ(::msync(written, 4096, MS_ASYNC), 0) << "it is still mapped";
  written[5000] = std::byte{1};
}

TEST(PoolQuarantine, without_a_loss_all_of_it_comes_back) {
  Reactor reactor;
  const auto pool = PinnedPool::create(
      reactor, {.budget_bytes = kBudget, .reserves = {}, .use_huge_pages = false});
  pool->keep_registered(std::make_shared<LostUnder>());
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(pool->try_acquire(request(kBudget)));
  }
}

}  // namespace pool_quarantine_test
}  // namespace ziggurat
