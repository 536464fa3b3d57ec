// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/cuda/quantize_programs.h: the blocks of quantize.cc as block programs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/block_program.h"
#include "base/numerics/host_device.h"
#include "base/numerics/kernel_launch.h"
#include "collectives/quantize/quantize_rules.h"

namespace ziggurat::cuda {

/// A block of codes: where it begins, and how many elements it has.
struct CodedBlock {
  std::uint64_t begin_bytes;
  std::size_t first, count;

  static constexpr CodedBlock of(QuantizedBits bits, std::uint64_t block, std::size_t count) {
    const std::size_t first = block * kQuantizedBlock;
    const std::size_t rest = count - first;
    return {.begin_bytes = block * quantized_bytes(bits, kQuantizedBlock),
            .first = first,
            .count = rest < kQuantizedBlock ? rest : kQuantizedBlock};
  }
};

/// Encodes one block per warp. Values are read twice: from memory and, for their codes, from the
/// cache. Moves 3.02 bytes per element from 16 bits to 8, and 2.52 to 4.
struct QuantizeBlocks {
  static constexpr std::uint32_t kWarp = 32;
  static constexpr std::uint32_t kWarps = 4;
  static constexpr std::uint32_t kThreads = kWarps * kWarp;
  static constexpr int kPhases = 2;
  struct Shared {
    std::uint32_t largest[kWarps][kWarp];
  };

  QuantizedBits bits;
  DType dtype;
  const std::byte* values;
  std::size_t count;
  std::byte* coded;

  std::uint64_t blocks() const { return blocks_of(count, kWarps * kQuantizedBlock); }

  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared& shared, Place at) const {
    const std::uint64_t number = at.block * kWarps + at.thread / kWarp;
    if (number * kQuantizedBlock >= count) return;
    const CodedBlock block = CodedBlock::of(bits, number, count);
    const std::byte* const from = values + block.first * size_bytes(dtype);
    std::uint32_t largest = 0;
    for (std::size_t i = at.thread % kWarp; i < block.count; i += kWarp) {
      const std::uint32_t magnitude = internal::magnitude_bits(value_at(dtype, from, i));
      if (magnitude > largest) largest = magnitude;
    }
    shared.largest[at.thread / kWarp][at.thread % kWarp] = largest;
  }

  ZIGGURAT_HOST_DEVICE void run(Phase<1>, Shared& shared, Place at) const {
    const std::uint64_t number = at.block * kWarps + at.thread / kWarp;
    if (number * kQuantizedBlock >= count) return;
    const CodedBlock block = CodedBlock::of(bits, number, count);
    std::uint32_t largest = 0;
    for (const std::uint32_t one : shared.largest[at.thread / kWarp]) {
      if (one > largest) largest = one;
    }
    const internal::BlockScale scale = internal::block_scale(largest);
    std::byte* const to = coded + block.begin_bytes;
    if (at.thread % kWarp == 0) internal::store_scale(to, scale.scale);
    const std::byte* const from = values + block.first * size_bytes(dtype);
    const std::size_t bytes = internal::quantized_code_bytes(bits, block.count);
    for (std::size_t j = at.thread % kWarp; j < bytes; j += kWarp)
      to[sizeof(float) + j] = internal::quantized_byte(bits, scale, dtype, from, block.count, j);
  }
};

/// Decodes one block per thread block, with one thread per element. Moves 3.02 bytes per element
/// from 8 bits to 16.
struct DequantizeBlocks {
  static constexpr std::uint32_t kThreads = kQuantizedBlock;
  static constexpr int kPhases = 1;
  struct Shared {};

  QuantizedBits bits;
  const std::byte* coded;
  DType dtype;
  std::byte* values;
  std::size_t count;

  std::uint64_t blocks() const { return blocks_of(count, kQuantizedBlock); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    const CodedBlock block = CodedBlock::of(bits, at.block, count);
    if (at.thread >= block.count) return;
    store_value(dtype, values, block.first + at.thread,
                internal::dequantized(bits, coded + block.begin_bytes, block.count, at.thread));
  }
};

/// Decodes like DequantizeBlocks and adds to sums. Moves 9.02 bytes per element from 8 bits.
struct AddDequantized {
  static constexpr std::uint32_t kThreads = kQuantizedBlock;
  static constexpr int kPhases = 1;
  struct Shared {};

  QuantizedBits bits;
  const std::byte* coded;
  float* sums;
  std::size_t count;

  std::uint64_t blocks() const { return blocks_of(count, kQuantizedBlock); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    const CodedBlock block = CodedBlock::of(bits, at.block, count);
    if (at.thread >= block.count) return;
    float& sum = sums[block.first + at.thread];
    sum = internal::dequantized_sum(
        sum, internal::dequantized(bits, coded + block.begin_bytes, block.count, at.thread));
  }
};

/// Queues a program (quantize.cu).
void launch(const QuantizeBlocks& program, StreamHandle stream);
void launch(const DequantizeBlocks& program, StreamHandle stream);
void launch(const AddDequantized& program, StreamHandle stream);

}  // namespace ziggurat::cuda
