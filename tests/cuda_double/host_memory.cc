// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/host_memory.cc: see host_memory.h.
#include "tests/cuda_double/host_memory.h"

#include <iterator>

namespace ziggurat::cuda_double {

HostMemory::Kind HostMemory::kind_of(Range range) const {
  auto at = pinned_.upper_bound(range.begin);
  if (at != pinned_.begin()) {
    const Range before = std::prev(at)->second.range;
    if (before.contains(range)) return Kind::kPinned;
    if (before.overlaps(range)) return Kind::kMixed;
  }
  return at != pinned_.end() && at->second.range.overlaps(range) ? Kind::kMixed : Kind::kPageable;
}

Range HostMemory::find(std::uintptr_t begin, How how) const {
  const auto at = pinned_.find(begin);
  return at == pinned_.end() || at->second.how != how ? Range{} : at->second.range;
}

std::uint64_t HostMemory::size_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [begin, pinned] : pinned_) sum += pinned.range.size_bytes();
  return sum;
}

}  // namespace ziggurat::cuda_double
