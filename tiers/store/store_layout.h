// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_layout.h: where each byte of a store's file is. Everything else about the store
// follows from this.
//
//   offset          what                                              written
//   0               superblock, even generations, first copy          every 2nd commit
//   64 KiB          superblock, odd generations, first copy           every 2nd commit
//   128 KiB         text: layout, identity, chunk table (JSON)        once
//   ..              checksum table, even; then odd                    before its superblock
//   ..              blob, even; then odd                              before its superblock
//   ..              chunk 0 slot 0, chunk 0 slot 1, chunk 1 slot 0..  one slot each with slots = 1,
//                                                                     and for constant chunks
//   ..              text, second copy                                 once
//   end - 128 KiB   superblock, even, second copy                     after the first copy
//   end - 64 KiB    superblock, odd, second copy
//
// Every region begins at a multiple of kRegionBytes and is as long as one; this is a multiple of
// any direct-I/O alignment that is accepted. Generation g uses table, blob and slot g % 2. A table
// entry has 16 bytes: the record's hash, then the attempt in which it was written, little-endian.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tiers/store/state_store.h"

namespace ziggurat {

inline constexpr std::uint64_t kRegionBytes = 64 * 1024;
inline constexpr std::uint64_t kTableEntryBytes = 16;
inline constexpr int kSuperblockCopies = 2;

constexpr unsigned parity_of(std::uint64_t generation) noexcept {
  return static_cast<unsigned>(generation % 2);
}

struct StoreLayout {
  /// Computes the layout; `text_bytes` is store_text(spec).size(). Errors: kInvalidArgument, naming
  /// the chunk or field, for a specification that no store can have.
  static StoreLayout of(const StoreSpec& spec, std::uint64_t text_bytes);

  /// Returns the offset of copy `copy` of the superblock of `parity` in a file of `file_bytes`.
  static std::uint64_t superblock_offset(unsigned parity, int copy,
                                         std::uint64_t file_bytes) noexcept;
  std::uint64_t record_offset(ChunkId chunk, std::uint64_t generation) const noexcept;

  std::uint32_t slots = 2;
  std::array<std::uint64_t, 2> text_offset{};  ///< by copy
  std::uint64_t text_region_bytes = 0;
  std::array<std::uint64_t, 2> table_offset{};  ///< by parity
  std::uint64_t table_region_bytes = 0;
  std::array<std::uint64_t, 2> blob_offset{};  ///< by parity
  std::uint64_t blob_region_bytes = 0;
  std::vector<std::uint64_t> record_offsets;  ///< offset of slot 0 of each chunk
  std::vector<std::uint64_t> record_bytes;
  std::vector<bool> constant;  ///< per chunk: it has one slot for all generations; empty if no
                               ///< chunk is constant
  std::uint64_t file_bytes = 0;
};

/// Returns the text area: `spec` as JSON, without what the superblock contains.
std::string store_text(const StoreSpec& spec);
/// Reads the text area. Errors: kDataLoss if it is not what store_text() writes (its hash was
/// right, so a program wrote it that way).
StoreSpec parse_store_text(const std::string& text, const std::string& path);

}  // namespace ziggurat
