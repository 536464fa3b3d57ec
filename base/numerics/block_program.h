// SPDX-License-Identifier: Apache-2.0
// base/numerics/block_program.h: the form in which our GPU kernels are written, so that the CPU can
// run them too (tests/support/twin.h). A block's work is a list of phases, and its threads wait for
// each other between two phases.
//
//   struct Program {
//     static constexpr std::uint32_t kThreads = 128;  // threads of a block
//     static constexpr int kPhases = 2;
//     struct Shared { float sums[kThreads]; };        // a block's shared memory, not initialised
//     std::uint64_t blocks() const;                   // as many as the arguments need
//     void run(Phase<0>, Shared& shared, Place at) const;
//     void run(Phase<1>, Shared& shared, Place at) const;
//     const float* values;                            // arguments
//   };
//
// A phase leaves results for the next one in Shared or in memory that the same block wrote. Blocks
// run in any order, or at once, and so do a block's threads within a phase. So a thread must not
// read what another thread writes in the same phase, or another block in the same launch.
#pragma once

#include <cstdint>

namespace ziggurat {

template <int kPhase>
struct Phase {};

/// The position of a thread in a launch.
struct Place {
  std::uint64_t block;
  std::uint32_t thread;
};

constexpr std::uint64_t blocks_of(std::uint64_t count, std::uint64_t in_block) noexcept {
  return (count + in_block - 1) / in_block;
}

}  // namespace ziggurat
