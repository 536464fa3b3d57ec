// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_ceiling.h: measures how fast memory is for a pass that has an
// optimizer's shape but computes next to nothing. It reads and writes the same streams at the same
// places as the optimizer.
//
// No single loop is the fastest on every machine. The length of the run that a loop takes of each
// stream, whether it asks for lines ahead, and whether it stores past the cache decide as much as
// the memory does. So the limit is the fastest of several loops, each measured often.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat::measure {

/// A stream of whole cache lines, which begins at a line and has `element_bytes` for each element;
/// 0 if there is no such stream.
struct CeilingStream {
  std::byte* data = nullptr;
  std::size_t element_bytes = 0;
};
struct CeilingShape {
  std::array<CeilingStream, 4> in_place{};  ///< read and written
  CeilingStream read{};                     ///< the gradient
  CeilingStream written{};                  ///< the parameter, which is stored past the cache
};

/// Describes one way of walking through the streams.
struct CeilingWalk {
  std::size_t run_elements;  ///< elements of a stream before the next stream has its turn
  std::size_t ahead_bytes;   ///< how far ahead lines are asked for; 0 if the hardware does it
  bool past_cache;           ///< whether what is updated in place is stored past the cache too
};
inline constexpr std::array<CeilingWalk, 6> kCeilingWalks{{{64, 0, false},
                                                           {256, 0, false},
                                                           {1024, 0, false},
                                                           {64, 1024, false},
                                                           {256, 1024, false},
                                                           {256, 0, true}}};

/// Reads and writes all of `elements` elements (whole runs of the walk) with the widest instruction
/// set of this CPU. What is updated in place keeps its values.
void run_ceiling(const CeilingShape& shape, const CeilingWalk& walk, std::size_t elements);

}  // namespace ziggurat::measure
