// SPDX-License-Identifier: Apache-2.0
// tiers/store/superblock.cc: one function over the fields serves both directions, so that they
// cannot disagree.
#include "tiers/store/superblock.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/checksum.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kMagic = 0x4554'4154'5347'495a;  // "ZIGSTATE" in the file's byte order
constexpr std::uint64_t kChecksumSeed = 0x7375'7065'7262'6c6b;
// These three never change, whatever the format version, so that every program can recognize
// another version.
constexpr std::size_t kMagicOffset = 0;
constexpr std::size_t kChecksumOffset = 8;
constexpr std::size_t kFieldsOffset = 16;  // the first field is the version

void store_little(std::span<std::byte> block, std::size_t offset, std::uint64_t value,
                  std::size_t width) {
  for (std::size_t i = 0; i < width; ++i)
    block[offset + i] = static_cast<std::byte>(value >> (8 * i));
}

std::uint64_t load_little(std::span<const std::byte> block, std::size_t offset, std::size_t width) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i)
    value |= std::to_integer<std::uint64_t>(block[offset + i]) << (8 * i);
  return value;
}

/// Calls `field(value)` for every field, in file order. The order is the format, so fields may only
/// be appended.
template <class S, class F>
void for_each_field(S& s, F&& field) {
  field(s.version);
  field(s.rank);
  field(s.world_size);
  field(s.mesh.data);
  field(s.mesh.tensor);
  field(s.mesh.pipeline);
  field(s.mesh.context);
  field(s.stripe_index);
  field(s.stripe_count);
  field(s.slots);
  field(s.in_progress);
  field(s.uuid.high);
  field(s.uuid.low);
  field(s.file_bytes);
  field(s.chunk_count);
  field(s.layout_hash);
  field(s.identity_hash);
  field(s.numerics_hash);
  field(s.text_offset_bytes);
  field(s.text_bytes);
  field(s.text_hash);
  field(s.generation);
  field(s.optimizer_step);
  field(s.epoch);
  field(s.previous_hash);
  field(s.lineage);
  field(s.table_offset_bytes);
  field(s.table_hash);
  field(s.blob_offset_bytes);
  field(s.blob_bytes);
  field(s.blob_hash);
}

/// The bytes of a field: 4 for bool and 32-bit fields, 8 for 64-bit ones.
template <class T>
constexpr std::size_t field_width = sizeof(T) == 8 ? 8 : 4;

std::uint64_t checksum(std::span<const std::byte> block) {
  return hash64(block.subspan(kFieldsOffset),
                mix_seed(kChecksumSeed, load_little(block, kMagicOffset, 8)));
}

}  // namespace

std::uint64_t StoreUuid::key() const noexcept {
  return std::max<std::uint64_t>(1, mix_seed(high, low));
}

void encode_superblock(const Superblock& superblock, std::span<std::byte> block) {
  ZIGGURAT_CHECK(block.size() >= kSuperblockBytes, "{} bytes", block.size());
  block = block.first(kSuperblockBytes);
  std::memset(block.data(), 0, block.size());
  store_little(block, kMagicOffset, kMagic, 8);
  std::size_t offset = kFieldsOffset;
  for_each_field(superblock, [&](const auto& value) {
    constexpr std::size_t width = field_width<std::remove_cvref_t<decltype(value)>>;
    store_little(block, offset, static_cast<std::uint64_t>(value), width);
    offset += width;
  });
  store_little(block, kChecksumOffset, checksum(block), 8);
}

SuperblockVerdict decode_superblock(std::span<const std::byte> block, Superblock& superblock) {
  ZIGGURAT_CHECK(block.size() >= kSuperblockBytes, "{} bytes", block.size());
  block = block.first(kSuperblockBytes);
  static constexpr std::array<std::byte, kSuperblockBytes> kZeros{};
  if (std::memcmp(block.data(), kZeros.data(), block.size()) == 0) return SuperblockVerdict::kBlank;
  if (load_little(block, kMagicOffset, 8) != kMagic) return SuperblockVerdict::kForeign;
  if (load_little(block, kChecksumOffset, 8) != checksum(block))
    return SuperblockVerdict::kWrongChecksum;
  superblock = {};
  superblock.version = static_cast<std::uint32_t>(load_little(block, kFieldsOffset, 4));
  if (superblock.version != kStoreFormatVersion) return SuperblockVerdict::kWrongVersion;
  std::size_t offset = kFieldsOffset;
  for_each_field(superblock, [&](auto& value) {
    using Field = std::remove_cvref_t<decltype(value)>;
    value = static_cast<Field>(load_little(block, offset, field_width<Field>));
    offset += field_width<Field>;
  });
  return SuperblockVerdict::kValid;
}

std::string to_string(SuperblockVerdict verdict) {
  switch (verdict) {
    case SuperblockVerdict::kValid: return "valid";
    case SuperblockVerdict::kBlank: return "never written";
    case SuperblockVerdict::kForeign: return "not a superblock";
    case SuperblockVerdict::kWrongChecksum: return "checksum wrong";
    case SuperblockVerdict::kWrongVersion: return "another format version";
  }
  return "?";
}

std::uint64_t superblock_hash(const Superblock& superblock) {
  std::array<std::byte, kSuperblockBytes> block;
  encode_superblock(superblock, block);
  return hash64(block, 0);
}

std::uint64_t extend_lineage(std::uint64_t lineage_before, std::uint64_t generation,
                             std::uint64_t attempt) noexcept {
  return mix_seed(mix_seed(lineage_before, generation), attempt);
}

}  // namespace ziggurat
