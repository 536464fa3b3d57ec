// SPDX-License-Identifier: Apache-2.0
// tests/support/twin.h: a kernel's host twin: its block program (base/numerics/block_program.h),
// compiled for the CPU and run one thread after the other, for files that take the place of .cu
// files at link time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/numerics/block_program.h"

namespace ziggurat::testing {

/// The seed of the next launch's order (cuda_memory.h's draw_order).
std::uint64_t next_order();

template <class Number>
std::vector<Number> shuffled(std::uint64_t count, std::mt19937_64& random) {
  std::vector<Number> order(count);
  std::iota(order.begin(), order.end(), Number{0});
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

template <int kPhase, class Program>
void run_phases(const Program& program, typename Program::Shared& shared, std::uint64_t block,
                std::mt19937_64& random) {
  for (const auto thread : shuffled<std::uint32_t>(Program::kThreads, random))
    program.run(Phase<kPhase>(), shared, Place{block, thread});
  if constexpr (kPhase + 1 < Program::kPhases)
    run_phases<kPhase + 1>(program, shared, block, random);
}

/// Blocks, and threads within a phase, go in an order drawn from a seed, and shared memory begins
/// as rubbish: a result that differs under another seed depends on what a GPU does not promise.
template <class Program>
void run_as_twin(const Program& program, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto shared = std::make_unique<typename Program::Shared>();
  for (const auto block : shuffled<std::uint64_t>(program.blocks(), random)) {
    std::fill_n(reinterpret_cast<unsigned char*>(shared.get()), sizeof(*shared),
                static_cast<unsigned char>(0xa0 | (random() & 0xf)));
    run_phases<0>(program, *shared, block, random);
  }
}

template <class Program>
void run_as_twin(const Program& program) {
  run_as_twin(program, next_order());
}

}  // namespace ziggurat::testing
