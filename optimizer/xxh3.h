// SPDX-License-Identifier: Apache-2.0
// optimizer/xxh3.h: the parts of XXH3-64 (seed 0) that a kernel needs to hash a tile while it has
// it in registers.
//
// A long input is read in stripes of 64 bytes, each mixed into eight 64-bit lanes under 64 bytes of
// a secret that slides by 8; after a block of 16 stripes the lanes are scrambled; at the end they
// are folded into one number. The stored format of XXH3 is final, and tests compare every hash made
// here with the library's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ziggurat::internal::xxh3 {

inline constexpr std::size_t kStripeBytes = 64;
inline constexpr std::size_t kStripesPerBlock = 16;
inline constexpr std::size_t kSecretStep = 8;
inline constexpr std::size_t kScrambleSecret = 128;  // offset into the secret
inline constexpr std::size_t kLastStripeSecret = 121;
inline constexpr std::size_t kFoldSecret = 11;

inline constexpr std::uint32_t kPrime32_1 = 0x9e3779b1u;
inline constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87u;

/// What the lanes begin with.
alignas(64) inline constexpr std::uint64_t kFirstLanes[8] = {
    0x00000000c2b2ae3du, kPrime64_1,          0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
    0x85ebca77c2b2ae63u, 0x0000000085ebca77u, 0x27d4eb2f165667c5u, kPrime32_1};

/// XXH3's default secret of 192 bytes, as little-endian words.
alignas(64) inline constexpr std::uint64_t kSecretWords[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu,
};
inline const std::uint8_t* secret(std::size_t offset) noexcept {
  return reinterpret_cast<const std::uint8_t*>(kSecretWords) + offset;
}

/// The hash of an input of `size_bytes` from its lanes.
inline std::uint64_t fold(const std::uint64_t (&lanes)[8], std::size_t size_bytes) noexcept {
  __extension__ using Wide = unsigned __int128;
  std::uint64_t hash = size_bytes * kPrime64_1;
  for (std::size_t i = 0; i < 8; i += 2) {
    std::uint64_t key[2];
    std::memcpy(key, secret(kFoldSecret + 8 * i), sizeof(key));
    const Wide product = static_cast<Wide>(lanes[i] ^ key[0]) * (lanes[i + 1] ^ key[1]);
    hash += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  hash = (hash ^ (hash >> 37)) * 0x165667919e3779f9u;
  return hash ^ (hash >> 32);
}

}  // namespace ziggurat::internal::xxh3
