// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_ceiling.h: what memory gives a pass of an optimizer's shape that
// computes next to nothing.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace ziggurat::measure {

/// Arrays updated in place, and one that is only read; `element_bytes` of each.
struct CeilingStream {
  std::byte* data = nullptr;
  std::size_t element_bytes = 0;
};
struct CeilingShape {
  std::array<CeilingStream, 4> in_place{};  ///< those without bytes are not there
  CeilingStream read{};
};

/// Reads all of `elements` elements (a multiple of kCeilingElements) and writes those in place, at
/// the widest instruction set of this CPU.
inline constexpr std::size_t kCeilingElements = 64;
void run_ceiling(const CeilingShape& shape, std::size_t elements);

}  // namespace ziggurat::measure
