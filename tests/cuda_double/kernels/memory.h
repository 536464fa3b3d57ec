// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/memory.h: rules that need memory of every space, for g++ and for nvcc.
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <cstdint>

#include "tests/cuda_double/kernels/instructions.h"

namespace ziggurat::cuda_double {

/// Goes by value, and a kernel chooses from it at run time: parameter memory with an address.
struct Table {
  std::int32_t values[12];
  std::uint16_t scale;
};

/// Needs an array that registers cannot hold: local memory.
ZIGGURAT_TEST_BOTH inline std::int32_t permuted(const Table& table, std::uint32_t start) {
  std::int32_t own[16];
  for (std::uint32_t i = 0; i < 16; ++i) own[(start + 7 * i) % 16] = table.values[(start + i) % 12];
  std::uint32_t result = 0;
  for (std::uint32_t i = 0; i < 16; ++i) {
    result = result * 3 + static_cast<std::uint32_t>(own[(start * 5 + i) % 16]) * table.scale;
  }
  return static_cast<std::int32_t>(result);
}

/// Bytes and halves, with a sign and without.
ZIGGURAT_TEST_BOTH inline std::int32_t widened(std::int8_t a, std::int16_t b, std::uint8_t c) {
  return a * 100000 + b * 10 - c;
}

void launch_permuted(const Table& table, std::int32_t* out, unsigned count, cudaStream_t stream);
void launch_widened(const std::int8_t* a, const std::int16_t* b, const std::uint8_t* c,
                    std::int32_t* out, unsigned count, cudaStream_t stream);
/// Reverses the float4s of each block of 32, the first of each times 2, 3, 5 or 7.
void launch_vectors(const float* x, float* out, unsigned blocks, cudaStream_t stream);
/// out[index of a thread in the grid] = that index, over a grid and blocks of three dimensions, by
/// way of shared memory of `shared_bytes`.
void launch_indices(std::uint32_t* out, dim3 grid, dim3 block, std::size_t shared_bytes,
                    cudaStream_t stream);
/// Every thread does each atomic operation once: float sum, double sum, largest, smallest, bits
/// or-ed, a counter that wraps after 9, and a sum by compare-and-swap.
struct Counters {
  float float_sum;
  std::int32_t largest;
  double double_sum;
  std::uint32_t smallest;
  std::uint32_t bits;
  std::uint32_t wrapped;
  std::uint32_t swapped_sum;
  std::uint64_t sum64;
};
void launch_atomics(Counters* counters, unsigned threads, cudaStream_t stream);

}  // namespace ziggurat::cuda_double
