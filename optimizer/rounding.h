// SPDX-License-Identifier: Apache-2.0
// optimizer/rounding.h: the specification of masters in two halves and of stochastic rounding:
// plain functions of one element.
#pragma once

#include <bit>
#include <cstdint>

#include "base/dtype.h"
#include "base/numerics/rounding.h"
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

/// Random 32 bits of element `index` of a tile (under kTileElements) in a step: a hash of a
/// counter, so that no thread, chunk or register width changes them. Two multiply-xorshift rounds
/// with a word of the key before each (the multipliers are those of Ettinger & Wellons's triple32
/// search); one 32-bit lane each, where Philox takes ten rounds of 64-bit products.
struct NoiseKey {
  std::uint32_t first, second;
};
/// The key of the model's tile number `tile` in a step with that OptimizerStep::rounding_key.
constexpr NoiseKey tile_noise(std::uint64_t rounding_key, std::uint64_t tile) noexcept {
  const std::uint64_t key = internal::xxh3::hash_word(rounding_key, tile);
  return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
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
/// exp_avg_sq draws from the key with this added to its second word; the parameter takes the lower
/// 16 bits of an element's first draw, the first moment its upper 16.
inline constexpr std::uint32_t kSecondDraw = 0x85ebca6bu;

}  // namespace ziggurat
