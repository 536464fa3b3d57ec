// SPDX-License-Identifier: Apache-2.0
// optimizer/rounding.h: the specification of masters in two halves and of stochastic rounding:
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

/// A master as the parameter it rounds to (nearest, ties away) and its own lower half. As numbers,
/// master = parameter + residual units of the last place, the residual being signed; so zero is
/// zero and zero, and every bit pattern but NaN has one pair.
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

/// Random 32 bits of element `index` under a key: a hash of a counter, so that no thread, chunk or
/// register width changes them. Two multiply-xorshift rounds with a word of the key before each
/// (the multipliers are those of Ettinger & Wellons's triple32 search); one 32-bit lane each, where
/// Philox takes ten rounds of 64-bit products.
struct NoiseKey {
  std::uint32_t first, second;
};
/// Keys of `key`, one for each number.
constexpr NoiseKey noise_key(std::uint64_t key, std::uint64_t number) noexcept {
  const std::uint64_t mixed = internal::xxh3::hash_word(key, number);
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}
/// In stores that do not name their rounding: the key of the model's tile number `tile` in a step
/// with that OptimizerStep::rounding_key; an element's index is its place in the tile.
constexpr NoiseKey tile_noise(std::uint64_t rounding_key, std::uint64_t tile) noexcept {
  return noise_key(rounding_key, tile);
}

/// In all others noise depends on a parameter's name and on the element's number in the whole of
/// it, wherever that lies. This is the place of elements that follow each other in a record.
struct ParamPlace {
  std::uint64_t name = 0;   ///< hash of the parameter's name
  std::uint64_t first = 0;  ///< the first one's number in what this rank has of the parameter
  /// They are all of it, or of each `ranks` blocks of `block` elements the one number `rank`.
  std::uint64_t block = 0;
  std::uint32_t rank = 0, ranks = 1;

  /// The number of element `i` of those in the whole parameter.
  constexpr std::uint64_t whole(std::uint64_t i) const noexcept {
    const std::uint64_t own = first + i;
    if (ranks == 1) return own;
    return own + (own / block * (ranks - 1) + rank) * block;
  }
  /// How many from `i` on follow each other there too, and have one key.
  constexpr std::uint64_t together(std::uint64_t i) const noexcept {
    const std::uint64_t of_key = kOfKey - whole(i) % kOfKey;
    if (ranks == 1) return of_key;
    const std::uint64_t of_block = block - (first + i) % block;
    return of_block < of_key ? of_block : of_key;
  }
  friend bool operator==(const ParamPlace&, const ParamPlace&) = default;

  static constexpr std::uint64_t kOfKey = std::uint64_t{1} << 32;
};
/// The key of a parameter in one of its steps, for param_noise().
constexpr std::uint64_t param_key(std::uint64_t rounding_key, std::uint64_t name) noexcept {
  return internal::xxh3::hash_word(rounding_key, name);
}
/// The key of element `element` of the whole parameter; its index is the lower half of that number.
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
/// Each array of an element has 16 bits of its own, or their errors would agree. The first moment
/// takes the upper half of the first draw; the parameter the lower one, or, where it is rounded to
/// nearest, the second moment does. Otherwise that takes the upper half of a second draw, whose key
/// has this added to its second word.
inline constexpr std::uint32_t kSecondDraw = 0x85ebca6bu;

/// What of an element is rounded with noise.
struct Drawn {
  bool param;  ///< or the master, where it is the parameter
  bool moments;
};
constexpr Drawn drawn_by(StateFormat format, const Roundings& rounding) noexcept {
  const bool state = rounding.state == Rounding::kStochastic;
  const bool params = rounding.params == Rounding::kStochastic;
  switch (format) {
    case StateFormat::kBf16: return {.param = state, .moments = state};
    case StateFormat::kBf16Moments: return {.param = params, .moments = state};
    default: return {.param = params, .moments = false};
  }
}

}  // namespace ziggurat
