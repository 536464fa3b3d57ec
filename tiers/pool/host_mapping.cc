// SPDX-License-Identifier: Apache-2.0
// tiers/pool/host_mapping.cc: calls mmap, madvise, the memory policy, populate and mlock in the
// order that the kernel needs: all advice and every policy before the first touch.
#include "tiers/pool/host_mapping.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "aio/fork_closed.h"
#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/topology/thread_place.h"
#include "tiers/pool/huge_pages.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; glibc 2.35
#endif

namespace ziggurat {
namespace {

void* map(std::uint64_t size, int extra_flags = 0) {
  return ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags,
                -1, 0);
}

/// Fills pages. Returns 0, or the errno if the kernel could not give them.
int populate_piece(std::span<std::byte> bytes) {
  if (::madvise(bytes.data(), bytes.size(), MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (std::uint64_t at = 0; at < bytes.size(); at += kSmallPageBytes) {  // before Linux 5.14
    const_cast<volatile std::byte&>(bytes[at]) = std::byte{0};
  }
  return 0;
}

std::uint64_t usable_cpus() {
  cpu_set_t cpus;
  if (::sched_getaffinity(0, sizeof(cpus), &cpus) != 0)
    return 1;  // the machine has more CPUs than
               // the set can name
  return static_cast<std::uint64_t>(CPU_COUNT(&cpus));
}

/// Fills pages like populate_piece(), with several threads: in each of them the kernel clears a few
/// GB per second.
int populate(std::span<std::byte> bytes) {
  constexpr std::uint64_t kPiece = 32 * kMiB;
  constexpr std::uint64_t kThreadsMax = 8;
  const std::uint64_t pieces = (bytes.size() + kPiece - 1) / kPiece;
  std::atomic<std::uint64_t> next{0};
  std::atomic<int> failure{0};
  const auto work = [&] {
    for (std::uint64_t piece = next++; piece < pieces && failure == 0; piece = next++) {
      const std::uint64_t begin = piece * kPiece;
      const int error =
          populate_piece(bytes.subspan(begin, std::min(kPiece, bytes.size() - begin)));
      if (error != 0) failure = error;
    }
  };
  std::vector<std::thread> helpers;
  try {
    const std::uint64_t threads = std::min({pieces, kThreadsMax, usable_cpus()});
    while (helpers.size() + 1 < threads) helpers.emplace_back(work);
  } catch (const std::exception&) {  // the system gives no more threads, so those that run must do
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return failure;
}

/// The result of filling one part.
struct PartFill {
  int refused = 0;    ///< errno of the policy; 0 if it was accepted
  int populated = 0;  ///< errno of filling the pages
};

/// Asks the kernel to place the part's pages on its node, and touches them.
PartFill fill_part(std::span<std::byte> bytes, const NodePart& part, MemoryPolicy& policy,
                   const std::string& owner) {
  PartFill result{.refused = policy.prefer(bytes, part.numa_node)};
  if (result.refused == 0) {
    result.populated = populate(bytes);
    return result;
  }
  note_degraded("numa",
                fmt::format("{}: the kernel does not accept a memory policy for NUMA node {}: {}; "
                            "pages are touched first from that node's CPUs instead "
                            "(containers: allow mbind, or CAP_SYS_NICE)",
                            owner, part.numa_node, errno_text(result.refused)));
  std::thread([&] {
    const ThreadPlace place(part.cpus, owner);
    result.populated = populate(bytes);
  }).join();
  return result;
}

/// Asks where a few pages of the part really are, and describes the result in words.
std::string look_at_part(std::span<const std::byte> bytes, const NodePart& part, int refused,
                         MemoryPolicy& policy, const std::string& owner) {
  constexpr std::uint64_t kSamples = 64;
  std::string text = fmt::format("{} on NUMA node {}", format_bytes(bytes.size()), part.numa_node);
  if (refused != 0) text += fmt::format(" (by first touch: {})", errno_text(refused));
  std::uint64_t elsewhere = 0;
  for (std::uint64_t i = 0; i < kSamples; ++i) {
    const int node = policy.node_of(bytes.data() + bytes.size() / kSamples * i);
    if (node < 0) return text + fmt::format(" (not known: {})", errno_text(-node));
    if (node != part.numa_node) ++elsewhere;
  }
  if (elsewhere == 0) return text;
  note_degraded(
      "numa pages",
      fmt::format("{}: {} of {} sampled pages are not on NUMA node {}, because it had no "
                  "room or accepted no policy; free memory on that node, or give a smaller budget",
                  owner, elsewhere, kSamples, part.numa_node));
  return text + fmt::format(" ({} of {} sampled pages elsewhere)", elsewhere, kSamples);
}

void lock_pages(std::span<std::byte> bytes, const HostMappingOptions& options) {
  if (!options.lock || ::mlock(bytes.data(), bytes.size()) == 0) return;
  const int error = errno;
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  note_degraded(
      "memlock",
      fmt::format("{}: cannot lock {}, so pages may be swapped: {}; RLIMIT_MEMLOCK is {}. "
                  "Use `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd), or "
                  "--ulimit memlock=-1 (docker)",
                  options.owner, format_bytes(bytes.size()), errno_text(error),
                  limit.rlim_cur == RLIM_INFINITY ? std::string("unlimited")
                                                  : format_bytes(limit.rlim_cur)));
}

}  // namespace

/// Fills the mapping. Returns 0, or the errno if the kernel could not give the pages.
int HostMapping::fill(const HostMappingOptions& options) {
  if (options.parts.empty()) return populate(bytes_);
  MemoryPolicy& policy = options.policy != nullptr ? *options.policy : MemoryPolicy::of_kernel();
  std::uint64_t begin = 0;
  for (const NodePart& part : options.parts) {
    ZIGGURAT_CHECK(part.size_bytes <= bytes_.size() - begin, "{}: parts beyond the mapping",
                   options.owner);
    const std::span<std::byte> bytes = bytes_.subspan(begin, part.size_bytes);
    begin += part.size_bytes;
    const PartFill result = fill_part(bytes, part, policy, options.owner);
    if (result.populated != 0) return result.populated;
    placement_ += (placement_.empty() ? "" : ", ") +
                  look_at_part(bytes, part, result.refused, policy, options.owner);
  }
  ZIGGURAT_CHECK(begin == bytes_.size(), "{}: {} of {} bytes are in no part", options.owner,
                 bytes_.size() - begin, bytes_.size());
  return 0;
}

std::optional<HostMapping> HostMapping::reserved(const HostMappingOptions& options) {
  ZIGGURAT_CHECK(options.size_bytes > 0 && options.size_bytes % kHugePageBytes == 0,
                 "{}: {} bytes of huge pages", options.owner, options.size_bytes);
  // Reserves the pages at once, so that a lack of them is ENOMEM now and never SIGBUS later. If a
  // cpuset forbids the node of the pages, populate reports that.
  void* base = map(options.size_bytes, MAP_HUGETLB | (21 << 26) /* MAP_HUGE_2MB */);
  if (base == MAP_FAILED) return std::nullopt;
  HostMapping mapping;
  mapping.bytes_ = {static_cast<std::byte*>(base), options.size_bytes};
  mapping.page_kind_ = "2 MiB huge pages";
  keep_out_of_children(mapping.bytes_, options.owner);
  if (mapping.fill(options) != 0) return std::nullopt;
  return mapping;  // hugetlb pages are never swapped, so nothing has to be locked
}

HostMapping::HostMapping(const HostMappingOptions& options) {
  ZIGGURAT_CHECK(options.size_bytes > 0, "{}: a mapping of nothing", options.owner);
  // Only ranges aligned to a huge page can become one, so the mapping is made longer by that, and
  // both ends are given back.
  const std::uint64_t size = round_up(options.size_bytes, kSmallPageBytes);
  void* base = map(size + kHugePageBytes);
  if (base == MAP_FAILED) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("{}: cannot map {} of memory: {}", options.owner, format_bytes(size),
                            errno_text(errno)),
                errno);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  const std::uint64_t before = round_up(address, kHugePageBytes) - address;
  std::byte* aligned = static_cast<std::byte*>(base) + before;
  if (before > 0) ::munmap(base, before);
  if (before < kHugePageBytes) ::munmap(aligned + size, kHugePageBytes - before);
  bytes_ = {aligned, size};

  const bool wants_huge = options.huge_pages && size >= kHugePageBytes;
  const bool advised = wants_huge && ::madvise(aligned, size, MADV_HUGEPAGE) == 0;
  keep_out_of_children(bytes_, options.owner);
  if (const int error = fill(options); error != 0) {
    ::munmap(aligned, size);
    bytes_ = {};
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("{}: cannot fill {} with pages: {}", options.owner, format_bytes(size),
                            errno_text(error)),
                error);
  }
  lock_pages(bytes_, options);

  const std::optional<std::uint64_t> huge = advised ? huge_bytes_of(bytes_) : 0;
  const bool mostly_huge = !huge || *huge * 2 >= size;
  page_kind_ = advised && mostly_huge ? "transparent huge pages" : "4 KiB pages";
  if (wants_huge && !(advised && mostly_huge)) {
    note_degraded(
        "huge pages",
        fmt::format("{}: only {} of {} are huge pages, which means more TLB misses and smaller "
                    "disk requests. Allow them with 'echo madvise > "
                    "/sys/kernel/mm/transparent_hugepage/enabled', or free memory",
                    options.owner, format_bytes(*huge), format_bytes(size)));
  }
}

HostMapping HostMapping::without_memory(AbsentMemory& absent, std::uint64_t size_bytes) {
  HostMapping mapping;
  mapping.bytes_ = absent.reserve(size_bytes);
  mapping.is_mapped_ = false;
  mapping.page_kind_ = "no memory";
  return mapping;
}

HostMapping::HostMapping(HostMapping&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})),
      is_mapped_(other.is_mapped_),
      page_kind_(std::move(other.page_kind_)),
      placement_(std::move(other.placement_)) {}

HostMapping& HostMapping::operator=(HostMapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(is_mapped_, other.is_mapped_);
  std::swap(page_kind_, other.page_kind_);
  std::swap(placement_, other.placement_);
  return *this;
}

HostMapping::~HostMapping() {
  if (is_mapped_ && !bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace ziggurat
