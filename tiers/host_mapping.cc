// SPDX-License-Identifier: Apache-2.0
// tiers/host_mapping.cc: mmap, mbind, madvise, populate, mlock, in the order that the kernel wants
// them.
//
// The NUMA policy goes before the first touch. It is MPOL_PREFERRED, then checked: under MPOL_BIND
// a node that turns out too small means the OOM killer, not an error.
#include "tiers/host_mapping.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; glibc 2.35
#endif

namespace ziggurat {
namespace {

constexpr std::uint64_t kHugePage = 2 * kMiB;
constexpr std::uint64_t kSmallPage = 4 * kKiB;

void* map(std::uint64_t size, int extra_flags = 0) {
  return ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags,
                -1, 0);
}

/// 0, or the errno that kept the pages from being had.
int populate(std::span<std::byte> bytes) {
  if (::madvise(bytes.data(), bytes.size(), MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (std::uint64_t at = 0; at < bytes.size(); at += kSmallPage) {  // before Linux 5.14
    const_cast<volatile std::byte&>(bytes[at]) = std::byte{0};
  }
  return 0;
}

void prefer_node(std::span<std::byte> bytes, const HostMappingOptions& options) {
  if (options.numa_node < 0) return;
  if (::numa_available() < 0) {
    note_degraded("numa", fmt::format("{}: this kernel has no NUMA policy; pages lie where they "
                                      "are first touched",
                                      options.owner));
    return;
  }
  struct bitmask* nodes = ::numa_allocate_nodemask();
  ::numa_bitmask_setbit(nodes, static_cast<unsigned>(options.numa_node));
  const long result =
      ::mbind(bytes.data(), bytes.size(), MPOL_PREFERRED, nodes->maskp, nodes->size + 1, 0);
  const int error = errno;
  ::numa_free_nodemask(nodes);
  if (result == 0) return;
  note_degraded("numa", fmt::format("{}: cannot place pages on NUMA node {}: {}; they lie where "
                                    "they are first touched (containers: allow mbind, or "
                                    "CAP_SYS_NICE)",
                                    options.owner, options.numa_node, errno_text(error)));
}

/// Asks where a few pages really are.
void check_node(std::span<std::byte> bytes, const HostMappingOptions& options) {
  if (options.numa_node < 0) return;
  constexpr std::uint64_t kSamples = 64;
  std::uint64_t elsewhere = 0;
  for (std::uint64_t i = 0; i < kSamples; ++i) {
    std::byte* page = bytes.data() + bytes.size() / kSamples * i;
    int node = -1;
    if (::get_mempolicy(&node, nullptr, 0, page, MPOL_F_NODE | MPOL_F_ADDR) != 0) return;
    if (node != options.numa_node) ++elsewhere;
  }
  if (elsewhere == 0) return;
  note_degraded("numa", fmt::format("{}: {} of {} sampled pages are not on NUMA node {}, which had "
                                    "no room: free memory there, or give a smaller budget",
                                    options.owner, elsewhere, kSamples, options.numa_node));
}

void keep_out_of_children(std::span<std::byte> bytes, const HostMappingOptions& options) {
  if (::madvise(bytes.data(), bytes.size(), MADV_DONTFORK) == 0) return;
  note_degraded("fork", fmt::format("{}: MADV_DONTFORK failed: {}; do not fork while training",
                                    options.owner, errno_text(errno)));
}

void lock_pages(std::span<std::byte> bytes, const HostMappingOptions& options) {
  if (!options.lock || ::mlock(bytes.data(), bytes.size()) == 0) return;
  const int error = errno;
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  note_degraded("memlock",
                fmt::format("{}: cannot lock {}: {}; RLIMIT_MEMLOCK is {}. Pages may be swapped. "
                            "Fix: `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd), or "
                            "--ulimit memlock=-1 (docker)",
                            options.owner, format_bytes(bytes.size()), errno_text(error),
                            limit.rlim_cur == RLIM_INFINITY ? std::string("unlimited")
                                                            : format_bytes(limit.rlim_cur)));
}

/// Bytes of the mapping around `base` that are huge pages, from smaps; -1 where that cannot be
/// read.
std::int64_t transparent_huge_bytes(const std::byte* base) {
  std::ifstream smaps("/proc/self/smaps");
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  bool ours = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      ours = begin <= address && address < end;
    } else if (ours && std::sscanf(line.c_str(), "AnonHugePages: %llu kB", &kib) == 1) {
      return static_cast<std::int64_t>(kib * kKiB);
    }
  }
  return -1;
}

}  // namespace

std::optional<HostMapping> HostMapping::reserved(const HostMappingOptions& options) {
  ZIGGURAT_CHECK(options.size_bytes > 0 && options.size_bytes % kHugePage == 0,
                 "{}: {} bytes of huge pages", options.owner, options.size_bytes);
  // Reserves at once: ENOMEM here, never SIGBUS later, unless a cpuset forbids the pages' node:
  // populate says so.
  void* base = map(options.size_bytes, MAP_HUGETLB | (21 << 26) /* MAP_HUGE_2MB */);
  if (base == MAP_FAILED) return std::nullopt;
  HostMapping mapping;
  mapping.bytes_ = {static_cast<std::byte*>(base), options.size_bytes};
  mapping.page_kind_ = "2 MiB huge pages";
  prefer_node(mapping.bytes_, options);
  keep_out_of_children(mapping.bytes_, options);
  if (populate(mapping.bytes_) != 0) return std::nullopt;
  check_node(mapping.bytes_, options);
  return mapping;  // hugetlb pages are never swapped: nothing to lock
}

HostMapping::HostMapping(const HostMappingOptions& options) {
  ZIGGURAT_CHECK(options.size_bytes > 0, "{}: a mapping of nothing", options.owner);
  // Only ranges aligned to a huge page can become one: map that much more, and give back the two
  // ends.
  const std::uint64_t size = round_up(options.size_bytes, kSmallPage);
  void* base = map(size + kHugePage);
  if (base == MAP_FAILED) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("{}: cannot map {}: {}", options.owner, format_bytes(size), errno_text(errno)),
        errno);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  const std::uint64_t before = round_up(address, kHugePage) - address;
  std::byte* aligned = static_cast<std::byte*>(base) + before;
  if (before > 0) ::munmap(base, before);
  if (before < kHugePage) ::munmap(aligned + size, kHugePage - before);
  bytes_ = {aligned, size};

  const bool wants_huge = options.huge_pages && size >= kHugePage;
  prefer_node(bytes_, options);
  const bool advised = wants_huge && ::madvise(aligned, size, MADV_HUGEPAGE) == 0;
  keep_out_of_children(bytes_, options);
  if (const int error = populate(bytes_); error != 0) {
    ::munmap(aligned, size);
    bytes_ = {};
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("{}: cannot fill {} with pages: {}", options.owner, format_bytes(size),
                            errno_text(error)),
                error);
  }
  check_node(bytes_, options);
  lock_pages(bytes_, options);

  const std::int64_t huge = advised ? transparent_huge_bytes(aligned) : 0;
  const bool mostly_huge = huge < 0 || static_cast<std::uint64_t>(huge) * 2 >= size;
  page_kind_ = advised && mostly_huge ? "transparent huge pages" : "4 KiB pages";
  if (wants_huge && !(advised && mostly_huge)) {
    note_degraded(
        "huge pages",
        fmt::format("{}: {} of {} are huge pages: more TLB misses and smaller disk "
                    "requests. Fix: echo madvise > "
                    "/sys/kernel/mm/transparent_hugepage/enabled, or free memory",
                    options.owner,
                    format_bytes(static_cast<std::uint64_t>(std::max<std::int64_t>(huge, 0))),
                    format_bytes(size)));
  }
}

HostMapping::HostMapping(HostMapping&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})), page_kind_(std::move(other.page_kind_)) {}

HostMapping& HostMapping::operator=(HostMapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(page_kind_, other.page_kind_);
  return *this;
}

HostMapping::~HostMapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace ziggurat
