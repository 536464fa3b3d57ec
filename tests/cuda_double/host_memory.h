// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/host_memory.h: which memory of the host is page-locked.
#pragma once

#include <cstdint>
#include <map>

#include "tests/cuda_double/order.h"

namespace ziggurat::cuda_double {

class HostMemory {
 public:
  enum class How { kRegistered, kAllocated };
  enum class Kind {
    kPageable,  ///< none of it is page-locked
    kPinned,    ///< one registration or allocation holds all of it
    kMixed,     ///< neither: a copy of it is refused
  };

  Kind kind_of(Range range) const;
  bool overlaps(Range range) const { return kind_of(range) != Kind::kPageable; }
  void add(Range range, How how) { pinned_[range.begin] = {range, how}; }
  /// The range that begins there and came about so; empty: none.
  Range find(std::uintptr_t begin, How how) const;
  void remove(std::uintptr_t begin) { pinned_.erase(begin); }
  std::uint64_t size_bytes() const;

  struct Pinned {
    Range range;
    How how = How::kRegistered;
  };
  const std::map<std::uintptr_t, Pinned>& all() const noexcept { return pinned_; }

 private:
  std::map<std::uintptr_t, Pinned> pinned_;
};

}  // namespace ziggurat::cuda_double
