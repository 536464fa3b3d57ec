// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/blob_header.h: what stands before the trainer's blob in a store's generation.
//
// A store that began its line has only a header, because its uuid names the line. A store that
// continues a line, or began a child of one, also has a record of the line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "core/checkpoint/state_line.h"

namespace ziggurat {

struct BlobHeader {
  static constexpr std::uint64_t kMagic = 0x315a494747424c31;        // "1LBGGIZ1"
  static constexpr std::uint64_t kMagicOfLine = 0x325a494747424c31;  // "1LBGGIZ2": BlobLine follows
  std::uint64_t magic = kMagic;
  std::uint64_t generation = 0;  ///< finished steps
};

struct BlobLine {
  LineId id;
  LineId parent;  ///< zeros: none
  std::uint64_t left_at = 0;
  std::uint64_t epochs_before = 0;  ///< how often the line was opened before this store was
  friend bool operator==(const BlobLine&, const BlobLine&) = default;
};

/// Most bytes that can stand before a blob.
inline constexpr std::uint64_t kBlobHeadBytes = sizeof(BlobHeader) + sizeof(BlobLine);

inline std::vector<std::byte> wrap_blob(std::uint64_t generation,
                                        const std::optional<BlobLine>& line,
                                        std::span<const std::byte> blob) {
  const BlobHeader header{.magic = line ? BlobHeader::kMagicOfLine : BlobHeader::kMagic,
                          .generation = generation};
  std::vector<std::byte> wrapped(sizeof(header) + (line ? sizeof(*line) : 0) + blob.size());
  std::memcpy(wrapped.data(), &header, sizeof(header));
  if (line) std::memcpy(wrapped.data() + sizeof(header), &*line, sizeof(*line));
  if (!blob.empty())
    std::memcpy(wrapped.data() + (wrapped.size() - blob.size()), blob.data(), blob.size());
  return wrapped;
}

struct UnwrappedBlob {
  std::uint64_t generation = 0;
  std::optional<BlobLine> line;
  std::span<const std::byte> blob;
};
/// Returns nothing if wrap_blob() cannot have made `wrapped`.
inline std::optional<UnwrappedBlob> unwrap_blob(std::span<const std::byte> wrapped) {
  BlobHeader header;
  if (wrapped.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, wrapped.data(), sizeof(header));
  UnwrappedBlob its{
      .generation = header.generation, .line = {}, .blob = wrapped.subspan(sizeof(header))};
  if (header.magic == BlobHeader::kMagic) return its;
  if (header.magic != BlobHeader::kMagicOfLine || its.blob.size() < sizeof(BlobLine))
    return std::nullopt;
  its.line.emplace();
  std::memcpy(&*its.line, its.blob.data(), sizeof(BlobLine));
  its.blob = its.blob.subspan(sizeof(BlobLine));
  return its;
}

/// Returns the record for a store that continues `line`.
inline BlobLine continued(const StateLine& line) {
  return {.id = line.id,
          .parent = line.parent.value_or(LineId{}),
          .left_at = line.left_at,
          .epochs_before = line.epoch};
}

/// Returns the line of a store that has `record`, or has none. The store's uuid and epoch are
/// `store` and `epoch`.
inline StateLine line_of(const std::optional<BlobLine>& record, const LineId& store,
                         std::uint64_t epoch) {
  if (!record) return {.id = store, .epoch = epoch, .parent = {}, .left_at = 0};
  StateLine line{.id = record->id,
                 .epoch = record->epochs_before + epoch,
                 .parent = {},
                 .left_at = record->left_at};
  if (record->parent != LineId{}) line.parent = record->parent;
  return line;
}

}  // namespace ziggurat
