// SPDX-License-Identifier: Apache-2.0
// tests/tiers/host_mapping_test.cc: what the pool's and the emulated device's memory is made of,
// and that children do not get it.
#include "tiers/host_mapping.h"

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
#include "tiers/pinned_pool.h"

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
  for (const std::uint64_t size : {4 * kKiB, 100 * kKiB, 2 * kMiB, 5 * kMiB + 4 * kKiB}) {
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

TEST(PinnedPoolMemory, is_the_budget_resident_and_absent_in_children) {
  Reactor reactor;
  PinnedPoolOptions options;
  options.budget_bytes = 6 * kMiB;
  options.numa_node = 0;
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
