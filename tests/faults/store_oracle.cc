// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_oracle.cc: superblock, table, blob and records of each generation in each
// file.
#include "tests/faults/store_oracle.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/superblock.h"

namespace ziggurat::faults {
namespace {

/// One file's whole generations: by (generation, lineage), the launch that made it.
using Whole = std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t>;

class File {
 public:
  File(const SimulatedDisk& disk, std::string path, int rank, std::uint32_t stripe)
      : disk_(disk),
        path_(std::move(path)),
        bytes_(disk.contents_on_drive(path_)),
        rank_(rank),
        stripe_(stripe) {
    for (const unsigned parity : {0u, 1u}) {
      for (int copy = 0; copy < kSuperblockCopies; ++copy) read_superblock(parity, copy);
    }
  }

  std::optional<std::uint64_t> store() const {
    if (superblocks_.empty()) return std::nullopt;
    return superblocks_.front().uuid.key();
  }

  std::uint64_t heard_of() const {
    std::uint64_t newest = 0;
    for (const Superblock& superblock : superblocks_)
      newest = std::max(newest, superblock.generation);
    return newest;
  }

  Whole whole_generations() const {
    Whole whole;
    if (!text_is_whole()) return whole;
    for (const Superblock& superblock : superblocks_) {
      if (const auto launch = launch_of(superblock))
        whole[{superblock.generation, superblock.lineage}] = *launch;
    }
    return whole;
  }

 private:
  /// Nothing where the file, which may have been cut, does not reach.
  std::vector<std::byte> at(std::uint64_t offset, std::uint64_t size_bytes) const {
    if (!holds(offset, size_bytes)) return {};
    std::vector<std::byte> bytes(size_bytes);
    bytes_.read(offset, bytes);
    return bytes;
  }
  bool holds(std::uint64_t offset, std::uint64_t size_bytes) const {
    return offset <= bytes_.size() && size_bytes <= bytes_.size() - offset;
  }
  bool readable(std::uint64_t offset, std::uint64_t size_bytes) const {
    return holds(offset, size_bytes) &&
           disk_.is_readable(path_, offset, round_up(size_bytes, 4096));
  }

  void read_superblock(unsigned parity, int copy) {
    const std::uint64_t offset = StoreLayout::superblock_offset(parity, copy, bytes_.size());
    Superblock superblock;
    if (!readable(offset, kSuperblockBytes) ||
        decode_superblock(at(offset, kSuperblockBytes), superblock) != SuperblockVerdict::kValid)
      return;
    const std::uint64_t hash = superblock_hash(superblock);
    if (superblock.rank == static_cast<std::uint32_t>(rank_) &&
        superblock.stripe_index == stripe_ && parity_of(superblock.generation) == parity &&
        std::ranges::find(superblocks_, hash, superblock_hash) == superblocks_.end())
      superblocks_.push_back(superblock);
  }

  bool text_is_whole() const {
    if (superblocks_.empty()) return false;
    const Superblock& any = superblocks_.front();
    const std::uint64_t region = round_up(any.text_bytes, kRegionBytes);
    for (const std::uint64_t offset :
         {any.text_offset_bytes, bytes_.size() - 2 * kRegionBytes - region}) {
      const auto text = at(offset, any.text_bytes);
      if (readable(offset, any.text_bytes) && hash64(text, 0) == any.text_hash) {
        text_.assign(reinterpret_cast<const char*>(text.data()), text.size());
        return true;
      }
    }
    return false;
  }

  /// Whose generation it is, if it is whole. The superblock vouches for one table and one blob, and
  /// the blob says whose the records must be: those of another history lie in the same slots.
  std::optional<std::uint64_t> launch_of(const Superblock& superblock) const {
    if (superblock.in_progress) return std::nullopt;
    const StoreSpec spec = parse_store_text(text_, path_);
    const StoreLayout layout = StoreLayout::of(spec, text_.size());
    const unsigned parity = parity_of(superblock.generation);
    const std::uint64_t table = layout.table_offset[parity];
    const std::uint64_t blob_at = layout.blob_offset[parity];
    if (!readable(table, layout.table_region_bytes) ||
        hash64(at(table, layout.table_region_bytes), superblock.generation) !=
            superblock.table_hash)
      return std::nullopt;
    const auto blob = at(blob_at, superblock.blob_bytes);
    const Tag tag = tag_in(blob);
    if (!readable(blob_at, superblock.blob_bytes) || tag.generation != superblock.generation ||
        hash64(blob, superblock.generation) != superblock.blob_hash ||
        !std::ranges::equal(blob, blob_of(tag, rank_)))
      return std::nullopt;
    for (ChunkId chunk = 0; chunk < spec.record_bytes.size(); ++chunk) {
      const std::uint64_t offset = layout.record_offset(chunk, superblock.generation);
      if (!readable(offset, spec.record_bytes[chunk]) ||
          !has_pattern(at(offset, spec.record_bytes[chunk]), tag,
                       place_of(rank_, spec.chunk_name(chunk))))
        return std::nullopt;
    }
    return tag.launch;
  }

  const SimulatedDisk& disk_;
  std::string path_;
  PagedBytes bytes_;
  int rank_;
  std::uint32_t stripe_;
  std::vector<Superblock> superblocks_;
  mutable std::string text_;
};

}  // namespace

void write_pattern(std::span<std::byte> bytes, Tag tag, std::uint64_t place) {
  std::uint64_t value = mix_seed(mix_seed(tag.launch, tag.generation), place);
  auto* words = reinterpret_cast<std::uint64_t*>(bytes.data());
  for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
    words[i] = i % 64 == 0 ? tag.launch : i % 64 == 1 ? tag.generation : value;
    value += 0x9e37'79b9'7f4a'7c15;
  }
}

bool has_pattern(std::span<const std::byte> bytes, Tag tag, std::uint64_t place) {
  if (tag_in(bytes) != tag) return false;
  static std::vector<std::byte> wanted;  // thousands of seeds compare tens of records each
  wanted.resize(bytes.size());
  write_pattern(wanted, tag, place);
  return std::memcmp(wanted.data(), bytes.data(), bytes.size()) == 0;
}

Tag tag_in(std::span<const std::byte> bytes) {
  Tag tag{};
  if (bytes.size() >= sizeof tag) std::memcpy(&tag, bytes.data(), sizeof tag);
  return tag;
}

std::uint64_t place_of(int rank, ChunkId chunk) {
  return static_cast<std::uint64_t>(rank) * 1000 + chunk;
}

std::vector<std::byte> blob_of(Tag tag, int rank) {
  std::vector<std::byte> blob(512 + 8 * (tag.generation % 5));
  write_pattern(blob, tag, place_of(rank, 999));
  return blob;
}

OracleFinding look_at(const SimulatedDisk& disk,
                      const std::vector<std::vector<std::string>>& paths) {
  std::optional<std::uint64_t> store;
  std::optional<Whole> common;
  bool complete = true;
  std::uint64_t heard_of = 0;
  for (std::size_t rank = 0; rank < paths.size(); ++rank) {
    for (std::size_t stripe = 0; stripe < paths[rank].size(); ++stripe) {
      if (!disk.exists(paths[rank][stripe])) return {};
      const File file(disk, paths[rank][stripe], static_cast<int>(rank),
                      static_cast<std::uint32_t>(stripe));
      if (!file.store()) {  // nothing is left that says what it was
        complete = false;
        continue;
      }
      if (store && *store != *file.store()) return {};
      store = file.store();
      heard_of = std::max(heard_of, file.heard_of());
      const Whole whole = file.whole_generations();
      if (!common) common = whole;
      std::erase_if(*common, [&](const auto& entry) {
        const auto same = whole.find(entry.first);
        return same == whole.end() || same->second != entry.second;
      });
    }
  }
  OracleFinding finding{.applies = true, .newest = std::nullopt, .heard_of = heard_of};
  if (complete && common && !common->empty()) {
    const auto& [key, launch] = *common->rbegin();
    finding.newest = Tag{launch, key.first};
  }
  return finding;
}

}  // namespace ziggurat::faults
