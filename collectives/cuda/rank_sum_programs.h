// SPDX-License-Identifier: Apache-2.0
// collectives/cuda/rank_sum_programs.h: the sum of ranks as a block program.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/block_program.h"
#include "base/numerics/host_device.h"
#include "base/numerics/kernel_launch.h"
#include "collectives/rank_sum_rule.h"

namespace ziggurat::cuda {

/// Sums with one thread per element, which moves ranks + 1 values through memory. The sum may be
/// written over one of the rows, because one thread reads and writes an element.
struct SumRanks {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kEach = 4;
  static constexpr int kPhases = 1;
  struct Shared {};

  const std::byte* rows;
  std::uint64_t stride_bytes;
  std::size_t ranks;
  DType dtype;
  std::size_t count;
  std::byte* sum;

  std::uint64_t blocks() const { return blocks_of(count, kThreads * kEach); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      if (i < count) internal::sum_ranks_at(ranks, RowAt{*this}, dtype, i, sum);
    }
  }

 private:
  struct RowAt {
    const SumRanks& of;
    ZIGGURAT_HOST_DEVICE const std::byte* operator()(std::size_t rank) const {
      return of.rows + rank * of.stride_bytes;
    }
  };
};

/// Queues a program (rank_sum.cu).
void launch(const SumRanks& program, StreamHandle stream);

}  // namespace ziggurat::cuda
