// SPDX-License-Identifier: Apache-2.0
// tiers/fill.cc: a generator as fast as memory, and a stamp on each block.
#include "tiers/fill.h"

#include <cstring>

#include "base/checksum.h"

namespace ziggurat {

void fill_incompressibly(std::span<std::byte> memory) {
  std::uint64_t state = 0x9e37'79b9'7f4a'7c15;
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    const std::uint64_t value = state * 0x2545'f491'4f6c'dd1d;
    std::memcpy(memory.data() + i, &value, 8);
  }
}

void stamp_blocks(std::span<std::byte> memory, std::uint64_t offset_bytes) {
  for (std::size_t block = 0; block < memory.size(); block += 4096) {
    const std::uint64_t stamp = mix_seed(offset_bytes + block, 0);
    std::memcpy(memory.data() + block, &stamp, sizeof stamp);
  }
}

}  // namespace ziggurat
