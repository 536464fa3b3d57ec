// SPDX-License-Identifier: Apache-2.0
// tests/support/store_file.h: where things are in the bytes of a store's file, for tests that
// damage them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/checksum.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/superblock.h"

namespace ziggurat::test {

struct StoreFile {
  StoreSpec spec;
  StoreLayout layout;

  /// From any whole superblock and a whole copy of the text; none if there is not one of each.
  static std::optional<StoreFile> of(std::span<const std::byte> bytes) {
    for (const unsigned parity : {0u, 1u}) {
      for (int copy = 0; copy < kSuperblockCopies; ++copy) {
        Superblock superblock;
        const std::uint64_t at = StoreLayout::superblock_offset(parity, copy, bytes.size());
        if (decode_superblock(bytes.subspan(at, kSuperblockBytes), superblock) !=
            SuperblockVerdict::kValid)
          continue;
        const std::uint64_t region = round_up(superblock.text_bytes, kRegionBytes);
        for (const std::uint64_t offset :
             {superblock.text_offset_bytes, bytes.size() - 2 * kRegionBytes - region}) {
          const auto text = bytes.subspan(offset, superblock.text_bytes);
          if (hash64(text, 0) != superblock.text_hash) continue;
          StoreFile file;
          const std::string json(reinterpret_cast<const char*>(text.data()), text.size());
          file.spec = parse_store_text(json, "the file");
          file.layout = StoreLayout::of(file.spec, json.size());
          return file;
        }
      }
    }
    return std::nullopt;
  }

  /// The number in this file of the chunk that the whole store calls `name`.
  std::optional<ChunkId> find(ChunkId name) const {
    for (ChunkId chunk = 0; chunk < spec.record_bytes.size(); ++chunk) {
      if (spec.chunk_name(chunk) == name) return chunk;
    }
    return std::nullopt;
  }
};

}  // namespace ziggurat::test
