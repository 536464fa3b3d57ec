// SPDX-License-Identifier: Apache-2.0
// aio/aligned_bytes.cc: maps the memory of transfers, and keeps mappings that can be used again.
#include "aio/aligned_bytes.h"

#include <errno.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "aio/fork_closed.h"
#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

/// The smallest size that gets a mapping of its own. Smaller memory comes from malloc and is not
/// worth keeping.
constexpr std::uint64_t kMapped = 128 * kKiB;
/// Sizes are rounded up to a multiple of this, so that transfers of almost the same size can use
/// each other's memory.
constexpr std::uint64_t kPooledUnit = 64 * kKiB;

}  // namespace

void AlignedBytes::Release::operator()(std::byte* memory) const noexcept {
  if (mapped_bytes == 0) {
    std::free(memory);
  } else if (const auto its = pool.lock()) {
    its->push_back(Memory(memory, Release{.mapped_bytes = mapped_bytes, .pool = {}}));
  } else {
    ::munmap(memory, mapped_bytes);
  }
}

AlignedBytes::Memory AlignedBytes::allocate(std::uint64_t size_bytes) {
  const std::uint64_t size = round_up(size_bytes, kAlignment);
  const bool mapped = size >= kMapped;
  void* const memory =
      mapped ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
             : std::aligned_alloc(kAlignment, size);
  if (memory == nullptr || memory == MAP_FAILED) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("cannot allocate memory for a transfer of {}", format_bytes(size_bytes)),
        errno);
  }
  Memory its(static_cast<std::byte*>(memory), {.mapped_bytes = mapped ? size : 0, .pool = {}});
  if (mapped) keep_out_of_children({its.get(), size}, "transfers");
  return its;
}

AlignedBytes::AlignedBytes(std::uint64_t size_bytes, std::uint64_t lead_bytes)
    : AlignedBytes(allocate(lead_bytes + size_bytes), size_bytes, lead_bytes) {}

AlignedBytes AlignedPool::take(std::uint64_t size_bytes, std::uint64_t lead_bytes) {
  const std::uint64_t wanted = lead_bytes + size_bytes;
  if (wanted < kMapped) return AlignedBytes(size_bytes, lead_bytes);
  const auto mapped = [](const AlignedBytes::Memory& memory) {
    return memory.get_deleter().mapped_bytes;
  };
  // Takes the smallest spare mapping that is large enough. If none is, one smaller mapping is
  // freed, and a larger one is made.
  std::ranges::sort(*spare_, {}, mapped);
  auto found = std::ranges::lower_bound(*spare_, wanted, {}, mapped);
  const bool large_enough = found != spare_->end();
  if (!large_enough && !spare_->empty()) --found;
  AlignedBytes::Memory memory(nullptr, AlignedBytes::Release{.mapped_bytes = 0, .pool = {}});
  if (found != spare_->end()) {
    memory = std::move(*found);
    spare_->erase(found);
  }
  if (!large_enough) {
    memory.reset();
    memory = AlignedBytes::allocate(round_up(wanted, kPooledUnit));
  }
  memory.get_deleter().pool = spare_;
  return {std::move(memory), size_bytes, lead_bytes};
}

}  // namespace ziggurat
