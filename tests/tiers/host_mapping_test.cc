// SPDX-License-Identifier: Apache-2.0
// tests/tiers/host_mapping_test.cc: what the pool's and the emulated device's memory is made of, on
// which NUMA nodes it is asked for and where leases then lie, and that children do not get it.
#include "tiers/pool/host_mapping.h"

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "tests/support/recording_policy.h"
#include "tiers/pool/huge_pages.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {
namespace {

/// Every page is in memory now.
bool resident(std::span<const std::byte> bytes) {
  std::vector<unsigned char> pages((bytes.size() + 4095) / 4096);
  void* address = const_cast<std::byte*>(bytes.data());
  if (::mincore(address, bytes.size(), pages.data()) != 0) return false;
  return std::all_of(pages.begin(), pages.end(),
                     [](unsigned char page) { return (page & 1) != 0; });
}

/// A forked child finds in `bytes` what we wrote there. (Not: finds something mapped there. The
/// run-time of a sanitizer may put memory of its own into the gap.)
bool shared_with_child(std::span<std::byte> bytes) {
  constexpr std::string_view kMark = "written by the parent, read by the child";
  std::memcpy(bytes.data(), kMark.data(), kMark.size());
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    // EFAULT, not a signal, if nothing is mapped.
    static_cast<void>(!::write(ends[1], bytes.data(), kMark.size()));
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string seen(kMark.size(), '\0');
  const ssize_t got = ::read(ends[0], seen.data(), seen.size());
  ::close(ends[0]);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return got == static_cast<ssize_t>(kMark.size()) && seen == kMark;
}

TEST(HostMapping, is_filled_at_creation_aligned_and_zero) {
  for (const std::uint64_t size : {4 * kKiB, 100 * kKiB, 2 * kMiB, 5 * kMiB + 4 * kKiB,
                                   100 * kMiB + 4 * kKiB /* by several threads */}) {
    const HostMapping mapping({.owner = "test", .size_bytes = size});
    ASSERT_EQ(mapping.bytes().size(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping.bytes().data()) % (2 * kMiB), 0u);
    EXPECT_TRUE(resident(mapping.bytes())) << size;
    EXPECT_TRUE(std::all_of(mapping.bytes().begin(), mapping.bytes().end(),
                            [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(HostMapping, says_what_it_is_made_of) {
  const HostMapping small({.owner = "test", .size_bytes = 2 * kMiB, .huge_pages = false});
  EXPECT_EQ(small.page_kind(), "4 KiB pages");
  const HostMapping large({.owner = "test", .size_bytes = 8 * kMiB});
  EXPECT_THAT(large.page_kind(), testing::AnyOf("transparent huge pages", "4 KiB pages"));
}

/// What the kernel answers for the range is what it lists for the mapping.
TEST(HostMapping, counts_its_own_huge_pages) {
  constexpr std::uint64_t kSize = 6 * kMiB;
  void* const gap = ::mmap(nullptr, 4 * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gap, MAP_FAILED);
  const auto begin =
      round_up(reinterpret_cast<std::uintptr_t>(gap), kHugePageBytes) + kHugePageBytes;
  const std::span bytes(reinterpret_cast<std::byte*>(begin), kSize);
  // A mapping alone, between two that cannot be joined with it.
  ASSERT_EQ(::mprotect(bytes.data(), bytes.size(), PROT_READ | PROT_WRITE), 0);
  static_cast<void>(::madvise(bytes.data(), bytes.size(), MADV_NOHUGEPAGE));
  std::ranges::fill(bytes, std::byte{1});
  EXPECT_EQ(huge_bytes_of(bytes), 0U);
  ::madvise(bytes.data(), bytes.size(), MADV_DONTNEED);
  static_cast<void>(::madvise(bytes.data(), bytes.size(), MADV_HUGEPAGE));
  std::ranges::fill(bytes, std::byte{1});
  const auto listed = internal::listed_huge_bytes(bytes);
  ASSERT_TRUE(listed);
  EXPECT_EQ(huge_bytes_of(bytes), listed);
  if (const auto scanned = internal::scanned_huge_bytes(bytes)) {
    EXPECT_EQ(*scanned, *listed);
    std::uint64_t in_pieces = 0;
    for (std::uint64_t at = 0; at < kSize; at += kHugePageBytes)
      in_pieces += internal::scanned_huge_bytes(bytes.subspan(at, kHugePageBytes)).value_or(0);
    EXPECT_EQ(in_pieces, *listed);
  }
  ::munmap(gap, 4 * kSize);
}

TEST(HostMapping, memory_that_cannot_be_had_is_an_error) {
  try {
    const HostMapping mapping({.owner = "pinned pool", .size_bytes = std::uint64_t{1} << 60});
    FAIL() << "2^60 bytes were mapped";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), testing::HasSubstr("pinned pool: cannot map"));
  }
}

TEST(HostMapping, a_forked_child_does_not_have_it) {
  const HostMapping mapping({.owner = "test", .size_bytes = 2 * kMiB});
  std::vector<std::byte> ordinary(4096);
  EXPECT_TRUE(shared_with_child(ordinary)) << "the check itself";
  EXPECT_FALSE(shared_with_child(mapping.bytes()));
}

using Call = test::RecordingPolicy::Call;

/// The note of a degraded mode, or "".
std::string note_of(const std::string& key) {
  for (const std::string& mode : degraded_modes()) {
    if (mode.starts_with(key + ": ")) return mode;
  }
  return "";
}

TEST(HostMappingNodes, without_parts_the_kernel_is_asked_for_nothing) {
  test::RecordingPolicy policy;
  const HostMapping mapping({.owner = "test", .size_bytes = 4 * kMiB, .policy = &policy});
  EXPECT_THAT(policy.calls(), testing::IsEmpty());
  EXPECT_EQ(mapping.placement(), "");
}

TEST(HostMappingNodes, each_part_is_asked_for_on_its_node_and_looked_at) {
  test::RecordingPolicy policy;
  const HostMapping mapping({.owner = "test",
                             .size_bytes = 6 * kMiB,
                             .parts = {{.numa_node = 1, .size_bytes = 4 * kMiB},
                                       {.numa_node = 3, .size_bytes = 2 * kMiB}},
                             .policy = &policy});
  const std::byte* base = mapping.bytes().data();
  EXPECT_THAT(policy.calls(),
              testing::ElementsAre(Call{base, 4 * kMiB, 1}, Call{base + 4 * kMiB, 2 * kMiB, 3}));
  EXPECT_EQ(mapping.placement(), "4.0 MiB on NUMA node 1, 2.0 MiB on NUMA node 3");
  EXPECT_TRUE(resident(mapping.bytes()));
}

// The policy of pages that are there already would change nothing.
TEST(HostMappingNodes, pages_are_asked_for_before_they_are_touched) {
  class Untouched final : public MemoryPolicy {
   public:
    int prefer(std::span<std::byte> bytes, int) override {
      std::vector<unsigned char> pages(bytes.size() / 4096);
      EXPECT_EQ(::mincore(bytes.data(), bytes.size(), pages.data()), 0);
      for (const unsigned char page : pages) touched += page & 1;
      return 0;
    }
    int node_of(const std::byte*) override { return 0; }
    int touched = 0;
  } policy;
  const HostMapping mapping({.owner = "test",
                             .size_bytes = 2 * kMiB,
                             .parts = {{.numa_node = 0, .size_bytes = 2 * kMiB}},
                             .policy = &policy});
  EXPECT_EQ(policy.touched, 0);
}

TEST(HostMappingNodes, a_refused_policy_is_noted_once_and_made_up_for_by_first_touch) {
  test::RecordingPolicy policy;
  policy.refusal = EPERM;
  const HostMapping mapping({.owner = "buffers of a container",
                             .size_bytes = 2 * kMiB,
                             .parts = {{.numa_node = 1, .size_bytes = 2 * kMiB, .cpus = {0}}},
                             .policy = &policy});
  EXPECT_TRUE(resident(mapping.bytes()));
  EXPECT_THAT(mapping.placement(),
              testing::AllOf(testing::HasSubstr("2.0 MiB on NUMA node 1 (by first touch: EPERM"),
                             testing::HasSubstr("not known: EPERM")));
  EXPECT_THAT(note_of("numa"),
              testing::AllOf(testing::HasSubstr("buffers of a container"),
                             testing::HasSubstr("NUMA node 1"), testing::HasSubstr("EPERM"),
                             testing::HasSubstr("CAP_SYS_NICE")));
}

TEST(HostMappingNodes, pages_that_came_to_lie_elsewhere_are_noted) {
  test::RecordingPolicy policy;
  policy.full_node = 4;
  const HostMapping mapping({.owner = "too much",
                             .size_bytes = 2 * kMiB,
                             .parts = {{.numa_node = 4, .size_bytes = 2 * kMiB}},
                             .policy = &policy});
  EXPECT_EQ(mapping.placement(), "2.0 MiB on NUMA node 4 (64 of 64 sampled pages elsewhere)");
  EXPECT_THAT(note_of("numa pages"), testing::HasSubstr("too much: 64 of 64 sampled pages"));
}

TEST(HostMappingNodes, the_kernel_refuses_a_node_that_no_machine_has) {
  std::vector<std::byte> page(8192);
  auto* begin =
      reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(page.data()), 4096));
  EXPECT_NE(MemoryPolicy::of_kernel().prefer({begin, 4096}, 1'000'000), 0);
}

/// A pool of 8 MiB on nodes 0 and 1, three quarters and one, and a machine that keeps what it asks.
class PoolOnTwoNodes : public testing::Test {
 protected:
  PoolOnTwoNodes() {
    PinnedPoolOptions options;
    options.budget_bytes = 8 * kMiB;
    options.nodes = {{.numa_node = 0, .weight = 3}, {.numa_node = 1, .weight = 1}};
    options.memory_policy = &policy_;
    options.metrics = &metrics_;
    pool_ = PinnedPool::create(reactor_, options);
  }
  Lease lend(std::uint64_t size_bytes, int numa_node) {
    return pool_->try_acquire(
        {.purpose = Purpose::kOptimizer, .size_bytes = size_bytes, .numa_node = numa_node});
  }
  /// Nodes of the first and the last byte.
  std::pair<int, int> nodes_of(const Lease& lease) const {
    return {policy_.asked_for(lease.bytes().data()), policy_.asked_for(&lease.bytes().back())};
  }
  std::uint64_t on_node() const { return metrics_.value(Counter::kLeasesOnNode); }
  std::uint64_t elsewhere() const { return metrics_.value(Counter::kLeasesElsewhere); }

  test::RecordingPolicy policy_;
  Metrics metrics_;
  Reactor reactor_;
  std::unique_ptr<PinnedPool> pool_;
};

TEST_F(PoolOnTwoNodes, has_a_part_for_each_in_proportion_to_its_weight) {
  const std::byte* base = pool_->mapping().data();
  EXPECT_THAT(policy_.calls(),
              testing::ElementsAre(Call{base, 6 * kMiB, 0}, Call{base + 6 * kMiB, 2 * kMiB, 1}));
  EXPECT_EQ(pool_->placement(), "6.0 MiB on NUMA node 0, 2.0 MiB on NUMA node 1");
}

TEST_F(PoolOnTwoNodes, lends_on_the_node_that_is_asked_for) {
  std::vector<Lease> leases;
  for (int i = 0; i < 12; ++i) {
    leases.push_back(lend(128 * kKiB, i % 2));
    ASSERT_TRUE(leases.back());
    EXPECT_EQ(nodes_of(leases.back()), std::pair(i % 2, i % 2));
  }
  EXPECT_EQ(on_node(), 12u);
  EXPECT_EQ(elsewhere(), 0u);
}

TEST_F(PoolOnTwoNodes, lends_elsewhere_what_the_node_cannot_give_and_counts_it) {
  const Lease full = lend(2 * kMiB - 4 * kKiB, 1);
  EXPECT_EQ(nodes_of(full), std::pair(1, 1));
  const Lease other = lend(kMiB, 1);
  ASSERT_TRUE(other);
  EXPECT_EQ(nodes_of(other), std::pair(0, 0));
  EXPECT_EQ(on_node(), 1u);
  EXPECT_EQ(elsewhere(), 1u);
}

TEST_F(PoolOnTwoNodes, lends_across_the_border_what_only_fits_there) {
  const Lease low = lend(5 * kMiB - 4 * kKiB, 0);
  const Lease high = lend(kMiB - 4 * kKiB, 1);
  const Lease long_one = lend(2 * kMiB, 1);
  ASSERT_TRUE(long_one) << "one budget: what is free of two nodes serves one request";
  EXPECT_EQ(nodes_of(long_one), std::pair(0, 1));
  EXPECT_EQ(elsewhere(), 1u);
}

TEST_F(PoolOnTwoNodes, lends_its_last_byte_however_it_was_asked) {
  std::vector<Lease> leases;
  std::uint64_t out = 0;
  for (std::size_t i = 0; pool_->free_bytes() > 0; ++i) {
    leases.push_back(lend(std::min<std::uint64_t>(76 * kKiB, pool_->free_bytes()), i % 3 == 0));
    ASSERT_TRUE(leases.back()) << out << " bytes are out, " << pool_->free_bytes() << " free";
    out += leases.back().bytes().size();
  }
  EXPECT_EQ(out, 8 * kMiB);
}

TEST_F(PoolOnTwoNodes, does_not_count_who_asked_for_no_node) {
  EXPECT_TRUE(lend(kMiB, -1));
  EXPECT_EQ(on_node() + elsewhere(), 0u);
}

TEST(PinnedPoolMemory, of_one_place_asks_the_kernel_for_nothing) {
  test::RecordingPolicy policy;
  Metrics metrics;
  Reactor reactor;
  PinnedPoolOptions options;
  options.budget_bytes = 4 * kMiB;
  options.memory_policy = &policy;
  options.metrics = &metrics;
  const auto pool = PinnedPool::create(reactor, options);
  EXPECT_TRUE(pool->try_acquire({.purpose = Purpose::kParams, .size_bytes = kMiB, .numa_node = 1}));
  EXPECT_THAT(policy.calls(), testing::IsEmpty());
  EXPECT_EQ(metrics.value(Counter::kLeasesElsewhere), 0u);
  EXPECT_EQ(pool->placement(), "");
}

TEST(PinnedPoolMemory, is_the_budget_resident_and_absent_in_children) {
  Reactor reactor;
  PinnedPoolOptions options;
  options.budget_bytes = 6 * kMiB;
  options.nodes = {{.numa_node = 0}};
  const auto pool = PinnedPool::create(reactor, options);
  EXPECT_EQ(pool->mapping().size(), 6 * kMiB);
  EXPECT_EQ(pool->free_bytes(), 6 * kMiB);
  EXPECT_TRUE(resident(pool->mapping()));
  EXPECT_FALSE(shared_with_child(pool->mapping()));
}

// One lease after the other lies at another place modulo 2 MiB, though each is 2 MiB long.
TEST(PinnedPoolMemory, large_leases_are_staggered_while_there_is_room) {
  Reactor reactor;
  PinnedPoolOptions options;
  options.budget_bytes = 8 * kMiB;
  const auto pool = PinnedPool::create(reactor, options);
  const LeaseRequest request{.purpose = Purpose::kOptimizer, .size_bytes = 2 * kMiB};
  std::vector<Lease> leases;
  std::vector<std::uintptr_t> residues;
  for (int i = 0; i < 3; ++i) {
    leases.push_back(pool->try_acquire(request));
    ASSERT_TRUE(leases.back());
    residues.push_back(reinterpret_cast<std::uintptr_t>(leases.back().bytes().data()) % (2 * kMiB));
  }
  EXPECT_THAT(residues, testing::ElementsAre(0, 4096, 8192));
  leases.clear();
  EXPECT_TRUE(pool->try_acquire({.purpose = Purpose::kOptimizer, .size_bytes = 8 * kMiB}))
      << "a lease that fits without staggering is not refused";
}

}  // namespace
}  // namespace ziggurat
