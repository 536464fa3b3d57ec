// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/blob_header.h: what stands before the trainer's blob in a store's generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace ziggurat {

struct BlobHeader {
  static constexpr std::uint64_t kMagic = 0x315a494747424c31;  // "1LBGGIZ1"
  std::uint64_t magic = kMagic;
  std::uint64_t generation = 0;  ///< finished steps
};

inline std::vector<std::byte> wrap_blob(std::uint64_t generation, std::span<const std::byte> blob) {
  const BlobHeader header{.generation = generation};
  std::vector<std::byte> wrapped(sizeof(header) + blob.size());
  std::memcpy(wrapped.data(), &header, sizeof(header));
  if (!blob.empty()) std::memcpy(wrapped.data() + sizeof(header), blob.data(), blob.size());
  return wrapped;
}

}  // namespace ziggurat
