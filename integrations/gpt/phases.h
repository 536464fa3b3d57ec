// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/phases.h: several independent loops as one phase of a team region, with one
// barrier, so that no worker is idle at the end of a short loop while another loop can start.
#pragma once

#include <cstddef>
#include <utility>

#include "base/runtime/worker_pool.h"

namespace ziggurat::gpt {

/// Runs body(i) for i in [0, count).
template <class Body>
struct Loop {
  std::size_t count;
  Body body;
};
template <class Body>
Loop(std::size_t, Body) -> Loop<Body>;

/// Runs all loops, starting with the first loop's indices, and returns when all are done. The loops
/// must not depend on one another.
template <class... Bodies>
void together(Team& team, const Loop<Bodies>&... loops) {
  team.for_each((loops.count + ...), [&](std::size_t index) {
    bool done = false;
    const auto attempt = [&](const auto& loop) {
      if (done) return;
      if (index < loop.count) {
        loop.body(index);
        done = true;
      } else {
        index -= loop.count;
      }
    };
    (attempt(loops), ...);
  });
}

/// The rows (or columns) [begin, begin + count) of `total`, which is cut into pieces of `size`.
struct Piece {
  std::int64_t begin, count;
};
constexpr std::size_t piece_count(std::int64_t total, std::int64_t size) {
  return static_cast<std::size_t>((total + size - 1) / size);
}
constexpr Piece piece(std::size_t index, std::int64_t total, std::int64_t size) {
  const std::int64_t begin = static_cast<std::int64_t>(index) * size;
  return {begin, total - begin < size ? total - begin : size};
}

/// The pieces of elementwise loops: 32 rows take some tens of microseconds, and 128 columns are
/// four cache lines of a row of 16-bit elements.
inline constexpr std::int64_t kRowPiece = 32;
inline constexpr std::int64_t kColumnPiece = 128;

}  // namespace ziggurat::gpt
