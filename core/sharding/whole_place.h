// SPDX-License-Identifier: Apache-2.0
// core/sharding/whole_place.h: where a piece that a trainer lends lies in a whole tensor, as the
// trainer says it and as a store's layout keeps it. Arithmetic only; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ziggurat {

struct WholePlace {
  std::string name;                 ///< of the whole tensor; empty if the piece belongs to none
  std::vector<std::int64_t> shape;  ///< of the whole tensor
  /// The piece's elements follow one another from this one on, unless it is a box.
  std::uint64_t first = 0;
  std::vector<std::int64_t> offsets;  ///< indices of a box's first element; empty for a run
  std::vector<std::int64_t> box;      ///< its sizes, as many as offsets

  bool is_box() const noexcept { return !box.empty(); }
  friend bool operator==(const WholePlace&, const WholePlace&) = default;
};

/// Returns why a piece of `count` elements cannot lie there; an empty text if it can.
std::string fault_of(const WholePlace& place, std::uint64_t count);

}  // namespace ziggurat
