// SPDX-License-Identifier: Apache-2.0
// optimizer/xxh3.h: the parts of XXH3-64 that kernels need to hash a tile (seed 0) in registers,
// and to mix a number into a seed.
//
// A long input is read in stripes of 64 bytes. Each stripe is mixed into eight 64-bit lanes, under
// 64 bytes of a secret that moves by 8 per stripe. After a block of 16 stripes the lanes are
// scrambled. At the end the lanes are folded into one number. XXH3's values are final, and tests
// compare every hash of these functions with the library's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ziggurat::internal::xxh3 {

inline constexpr std::size_t kStripeBytes = 64;
inline constexpr std::size_t kStripesPerBlock = 16;
inline constexpr std::size_t kBlockBytes = kStripesPerBlock * kStripeBytes;
inline constexpr std::size_t kLanes = 8;
inline constexpr std::size_t kSecretStep = 8;
inline constexpr std::size_t kScrambleSecret = 128;  // offset into the secret
inline constexpr std::size_t kLastStripeSecret = 121;
inline constexpr std::size_t kFoldSecret = 11;

inline constexpr std::uint32_t kPrime32_1 = 0x9e3779b1u;
inline constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87u;

struct Constants {
  std::uint64_t first_lanes[8];    ///< the first values of the lanes
  std::uint64_t secret_words[24];  ///< XXH3's default secret of 192 bytes, little-endian
};
alignas(64) inline constexpr Constants kConstants = {
    {0x00000000c2b2ae3du, kPrime64_1, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u, 0x85ebca77c2b2ae63u,
     0x0000000085ebca77u, 0x27d4eb2f165667c5u, kPrime32_1},
    {0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
     0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
     0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
     0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
     0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
     0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu}};
static_assert(offsetof(Constants, secret_words) % 64 == 0);

inline const std::uint8_t* secret(std::size_t offset) noexcept {
  return reinterpret_cast<const std::uint8_t*>(kConstants.secret_words) + offset;
}

/// Returns eight bytes of the secret from any offset on.
inline std::uint64_t secret_word(std::size_t offset) noexcept {
  const std::uint64_t* const words = kConstants.secret_words + offset / 8;
  const std::size_t shift = offset % 8 * 8;
  return shift == 0 ? words[0] : words[0] >> shift | words[1] << (64 - shift);
}

/// Returns the exclusive or of the two halves of the 128-bit product.
inline std::uint64_t multiply_fold(std::uint64_t a, std::uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

/// Returns the hash of an input of `size_bytes` from its lanes.
inline std::uint64_t fold(const std::uint64_t (&lanes)[kLanes], std::size_t size_bytes) noexcept {
  std::uint64_t hash = size_bytes * kPrime64_1;
  for (std::size_t i = 0; i < kLanes; i += 2) {
    hash += multiply_fold(lanes[i] ^ secret_word(kFoldSecret + 8 * i),
                          lanes[i + 1] ^ secret_word(kFoldSecret + 8 * i + 8));
  }
  hash = (hash ^ (hash >> 37)) * 0x165667919e3779f9u;
  return hash ^ (hash >> 32);
}

/// Returns the hash of the eight bytes of `value` under `seed`, which is mix_seed
/// (base/checksum.h).
constexpr std::uint64_t hash_word(std::uint64_t seed, std::uint64_t value) noexcept {
  constexpr std::uint64_t kFlip = kConstants.secret_words[1] ^ kConstants.secret_words[2];
  const auto lower = static_cast<std::uint32_t>(seed);
  const std::uint32_t swapped =
      lower >> 24 | (lower >> 8 & 0xff00u) | (lower & 0xff00u) << 8 | lower << 24;
  const std::uint64_t key = kFlip - (seed ^ static_cast<std::uint64_t>(swapped) << 32);
  std::uint64_t hash = (value >> 32 | value << 32) ^ key;
  hash ^= (hash << 49 | hash >> 15) ^ (hash << 24 | hash >> 40);
  hash *= 0x9fb21c651e98df25u;
  hash ^= (hash >> 35) + sizeof(value);
  hash *= 0x9fb21c651e98df25u;
  return hash ^ (hash >> 28);
}

}  // namespace ziggurat::internal::xxh3
