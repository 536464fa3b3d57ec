// SPDX-License-Identifier: Apache-2.0
// base/absent_memory.cc: one mapping that nobody may touch.
#include "base/absent_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kPartBytes = 2 * kMiB;
constexpr std::uintptr_t kPageBytes = 4 * kKiB;

}  // namespace

AbsentMemory::AbsentMemory(std::uint64_t size_bytes) {
  const std::uint64_t size = round_up(std::max<std::uint64_t>(size_bytes, 1), kPartBytes);
  void* const at = ::mmap(nullptr, size + kPartBytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("cannot reserve {} of addresses: {}; raise the limit on address space "
                            "(ulimit -v)",
                            format_bytes(size), errno_text(errno)),
                errno);
  }
  all_ = {static_cast<std::byte*>(at), size + kPartBytes};
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  used_bytes_ = round_up(begin, kPartBytes) - begin;
}

AbsentMemory::~AbsentMemory() {
  const int failed = ::munmap(all_.data(), all_.size());
  ZIGGURAT_CHECK(failed == 0, "munmap: errno {}", errno);
}

std::span<std::byte> AbsentMemory::reserve(std::uint64_t size_bytes) {
  const std::uint64_t occupied = round_up(size_bytes, kPartBytes);
  if (occupied > all_.size() - used_bytes_) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("{} of addresses were asked for, but only {} of {} are left",
                            format_bytes(size_bytes), format_bytes(all_.size() - used_bytes_),
                            format_bytes(all_.size())));
  }
  const std::span<std::byte> part = all_.subspan(used_bytes_, size_bytes);
  used_bytes_ += occupied;
  return part;
}

void AbsentMemory::make_real(std::span<std::byte> bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t begin = address / kPageBytes * kPageBytes;
  const std::uintptr_t end = round_up(address + bytes.size(), kPageBytes);
  ZIGGURAT_CHECK(lacks(bytes.data()), "memory at {:#x} is no address without memory", address);
  if (::mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE) != 0) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("cannot give {} memory: {}", format_bytes(bytes.size()), errno_text(errno)),
        errno);
  }
  real_[begin] = std::max(end, real_[begin]);
}

bool AbsentMemory::lacks(const void* address) const noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const auto begin = reinterpret_cast<std::uintptr_t>(all_.data());
  if (at < begin || at >= begin + all_.size()) return false;
  const auto after = real_.upper_bound(at);
  return after == real_.begin() || at >= std::prev(after)->second;
}

}  // namespace ziggurat
