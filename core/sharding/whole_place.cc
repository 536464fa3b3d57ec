// SPDX-License-Identifier: Apache-2.0
// core/sharding/whole_place.cc: checks that a piece fits into its tensor.
#include "core/sharding/whole_place.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ziggurat {
namespace {

/// Most elements of a tensor, so that products never overflow.
constexpr std::int64_t kWholeElementsMax = std::int64_t{1} << 50;

/// Returns the number of elements of a shape; 0 if no tensor can have it.
std::uint64_t elements_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape) {
    if (dimension < 1 || dimension > kWholeElementsMax / count) return 0;
    count *= dimension;
  }
  return static_cast<std::uint64_t>(count);
}

}  // namespace

std::string fault_of(const WholePlace& place, std::uint64_t count) {
  const std::uint64_t whole = elements_of(place.shape);
  if (whole == 0) return fmt::format("no tensor has the shape {}", place.shape);
  if (!place.is_box()) {
    if (place.first <= whole && count <= whole - place.first) return "";
    return fmt::format("the piece has {} elements from {} on, but the whole tensor has only {}",
                       count, place.first, whole);
  }
  bool inside =
      place.offsets.size() == place.shape.size() && place.box.size() == place.shape.size();
  for (std::size_t d = 0; inside && d < place.shape.size(); ++d) {
    inside = place.offsets[d] >= 0 && place.offsets[d] < place.shape[d] && place.box[d] >= 1 &&
             place.box[d] <= place.shape[d] - place.offsets[d];
  }
  if (!inside)
    return fmt::format("the box {} at {} is not inside of a tensor of {}", place.box, place.offsets,
                       place.shape);
  if (elements_of(place.box) == count) return "";
  return fmt::format("the piece has {} elements, but the box {} has {}", count, place.box,
                     elements_of(place.box));
}

}  // namespace ziggurat
