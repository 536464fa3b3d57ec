// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/update_programs.h: an update's block programs. They do what update_scalar.cc does
// one element after the other, with one thread per element.
//
// The bytes of each array are moved once each way: 28 per element of AdamW in fp32 with 16-bit
// gradients. Neighbouring threads have neighbouring elements, so a warp loads whole sectors of 32
// bytes. The 2,048 threads of a multiprocessor have 28 KiB of loads under way, while an H100's
// bandwidth times its latency is about 15 KiB (computed, not measured). Optimizer, types and
// rounding are the same in all threads, so no warp takes both ways of a branch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/block_program.h"
#include "base/numerics/host_device.h"
#include "base/numerics/kernel_launch.h"
#include "optimizer/eight_bit_codes.h"
#include "optimizer/slice_element.h"
#include "tiers/store/tile_size.h"

namespace ziggurat::cuda {

/// A part of a record under one step and decay; it may begin and end inside tiles.
struct Stretch {
  OptimizerStep step;
  internal::Slice slice;  ///< its noise key and place in a tile are not used
  std::uint64_t first;    ///< number of the slice's first element in the model, which keys the
                          ///< noise
  bool by_param;          ///< the noise is keyed by `place` in the parameter instead
  ParamPlace place;
  std::uint64_t key;  ///< param_key()
  std::size_t real;   ///< elements that the trainer has; the other elements of the slice are
                      ///< padding

  ZIGGURAT_HOST_DEVICE internal::ElementNoise noise(std::size_t i) const {
    const Drawn drawn = drawn_by(slice.format, step.rounding);
    if (!drawn.param && !drawn.moments) return {};
    if (by_param) {
      const std::uint64_t element = place.whole(i);
      return internal::noise_of(drawn, param_noise(key, element),
                                static_cast<std::uint32_t>(element));
    }
    const std::uint64_t element = first + i;
    const NoiseKey of_tile = tile_noise(step.rounding_key, element / kTileElements);
    return internal::noise_of(drawn, of_tile, static_cast<std::uint32_t>(element % kTileElements));
  }
};

/// Updates elements in any format without codes.
struct UpdateElements {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kEach = 4;  // elements per thread, kThreads apart
  static constexpr int kPhases = 1;
  struct Shared {};

  Stretch stretch;

  std::uint64_t blocks() const { return blocks_of(stretch.slice.count, kThreads * kEach); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    const internal::Slice& slice = stretch.slice;
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      if (i >= slice.count) return;
      if (i < stretch.real) {
        internal::update_element(stretch.step, slice, i, stretch.noise(i));
      } else {
        internal::update_padding(stretch.step, slice, i, stretch.noise(i));
      }
    }
  }
};

/// Updates whole blocks of codes, one per warp, so that only one warp has to wait between a block's
/// largest magnitude and its codes. Moments wait in shared memory, 2 KiB per block of codes.
struct UpdateCodes {
  static constexpr std::uint32_t kWarp = 32;
  static constexpr std::uint32_t kWarps = 4;
  static constexpr std::uint32_t kThreads = kWarps * kWarp;
  static constexpr int kPhases = 2;
  struct OfWarp {
    float moments[kMomentsMax][kEightBitBlock];
    std::uint32_t largest[kMomentsMax][kWarp];
  };
  struct Shared {
    OfWarp warps[kWarps];
  };

  Stretch stretch;

  std::uint64_t blocks() const { return blocks_of(stretch.slice.count, kWarps * kEightBitBlock); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared& shared, Place at) const;
  ZIGGURAT_HOST_DEVICE void run(Phase<1>, Shared& shared, Place at) const;

 private:
  /// Returns the number of the block of codes in the launch; it may be past the last one.
  static constexpr std::size_t block_of_codes(Place at) {
    return at.block * kWarps + at.thread / kWarp;
  }
};

ZIGGURAT_HOST_DEVICE inline void UpdateCodes::run(Phase<0>, Shared& shared, Place at) const {
  using namespace internal;
  const Slice& slice = stretch.slice;
  const std::size_t block = block_of_codes(at);
  if (block >= slice.count / kEightBitBlock) return;
  OfWarp& mine = shared.warps[at.thread / kWarp];
  const std::uint32_t lane = at.thread % kWarp;
  const std::size_t moments = moment_count(stretch.step.kind);
  std::uint32_t largest[kMomentsMax] = {};
  for (std::uint32_t in_block = lane; in_block < kEightBitBlock; in_block += kWarp) {
    const std::size_t i = block * kEightBitBlock + in_block;
    Element old{};
    old.master = load_master(slice, i);
    for (std::size_t k = 0; k < kMomentsMax; ++k) {
      if (k == moments) break;
      const auto code = load_element<std::uint8_t>(slice.moments[k], i);
      const EightBitCodes& codes = eight_bit_codes(moment_code(stretch.step.kind, k));
      old.moments[k] = codes.values[code] * slice.scales[k][block];
    }
    const bool real = i < stretch.real;
    const float gradient = real ? value_at(slice.grad_dtype, slice.grad, i) : 0.0f;
    const Element made = updated(stretch.step, slice.decay, old, gradient);
    store_master(slice, i, real ? made.master : 0.0f, {});
    if (real) store_param(slice, i, made.master, stretch.noise(i));
    for (std::size_t k = 0; k < kMomentsMax; ++k) {
      if (k == moments) break;
      mine.moments[k][in_block] = made.moments[k];
      const std::uint32_t magnitude = magnitude_bits(made.moments[k]);
      if (magnitude > largest[k]) largest[k] = magnitude;
    }
  }
  for (std::size_t k = 0; k < kMomentsMax; ++k) mine.largest[k][lane] = largest[k];
}

ZIGGURAT_HOST_DEVICE inline void UpdateCodes::run(Phase<1>, Shared& shared, Place at) const {
  using namespace internal;
  const Slice& slice = stretch.slice;
  const std::size_t block = block_of_codes(at);
  if (block >= slice.count / kEightBitBlock) return;
  const OfWarp& mine = shared.warps[at.thread / kWarp];
  const std::uint32_t lane = at.thread % kWarp;
  for (std::size_t k = 0; k < moment_count(stretch.step.kind); ++k) {
    std::uint32_t largest = 0;
    for (const std::uint32_t one : mine.largest[k]) {
      if (one > largest) largest = one;
    }
    const BlockScale scale = block_scale(largest);
    if (lane == 0) slice.scales[k][block] = scale.scale;
    const EightBitCode code = moment_code(stretch.step.kind, k);
    const EightBitCodes& codes = eight_bit_codes(code);
    for (std::uint32_t in_block = lane; in_block < kEightBitBlock; in_block += kWarp) {
      store_element(slice.moments[k], block * kEightBitBlock + in_block,
                    code_of(codes, code, mine.moments[k][in_block], scale.inverse));
    }
  }
}

/// Decodes a whole block of codes that runs share to fp32.
struct DecodeBlock {
  static constexpr std::uint32_t kThreads = kEightBitBlock;
  static constexpr int kPhases = 1;
  struct Shared {};

  EightBitCode code;
  const std::byte* codes;
  const float* scale;
  float* values;

  std::uint64_t blocks() const { return 1; }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    const float value =
        internal::eight_bit_codes(code).values[load_element<std::uint8_t>(codes, at.thread)];
    values[at.thread] = value * *scale;
  }
};

struct EncodeBlock {
  static constexpr std::uint32_t kThreads = 32;
  static constexpr int kPhases = 2;
  struct Shared {
    std::uint32_t largest[kThreads];
  };

  EightBitCode code;
  const float* values;
  std::byte* codes;
  float* scale;

  std::uint64_t blocks() const { return 1; }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared& shared, Place at) const {
    std::uint32_t largest = 0;
    for (std::size_t i = at.thread; i < kEightBitBlock; i += kThreads) {
      const std::uint32_t magnitude = internal::magnitude_bits(values[i]);
      if (magnitude > largest) largest = magnitude;
    }
    shared.largest[at.thread] = largest;
  }
  ZIGGURAT_HOST_DEVICE void run(Phase<1>, Shared& shared, Place at) const {
    std::uint32_t largest = 0;
    for (const std::uint32_t one : shared.largest) {
      if (one > largest) largest = one;
    }
    const internal::BlockScale block = internal::block_scale(largest);
    if (at.thread == 0) *scale = block.scale;
    const internal::EightBitCodes& tables = internal::eight_bit_codes(code);
    for (std::size_t i = at.thread; i < kEightBitBlock; i += kThreads)
      store_element(codes, i, internal::code_of(tables, code, values[i], block.inverse));
  }
};

/// Takes masters from parameters; they are zero if the trainer has no such element.
struct TakeMasters {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kEach = 4;
  static constexpr int kPhases = 1;
  struct Shared {};

  internal::Slice slice;  ///< the slice of the whole record
  std::size_t real;

  std::uint64_t blocks() const { return blocks_of(slice.count, kThreads * kEach); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::size_t i = (at.block * kEach + k) * kThreads + at.thread;
      if (i < slice.count) internal::take_master(slice, i, i < real);
    }
  }
};

/// Queues a program (update.cu).
void launch(const UpdateElements& program, StreamHandle stream);
void launch(const UpdateCodes& program, StreamHandle stream);
void launch(const DecodeBlock& program, StreamHandle stream);
void launch(const EncodeBlock& program, StreamHandle stream);
void launch(const TakeMasters& program, StreamHandle stream);

}  // namespace ziggurat::cuda
