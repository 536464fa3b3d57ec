// SPDX-License-Identifier: Apache-2.0
// tiers/store/superblock.h: the 4 KiB block that says which generation of a store is whole, field
// by field, little-endian.
//
// There are two, one per parity of the generation, with two copies of each far apart. A superblock
// is believed only if its magic and its own checksum are right. What it says about tables and blobs
// is believed only if their hashes are right too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ziggurat {

inline constexpr std::size_t kSuperblockBytes = 4096;
inline constexpr std::uint32_t kStoreFormatVersion = 1;

/// The identity of a store, drawn when it is created and equal on every rank, so that files of two
/// stores are never taken for one.
struct StoreUuid {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const StoreUuid&) const = default;
  /// Returns 64 bits of it, for comparing ranks and for seeds; never 0.
  std::uint64_t key() const noexcept;
};

struct Superblock {
  std::uint32_t version = kStoreFormatVersion;
  StoreUuid uuid;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  struct Mesh {
    std::uint32_t data = 1;
    std::uint32_t tensor = 1;
    std::uint32_t pipeline = 1;
    std::uint32_t context = 1;
  } mesh;
  std::uint32_t stripe_index = 0;
  std::uint32_t stripe_count = 1;
  std::uint32_t slots = 2;
  /// Only with slots = 1: records of `generation` are being written over those of the previous one,
  /// so that no generation is whole.
  bool in_progress = false;
  std::uint64_t file_bytes = 0;
  std::uint64_t chunk_count = 0;
  std::uint64_t layout_hash = 0;    ///< hash of StoreSpec::layout
  std::uint64_t identity_hash = 0;  ///< hash of StoreSpec::run_identity
  std::uint64_t numerics_hash = 0;  ///< hash of StoreSpec::numerics_fingerprint
  std::uint64_t text_offset_bytes = 0;
  std::uint64_t text_bytes = 0;
  std::uint64_t text_hash =
      0;  ///< hash of the text area, which has these three texts and the chunk table
  std::uint64_t generation = 0;
  std::uint64_t optimizer_step = 0;
  std::uint64_t epoch = 0;
  std::uint64_t previous_hash =
      0;  ///< superblock_hash() of the previous generation on this rank; 0 for generation 0
  std::uint64_t lineage =
      0;  ///< folds the (generation, attempt) of every generation so far; equal on all ranks
  std::uint64_t table_offset_bytes = 0;
  std::uint64_t table_hash = 0;
  std::uint64_t blob_offset_bytes = 0;
  std::uint64_t blob_bytes = 0;
  std::uint64_t blob_hash = 0;
};

/// Fills `block` (kSuperblockBytes) with `superblock`, padded with zeros, and sets the checksum.
void encode_superblock(const Superblock& superblock, std::span<std::byte> block);

enum class SuperblockVerdict {
  kValid,
  kBlank,    ///< all zero: never written, or erased
  kForeign,  ///< no magic
  kWrongChecksum,
  kWrongVersion,  ///< whole, but of a format that this program does not know; only `version` is
                  ///< filled in
};
std::string to_string(SuperblockVerdict verdict);

SuperblockVerdict decode_superblock(std::span<const std::byte> block, Superblock& superblock);

/// Returns the identity of a superblock in the chain: the hash of its encoded block.
std::uint64_t superblock_hash(const Superblock& superblock);

/// Returns the lineage of a generation that was made in `attempt` on top of `lineage_before`.
std::uint64_t extend_lineage(std::uint64_t lineage_before, std::uint64_t generation,
                             std::uint64_t attempt) noexcept;

}  // namespace ziggurat
