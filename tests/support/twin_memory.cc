// SPDX-License-Identifier: Apache-2.0
// tests/support/twin_memory.cc: cuda_memory.h for host twins: plain memory, and nothing is queued.
#include <cstring>
#include <new>

#include "tests/support/cuda_memory.h"
#include "tests/support/twin.h"

namespace ziggurat::testing {
namespace {

constexpr std::align_val_t kAlignment{256};
std::uint64_t seed = 1;

}  // namespace

std::byte* allocate_on_device(std::size_t size_bytes) {
  return static_cast<std::byte*>(::operator new(size_bytes, kAlignment));
}
void free_on_device(std::byte* memory) { ::operator delete(memory, kAlignment); }
void copy_to_device(std::byte* to, std::span<const std::byte> from) {
  std::memcpy(to, from.data(), from.size());
}
void copy_from_device(std::span<std::byte> to, const std::byte* from) {
  std::memcpy(to.data(), from, to.size());
}
void draw_order(std::uint64_t from) { seed = from; }
std::uint64_t next_order() { return seed++; }

}  // namespace ziggurat::testing
