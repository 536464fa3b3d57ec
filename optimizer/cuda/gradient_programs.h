// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/gradient_programs.h: a gradient's block programs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/block_program.h"
#include "base/numerics/host_device.h"
#include "base/numerics/kernel_launch.h"
#include "optimizer/gradient_rules.h"
#include "optimizer/square_sum.h"
#include "tiers/store/tile_size.h"

namespace ziggurat::cuda {

/// A thread's place in a tile of sums. A thread is a virtual lane of one sum block, and 16 of a
/// warp's 32 threads belong to the same sum block, so that lanes are added in the order of their
/// elements without a wait. With 64 threads per tile, 32 tiles keep the 2,048 threads of a
/// multiprocessor busy.
struct SumPlace {
  static constexpr std::uint32_t kBlocks = kTileElements / internal::kSumBlock;
  static constexpr std::uint32_t kThreads = kBlocks * internal::kSumLanes;

  std::size_t begin, end;  ///< of the sum block in the array
  std::uint32_t sum_block, lane;

  static constexpr SumPlace of(std::uint64_t tile, std::uint32_t thread, std::size_t count) {
    const auto sum_block = static_cast<std::uint32_t>(thread / internal::kSumLanes);
    const std::size_t begin = tile * kTileElements + sum_block * internal::kSumBlock;
    const std::size_t end = begin + internal::kSumBlock;
    return {.begin = begin < count ? begin : count,
            .end = end < count ? end : count,
            .sum_block = sum_block,
            .lane = static_cast<std::uint32_t>(thread % internal::kSumLanes)};
  }
};

/// Rounds tiles [first_tile, first_tile + tiles) of `values` into `out`, and sums the squares of
/// each tile. Moves 6 bytes per element to 16 bits, 8 to fp32.
///
/// With kStaged, `out` may lie over the tile from which it is made, because the tile is read as a
/// whole before anything is written. Otherwise the launch must not write over what it reads, except
/// for fp32 in place, where an element lies over itself.
template <bool kStaged>
struct RoundTiles {
  static constexpr std::uint32_t kThreads = SumPlace::kThreads;
  static constexpr int kPhases = 4;
  static constexpr std::size_t kBatch = 8;  // loads that a thread has under way
  static constexpr std::size_t kStagedBytes = kStaged ? kTileElements * 2 : 1;
  struct Shared {
    alignas(4) std::byte staged[kStagedBytes];
    float lanes[SumPlace::kBlocks][internal::kSumLanes];
    double sums[SumPlace::kBlocks];
  };

  const std::byte* values;  ///< fp32
  DType dtype;              ///< with kStaged, a type of 16 bits
  std::byte* out;
  std::size_t count;
  std::uint64_t first_tile, tiles;
  double* tile_sums;

  std::uint64_t blocks() const { return tiles; }

  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared& shared, Place at) const {
    const SumPlace place = SumPlace::of(first_tile + at.block, at.thread, count);
    float sum = 0.0f;
    std::size_t i = place.begin + place.lane;
    for (; i + (kBatch - 1) * internal::kSumLanes < place.end; i += kBatch * internal::kSumLanes) {
      float batch[kBatch];
      for (std::size_t k = 0; k < kBatch; ++k)
        batch[k] = load_element<float>(values, i + k * internal::kSumLanes);
      for (std::size_t k = 0; k < kBatch; ++k)
        sum = sum + rounded_square(shared, at, batch[k], i + k * internal::kSumLanes);
    }
    for (; i < place.end; i += internal::kSumLanes)
      sum = sum + rounded_square(shared, at, load_element<float>(values, i), i);
    shared.lanes[place.sum_block][place.lane] = sum;
  }

  ZIGGURAT_HOST_DEVICE void run(Phase<1>, Shared& shared, Place at) const {
    if constexpr (kStaged) {
      const std::size_t begin = (first_tile + at.block) * kTileElements;
      for (std::size_t i = at.thread; i < kTileElements && begin + i < count; i += kThreads)
        store_element(out, begin + i, load_element<std::uint16_t>(shared.staged, i));
    }
  }

  /// Sums with one thread per sum block. Squares that overflowed are added again, one after the
  /// other.
  ZIGGURAT_HOST_DEVICE void run(Phase<2>, Shared& shared, Place at) const {
    if (at.thread >= SumPlace::kBlocks) return;
    const auto first = static_cast<std::uint32_t>(at.thread * internal::kSumLanes);
    const SumPlace place = SumPlace::of(first_tile + at.block, first, count);
    float lanes[internal::kSumLanes];
    for (std::size_t i = 0; i < internal::kSumLanes; ++i) lanes[i] = shared.lanes[at.thread][i];
    shared.sums[at.thread] = internal::block_sum(
        lanes, dtype, out + place.begin * size_bytes(dtype), place.end - place.begin);
  }

  ZIGGURAT_HOST_DEVICE void run(Phase<3>, Shared& shared, Place at) const {
    if (at.thread != 0) return;
    double sum = 0.0;
    // A sum block past the last element is 0, and adding it changes nothing.
    for (const double block : shared.sums) sum = sum + block;
    tile_sums[first_tile + at.block] = internal::quiet_sum(sum);
  }

 private:
  ZIGGURAT_HOST_DEVICE float rounded_square(Shared& shared, Place at, float value,
                                            std::size_t i) const {
    if constexpr (!kStaged) return internal::round_and_square_at(value, dtype, out, i);
    // Staged memory begins where the tile does.
    const std::size_t begin = (first_tile + at.block) * kTileElements;
    return internal::round_and_square_at(value, dtype, shared.staged, i - begin);
  }
};

/// Adds values[i] * scale to sums[i]. Moves 10 bytes per element from 16 bits, 12 from fp32.
struct Accumulate {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kEach = 4;
  static constexpr int kPhases = 1;
  struct Shared {};

  const std::byte* values;
  DType dtype;
  float scale;
  float* sums;
  std::size_t count;

  std::uint64_t blocks() const { return blocks_of(count, kThreads * kEach); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    float added[kEach], old[kEach];  // all are loaded before one is stored
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      added[k] = i < count ? value_at(dtype, values, i) : 0.0f;
      old[k] = i < count ? sums[i] : 0.0f;
    }
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      if (i < count) sums[i] = internal::accumulated(old[k], added[k], scale);
    }
  }
};

/// Copies values[i] to out[i], exactly. Moves 6 bytes per element from 16 bits.
struct Widen {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kEach = 4;
  static constexpr int kPhases = 1;
  struct Shared {};

  const std::byte* values;
  DType dtype;
  float* out;
  std::size_t count;

  std::uint64_t blocks() const { return blocks_of(count, kThreads * kEach); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    float wide[kEach];
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      wide[k] = i < count ? value_at(dtype, values, i) : 0.0f;
    }
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      if (i < count) out[i] = wide[k];
    }
  }
};

/// Multiplies values[i] by factor, with one block per tile, and says for each tile whether one of
/// its values is not finite. Moves 4 bytes per element of 16 bits.
struct ScaleTiles {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::size_t kBatch = 4;
  static constexpr int kPhases = 2;
  struct Shared {
    std::uint32_t not_finite[kThreads];
  };

  std::byte* values;
  DType dtype;
  float factor;
  std::size_t count;
  std::uint32_t* tile_not_finite;

  std::uint64_t blocks() const { return blocks_of(count, kTileElements); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared& shared, Place at) const {
    const std::size_t begin = at.block * kTileElements;
    const std::size_t end = begin + kTileElements < count ? begin + kTileElements : count;
    std::uint32_t not_finite = 0;
    for (std::size_t i = begin + at.thread; i < end; i += kBatch * kThreads) {
      float batch[kBatch];
      for (std::size_t k = 0; k < kBatch; ++k)
        batch[k] = i + k * kThreads < end ? value_at(dtype, values, i + k * kThreads) : 0.0f;
      for (std::size_t k = 0; k < kBatch; ++k) {
        const std::size_t place = i + k * kThreads;
        if (place < end && !internal::scale_at(batch[k], factor, dtype, values, place))
          not_finite = 1;
      }
    }
    shared.not_finite[at.thread] = not_finite;
  }
  ZIGGURAT_HOST_DEVICE void run(Phase<1>, Shared& shared, Place at) const {
    if (at.thread != 0) return;
    std::uint32_t not_finite = 0;
    for (const std::uint32_t one : shared.not_finite) not_finite |= one;
    tile_not_finite[at.block] = not_finite;
  }
};

/// Queues a program (gradient.cu).
void launch(const RoundTiles<false>& program, StreamHandle stream);
void launch(const RoundTiles<true>& program, StreamHandle stream);
void launch(const Accumulate& program, StreamHandle stream);
void launch(const Widen& program, StreamHandle stream);
void launch(const ScaleTiles& program, StreamHandle stream);
/// Sets bytes to zero with a call of the driver.
void launch_clear(void* address, std::size_t size_bytes, StreamHandle stream);

}  // namespace ziggurat::cuda
