// SPDX-License-Identifier: Apache-2.0
// tests/support/twin.h: a launch of a block program's host twin, for files that take the place of
// .cu files at link time.
#pragma once

#include <cstdint>

#include "base/numerics/block_program.h"

namespace ziggurat::testing {

/// The seed of the next launch's order (cuda_memory.h's draw_order).
std::uint64_t next_order();

template <class Program>
void run_as_twin(const Program& program) {
  run_twin(program, next_order());
}

}  // namespace ziggurat::testing
