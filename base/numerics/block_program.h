// SPDX-License-Identifier: Apache-2.0
// base/numerics/block_program.h: the form in which kernels of ours are written, so that the CPU can
// run them too: a block's work in phases, between which its threads wait for each other.
//
//   struct Program {
//     static constexpr std::uint32_t kThreads = 128;  // of a block
//     static constexpr int kPhases = 2;
//     struct Shared { float sums[kThreads]; };        // a block's shared memory, not initialised
//     std::uint64_t blocks() const;                   // as many as the arguments need
//     void run(Phase<0>, Shared& shared, Place at) const;
//     void run(Phase<1>, Shared& shared, Place at) const;
//     const float* values;                            // arguments
//   };
//
// What one phase leaves for the next is in Shared or in memory that the same block wrote. Blocks
// run in any order, or at once, and so do a block's threads within a phase: nothing may be read
// that another thread writes in the same phase, or another block in the same launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace ziggurat {

template <int kPhase>
struct Phase {};

/// Where in a launch a thread stands.
struct Place {
  std::uint64_t block;
  std::uint32_t thread;
};

constexpr std::uint64_t blocks_of(std::uint64_t count, std::uint64_t in_block) noexcept {
  return (count + in_block - 1) / in_block;
}

namespace internal {

template <class Order>
void shuffle(Order& order, std::mt19937_64& random) {
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
}

template <int kPhase, class Program>
void run_phases(const Program& program, typename Program::Shared& shared, std::uint64_t block,
                std::mt19937_64& random) {
  std::vector<std::uint32_t> threads(Program::kThreads);
  shuffle(threads, random);
  for (const std::uint32_t thread : threads)
    program.run(Phase<kPhase>(), shared, Place{block, thread});
  if constexpr (kPhase + 1 < Program::kPhases)
    run_phases<kPhase + 1>(program, shared, block, random);
}

}  // namespace internal

/// The program's host twin: the same source, compiled for the CPU and run one thread after the
/// other. Blocks, and threads within a phase, go in an order drawn from `seed`; shared memory
/// begins as rubbish. For tests: a result that differs under another seed depends on an order that
/// a GPU does not promise.
template <class Program>
void run_twin(const Program& program, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> blocks(program.blocks());
  internal::shuffle(blocks, random);
  const auto shared = std::make_unique<typename Program::Shared>();
  for (const std::uint64_t block : blocks) {
    std::fill_n(reinterpret_cast<unsigned char*>(shared.get()), sizeof(*shared),
                static_cast<unsigned char>(0xa0 | (random() & 0xf)));
    internal::run_phases<0>(program, *shared, block, random);
  }
}

}  // namespace ziggurat
