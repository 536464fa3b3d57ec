// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_survey_repair.cc: writes what is needed when a generation was accepted: it
// erases superblocks of other generations, and writes damaged copies again.
#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "tiers/store/store_survey.h"

namespace ziggurat {

/// Writes `bytes`, then zeros up to `region_bytes`.
Task<> StoreSurvey::write_region(std::uint64_t offset, std::span<const std::byte> bytes,
                                 std::uint64_t region_bytes) {
  for (std::uint64_t done = 0; done < region_bytes;) {
    const auto piece = environment_.scratch.first(
        std::min<std::uint64_t>(environment_.scratch.size(), region_bytes - done));
    const auto part = bytes.first(std::min(bytes.size(), piece.size()));
    copy_bytes(part, piece);
    std::ranges::fill(piece.subspan(part.size()), std::byte{0});
    co_await file_->write(offset + done, piece);
    bytes = bytes.subspan(part.size());
    done += piece.size();
  }
}

/// Returns what leave_only() must write. Nobody needs the old bytes of these regions, so the order
/// of the writes, and a crash between them, do not matter.
std::vector<StoreSurvey::Rewrite> StoreSurvey::rewrites(std::uint64_t chosen) const {
  std::vector<Rewrite> rewrites;
  const auto write_copy = [&](unsigned parity, int copy, const Superblock* superblock) {
    Rewrite rewrite{StoreLayout::superblock_offset(parity, copy, size_bytes_), kRegionBytes, {}};
    if (superblock != nullptr) {
      rewrite.bytes.resize(kSuperblockBytes);
      encode_superblock(*superblock, rewrite.bytes);
    }
    rewrites.push_back(std::move(rewrite));
  };
  const auto copy_is = [&](const Copy& copy, const Superblock& wanted) {
    return copy.is_whole() && superblock_hash(copy.superblock) == superblock_hash(wanted);
  };

  const unsigned parity = parity_of(chosen);
  const Superblock& kept = generation(chosen).superblock;
  const Generation* made_from = before(chosen);
  const Superblock* older = made_from == nullptr ? nullptr : &made_from->superblock;
  for (int copy = 0; copy < kSuperblockCopies; ++copy) {
    // The copy is damaged or one seal behind: one more fault would cost the generation.
    if (!copy_is(sides_[parity].copies[copy], kept)) write_copy(parity, copy, &kept);
    const Copy& found = sides_[1 - parity].copies[copy];
    if (found.verdict != SuperblockVerdict::kBlank && !(older && copy_is(found, *older)))
      write_copy(1 - parity, copy, older);
    if (text_damaged_[copy]) {
      const auto text = std::as_bytes(std::span(text_));
      rewrites.push_back(
          {layout_.text_offset[copy], layout_.text_region_bytes, {text.begin(), text.end()}});
    }
  }
  return rewrites;
}

Task<> StoreSurvey::leave_only(std::uint64_t chosen) {
  const std::vector<Rewrite> all = rewrites(chosen);
  for (const Rewrite& rewrite : all)
    co_await write_region(rewrite.offset_bytes, rewrite.bytes, rewrite.region_bytes);
  if (!all.empty()) co_await file_->sync();
  const Superblock* other = sides_[parity_of(chosen + 1)].newest();
  if (other != nullptr && other->generation > chosen)
    notes_.push_back(fmt::format("generation {} was not whole on every rank, so it was erased",
                                 other->generation));
}

}  // namespace ziggurat
