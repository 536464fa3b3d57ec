// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/device_memory.cc: see device_memory.h.
#include "tests/cuda_double/device_memory.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>

#include "base/check.h"

namespace ziggurat::cuda_double {
namespace {

constexpr std::uint64_t kAddressesPerByte = 4;  // how often an address of the budget is new
constexpr std::uint64_t kPoisonMax = 32 << 20;

/// What the fault handler may look at: inaccessible ranges, never taken back from here.
struct Guarded {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};
};
std::array<Guarded, 64> guarded;
struct sigaction before_us;

void on_fault(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Guarded& range : guarded) {
    if (address < range.begin.load() || address >= range.end.load()) continue;
    constexpr char kText[] =
        "cuda_double: the CPU touched device memory: copy it to the host, or run a kernel\n";
    static_cast<void>(!write(STDERR_FILENO, kText, sizeof(kText) - 1));
    break;
  }
  sigaction(SIGSEGV, &before_us, nullptr);  // the access faults again, there
}

void guard(Range range) {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction ours {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &ours, &before_us);
  });
  for (Guarded& slot : guarded) {
    std::uintptr_t none = 0;
    if (!slot.end.compare_exchange_strong(none, range.end)) continue;
    slot.begin = range.begin;
    return;
  }
}

void unguard(Range range) {
  for (Guarded& slot : guarded) {
    if (slot.begin.load() != range.begin) continue;
    slot.begin = 0;
    slot.end = 0;
  }
}

constexpr std::uintptr_t kPage = 4096;

/// Maps a file, or for -1 nothing.
void* map(std::uint64_t size_bytes, int protection, int file = -1) {
  const int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = mmap(nullptr, size_bytes, protection, kind | MAP_NORESERVE, file, 0);
  ZIGGURAT_CHECK(memory != MAP_FAILED, "cuda_double: mmap of {} bytes: errno {}", size_bytes,
                 errno);
  return memory;
}

}  // namespace

std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t z = a + 0x9e3779b97f4a7c15u * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void fill_with_poison(std::byte* bytes, std::size_t size_bytes, std::uint64_t seed) noexcept {
  for (std::size_t at = 0; at < size_bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = mix(seed, at);
    std::memcpy(bytes + at, &word, std::min(sizeof(word), size_bytes - at));
  }
}

DeviceMemory::DeviceMemory(std::uint64_t capacity_bytes, std::uint64_t seed, bool has_view)
    : seed_(seed) {
  const std::uint64_t reach = capacity_bytes * kAddressesPerByte + (1 << 20);
  addresses_ = range_of(map(reach, PROT_NONE), reach);
  next_ = addresses_.begin;
  guard(addresses_);
  if (!has_view) {
    bytes_ = static_cast<std::byte*>(map(reach, PROT_READ | PROT_WRITE));
    return;
  }
  const int file = memfd_create("cuda_double", MFD_CLOEXEC);
  ZIGGURAT_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(reach)) == 0,
                 "cuda_double: memory of {} bytes to map twice: errno {}", reach, errno);
  bytes_ = static_cast<std::byte*>(map(reach, PROT_READ | PROT_WRITE, file));
  view_ = static_cast<std::byte*>(map(reach, PROT_NONE, file));
  ::close(file);
  guard(range_of(view_, reach));
}

DeviceMemory::~DeviceMemory() {
  if (view_ != nullptr) {
    unguard(range_of(view_, addresses_.size_bytes()));
    munmap(view_, addresses_.size_bytes());
  }
  unguard(addresses_);
  munmap(reinterpret_cast<void*>(addresses_.begin), addresses_.size_bytes());
  munmap(bytes_, addresses_.size_bytes());
}

Allocation* DeviceMemory::allocate(std::uint64_t size_bytes) {
  // One page of nothing behind each, so that what runs over the end finds nothing.
  const std::uint64_t taken = (size_bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  for (int round = 0; round < 2; ++round) {
    std::uintptr_t at = next_;
    for (auto after = allocations_.lower_bound(at);
         after != allocations_.end() && after->first < at + taken; ++after) {
      at = (after->second.range.end + 2 * kAlignment - 1) / kAlignment * kAlignment;
    }
    if (at + taken <= addresses_.end) {
      next_ = at + taken;
      Allocation& allocation = allocations_[at];
      allocation.range = {at, at + size_bytes};
      poison(allocation.range);
      return &allocation;
    }
    next_ = addresses_.begin;
  }
  return nullptr;
}

void DeviceMemory::release(Allocation& allocation) {
  const Range range = allocation.range;
  poison(range);
  if (range.size_bytes() > kPoisonMax) {
    const std::uintptr_t first = (range.begin + kPage - 1) / kPage * kPage;
    madvise(bytes(first), (range.end - first) / kPage * kPage, MADV_DONTNEED);
  }
  allocations_.erase(range.begin);
}

void DeviceMemory::poison(Range range) {
  const std::uint64_t size = range.size_bytes();
  if (size <= kPoisonMax) {
    fill_with_poison(bytes(range.begin), size, mix(seed_, range.begin - addresses_.begin));
    return;
  }
  poison({range.begin, range.begin + kPoisonMax / 2});
  poison({range.end - kPoisonMax / 2, range.end});
}

void DeviceMemory::change_view(Range range, int by) {
  const std::uintptr_t end = range.end - addresses_.begin;
  std::uintptr_t page = (range.begin - addresses_.begin) / kPage * kPage;
  std::uintptr_t changed_from = page;  // the pages from here on change
  for (; page < end; page += kPage) {
    int& count = opened_[page];
    const bool was_open = count > 0;
    count += by;
    const bool is_open = count > 0;
    if (!is_open) opened_.erase(page);
    if (is_open != was_open) continue;
    protect(changed_from, page, by > 0);
    changed_from = page + kPage;
  }
  protect(changed_from, page, by > 0);
}

void DeviceMemory::protect(std::uintptr_t begin, std::uintptr_t end, bool is_open) {
  if (begin >= end) return;
  const int protection = is_open ? PROT_READ | PROT_WRITE : PROT_NONE;
  ZIGGURAT_CHECK(mprotect(view_ + begin, end - begin, protection) == 0,
                 "cuda_double: mprotect: errno {}", errno);
}

Allocation* DeviceMemory::find(std::uintptr_t address) {
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) return nullptr;
  Allocation& allocation = std::prev(after)->second;
  return address < allocation.range.end ? &allocation : nullptr;
}

std::string DeviceMemory::nearest(std::uintptr_t address) const {
  const auto after = allocations_.upper_bound(address);
  const auto text = [](std::uint64_t distance, const char* where, Range range) {
    return fmt::format("{} bytes {} the allocation of {} bytes at {:#x}", distance, where,
                       range.size_bytes(), range.begin);
  };
  std::string found = "no allocation is near";
  std::uint64_t distance = ~std::uint64_t{0};
  if (after != allocations_.begin()) {
    const Range range = std::prev(after)->second.range;
    if (address < range.end) return text(address - range.begin, "into", range);
    distance = address - range.end;
    found = text(distance, "past the end of", range);
  }
  if (after != allocations_.end() && after->first - address < distance) {
    found = text(after->first - address, "before", after->second.range);
  }
  return found;
}

}  // namespace ziggurat::cuda_double
