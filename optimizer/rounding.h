// SPDX-License-Identifier: Apache-2.0
// optimizer/rounding.h: the specification of masters in two halves and of stochastic rounding, as
// plain functions of one element.
#pragma once

#include <bit>
#include <cstdint>

#include "base/dtype.h"
#include "base/numerics/rounding.h"
#include "optimizer/optimizer_step.h"
#include "optimizer/state_kind.h"
#include "optimizer/xxh3.h"

namespace ziggurat {

/// A master as the parameter to which it rounds (nearest, ties away) and its own lower half. As
/// numbers, master = parameter + residual units of the last place, where the residual is signed. So
/// zero is zero and zero, and every bit pattern but NaN has exactly one pair.
struct SplitMaster {
  bf16 param;
  std::uint16_t residual;
};
constexpr SplitMaster split_master(float master) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(master);
  return {round_with_noise(master, kNearestNoise), static_cast<std::uint16_t>(bits)};
}
constexpr float joined(SplitMaster split) noexcept {
  const auto residual = static_cast<std::int16_t>(split.residual);
  return std::bit_cast<float>((static_cast<std::uint32_t>(split.param) << 16) +
                              static_cast<std::uint32_t>(static_cast<std::int32_t>(residual)));
}

/// A key of random bits. noise_bits() makes 32 random bits of element `index` under a key: a hash
/// of a counter, so that no thread, chunk or register width changes them. It takes two
/// multiply-xorshift rounds, with a word of the key before each (the multipliers are from Ettinger
/// & Wellons's triple32 search), in one 32-bit lane; Philox takes ten rounds of 64-bit products.
struct NoiseKey {
  std::uint32_t first, second;
};
/// Returns a key made from `key`, different for each number.
constexpr NoiseKey noise_key(std::uint64_t key, std::uint64_t number) noexcept {
  const std::uint64_t mixed = internal::xxh3::hash_word(key, number);
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}
/// Returns the key of the model's tile number `tile` in a step with that
/// OptimizerStep::rounding_key, for stores that do not name their rounding. An element's index is
/// its place in the tile.
constexpr NoiseKey tile_noise(std::uint64_t rounding_key, std::uint64_t tile) noexcept {
  return noise_key(rounding_key, tile);
}

/// The place of consecutive elements of a record in their parameter. In stores that name their
/// rounding, noise depends on the parameter's name and on the element's number in the whole
/// parameter, no matter where it lies.
struct ParamPlace {
  std::uint64_t name = 0;   ///< hash of the parameter's name
  std::uint64_t first = 0;  ///< number of the first element within this rank's part of the
                            ///< parameter
  /// This rank's part: with `ranks` 1 the whole parameter; otherwise, of every `ranks` blocks of
  /// `block` elements, block number `rank`.
  std::uint64_t block = 0;
  std::uint32_t rank = 0, ranks = 1;

  /// Returns the number of element `i` in the whole parameter.
  constexpr std::uint64_t whole(std::uint64_t i) const noexcept {
    const std::uint64_t own = first + i;
    if (ranks == 1) return own;
    return own + (own / block * (ranks - 1) + rank) * block;
  }
  /// Returns how many elements from `i` on are also consecutive in the whole parameter and have one
  /// key.
  constexpr std::uint64_t together(std::uint64_t i) const noexcept {
    const std::uint64_t of_key = kOfKey - whole(i) % kOfKey;
    if (ranks == 1) return of_key;
    const std::uint64_t of_block = block - (first + i) % block;
    return of_block < of_key ? of_block : of_key;
  }
  friend bool operator==(const ParamPlace&, const ParamPlace&) = default;

  static constexpr std::uint64_t kOfKey = std::uint64_t{1} << 32;
};
/// Returns the key of a parameter in one of its steps, for param_noise().
constexpr std::uint64_t param_key(std::uint64_t rounding_key, std::uint64_t name) noexcept {
  return internal::xxh3::hash_word(rounding_key, name);
}
/// Returns the key of element `element` of the whole parameter; its index is the lower half of that
/// number.
constexpr NoiseKey param_noise(std::uint64_t param_key, std::uint64_t element) noexcept {
  return noise_key(param_key, element / ParamPlace::kOfKey);
}
constexpr std::uint32_t noise_bits(NoiseKey key, std::uint32_t index) noexcept {
  std::uint32_t x = index * 0x9e3779b9u + key.first;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x += key.second;
  x *= 0x735a2d97u;
  x ^= x >> 15;
  x *= 0xed5ad4bbu;
  return x ^ (x >> 16);
}
/// Added to the second word of a key for a second draw. Each array of an element needs 16 bits of
/// its own, or the errors of arrays would agree. The first moment takes the upper half of the first
/// draw, and the parameter the lower half. The second moment takes that lower half if the parameter
/// is rounded to nearest, otherwise the upper half of the second draw.
inline constexpr std::uint32_t kSecondDraw = 0x85ebca6bu;

/// Says which arrays of an element are rounded with noise.
struct Drawn {
  bool param;  ///< or the master, if it is the parameter
  bool moments;
};
constexpr Drawn drawn_by(StateFormat format, const Roundings& rounding) noexcept {
  const bool state = rounding.state == Rounding::kStochastic;
  const bool params = rounding.params == Rounding::kStochastic;
  return {.param = rounds_masters(format) ? state : params,
          .moments = rounds_moments(format) && state};
}

}  // namespace ziggurat
