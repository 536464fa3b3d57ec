// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/blob_header.h: what stands before the trainer's blob in a store's generation.
#pragma once

#include <cstdint>

namespace ziggurat {

struct BlobHeader {
  static constexpr std::uint64_t kMagic = 0x315a494747424c31;  // "1LBGGIZ1"
  std::uint64_t magic = kMagic;
  std::uint64_t generation = 0;  ///< finished steps
};

}  // namespace ziggurat
