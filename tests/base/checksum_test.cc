// SPDX-License-Identifier: Apache-2.0
// tests/base/checksum_test.cc: hash64 is XXH3-64, at the widest instructions of this CPU, and
// nothing else.
#include "base/checksum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <span>
#include <vector>

namespace ziggurat {
namespace checksum_test {

constexpr std::uint64_t kPrime64 = 11400714785074694797ull;

/// The bytes that XXH3's published test vectors are of.
std::vector<std::byte> vector_bytes(std::size_t size) {
  std::vector<std::byte> bytes;
  std::uint64_t generator = 2654435761u;
  for (std::size_t i = 0; i < size; ++i) {
    bytes.push_back(static_cast<std::byte>(generator >> 56));
    generator *= kPrime64;
  }
  return bytes;
}

TEST(Hash64, IsXxh3WithSeed) {
  struct Case {
    std::size_t size;
    std::uint64_t seed, hash;
  };
  // One of each path through the algorithm: 0, 1-3, 4-8, 9-16, 17-128, 129-240 bytes, and long
  // inputs, whose inner loop is what the CPU's instructions change.
  const std::vector<Case> cases = {
      {0, 0, 0x2D06800538D394C2},    {0, kPrime64, 0xA8A6B918B2F0364A},
      {1, 0, 0xC44BDFF4074EECDB},    {1, kPrime64, 0x032BE332DD766EF8},
      {6, 0, 0x27B56A84CD2D7325},    {6, kPrime64, 0x84589C116AB59AB9},
      {12, 0, 0xA713DAF0DFBB77E7},   {12, kPrime64, 0xE7303E1B2336DE0E},
      {24, 0, 0xA3FE70BF9D3510EB},   {24, kPrime64, 0x850E80FC35BDD690},
      {48, 0, 0x397DA259ECBA1F11},   {48, kPrime64, 0xADC2CBAA44ACC616},
      {80, 0, 0xBCDEFBBB2C47C90A},   {80, kPrime64, 0xC6DD0CB699532E73},
      {195, 0, 0xCD94217EE362EC3A},  {195, kPrime64, 0xBA68003D370CB3D9},
      {403, 0, 0xCDEB804D65C6DEA4},  {403, kPrime64, 0x6259F6ECFD6443FD},
      {512, 0, 0x617E49599013CB6B},  {512, kPrime64, 0x3CE457DE14C27708},
      {2048, 0, 0xDD59E2C3A5F038E0}, {2048, kPrime64, 0x66F81670669ABABC},
      {2240, 0, 0x6E73A90539CF2948}, {2240, kPrime64, 0x757BA8487D1B5247},
      {2367, 0, 0xCB37AEB9E5D361ED}, {2367, kPrime64, 0xD2DB3415B942B42A},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(hash64(vector_bytes(one.size), one.seed), one.hash)
        << one.size << " bytes, seed " << one.seed;
  }
}

TEST(Hash64, DoesNotDependOnAlignment) {
  const std::vector<std::byte> bytes = vector_bytes(65536);
  const std::uint64_t hash = hash64(bytes, 7);
  for (const std::size_t offset : {1, 3, 8, 31, 63}) {
    std::vector<std::byte> moved(offset);
    moved.insert(moved.end(), bytes.begin(), bytes.end());
    EXPECT_EQ(hash64(std::span(moved).subspan(offset), 7), hash) << offset;
  }
}

TEST(Hash64, EveryBitOfAPageCounts) {
  std::vector<std::byte> bytes = vector_bytes(4096);
  std::set<std::uint64_t> seen = {hash64(bytes, 0)};
  for (std::size_t bit = 0; bit < 8 * bytes.size(); bit += 37) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_TRUE(seen.insert(hash64(bytes, 0)).second) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
  }
}

TEST(MixSeed, KnowsTheOrder) {
  EXPECT_NE(mix_seed(mix_seed(1, 2), 3), mix_seed(mix_seed(1, 3), 2));
  EXPECT_NE(mix_seed(1, 2), mix_seed(2, 1));
  EXPECT_EQ(mix_seed(5, 6), mix_seed(5, 6));
}

}  // namespace checksum_test
}  // namespace ziggurat
