// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_ceiling.h: what memory gives a pass of an optimizer's shape that
// computes next to nothing: the same streams at the same places, read, written or both as the
// optimizer does.
//
// No single loop is the fastest on every machine: how long a run of each stream it takes, whether
// it asks for lines ahead and whether it stores past the cache decide as much as the memory does.
// The limit is the fastest of several, each measured often.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat::measure {

/// `element_bytes` of each element; 0: not there. Whole cache lines from a line's beginning.
struct CeilingStream {
  std::byte* data = nullptr;
  std::size_t element_bytes = 0;
};
struct CeilingShape {
  std::array<CeilingStream, 4> in_place{};  ///< read and written
  CeilingStream read{};                     ///< the gradient
  CeilingStream written{};                  ///< the parameter, stored past the cache
};

/// One way through the streams.
struct CeilingWalk {
  std::size_t run_elements;  ///< of a stream, before the next stream's turn
  std::size_t ahead_bytes;   ///< lines are asked for so far ahead; 0: left to the hardware
  bool past_cache;           ///< what is updated in place, too
};
inline constexpr std::array<CeilingWalk, 6> kCeilingWalks{{{64, 0, false},
                                                           {256, 0, false},
                                                           {1024, 0, false},
                                                           {64, 1024, false},
                                                           {256, 1024, false},
                                                           {256, 0, true}}};

/// Reads and writes all of `elements` elements (whole runs of the walk) at the widest instruction
/// set of this CPU, and leaves what is updated in place as it was.
void run_ceiling(const CeilingShape& shape, const CeilingWalk& walk, std::size_t elements);

}  // namespace ziggurat::measure
