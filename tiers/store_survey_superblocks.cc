// SPDX-License-Identifier: Apache-2.0
// tiers/store_survey_superblocks.cc: the four superblock copies of a file: which of them are whole,
// which are this file's at all, and what they say it is.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <tuple>

#include "base/error.h"
#include "tiers/store_survey.h"

namespace ziggurat {
namespace {

const char* parity_name(unsigned parity) { return parity == 0 ? "even" : "odd"; }
bool is_damage(SuperblockVerdict verdict) {
  return verdict == SuperblockVerdict::kForeign || verdict == SuperblockVerdict::kWrongChecksum;
}

}  // namespace

Task<StoreSurvey::Copy> StoreSurvey::read_copy(unsigned parity, int copy) {
  Copy result;
  try {
    const auto block = co_await read_bytes(
        StoreLayout::superblock_offset(parity, copy, size_bytes_), kSuperblockBytes);
    result.verdict = decode_superblock(block, result.superblock);
    if (result.is_whole() && parity_of(result.superblock.generation) != parity) {
      // Whole, and not here: a drive put it 64 KiB from where it was told to.
      result.fault = fmt::format("it belongs to generation {}, which has another place",
                                 result.superblock.generation);
      result.verdict = SuperblockVerdict::kForeign;
    }
  } catch (const Error& error) {
    result.verdict = SuperblockVerdict::kForeign;  // unreadable is as good as damaged
    result.fault = error.what();
  }
  co_return result;
}

Task<> StoreSurvey::read_superblocks() {
  // A killed process leaves writes that can be read but are still in the drive's cache. A
  // generation is only trusted, and the one before it only overwritten, once what says so cannot be
  // lost any more.
  if (!only_looks_) co_await file_->sync();  // nothing is built on what is only looked at
  // And where a sync of that process failed, the page cache shows as clean what the drive never
  // got: what is believed comes from the drive.
  file_->drop_cache();
  size_bytes_ = file_->size_bytes();
  if (size_bytes_ < 4 * kRegionBytes)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("{}: it has {} bytes, which is less than any store has: nothing of it remains",
                    path(), size_bytes_));
  for (const unsigned parity : {0u, 1u}) {
    for (int copy = 0; copy < kSuperblockCopies; ++copy)
      sides_[parity].copies[copy] = co_await read_copy(parity, copy);
  }
  reject_foreign_copies();
  for (const unsigned parity : {0u, 1u}) collect(parity);
  require_superblock();
}

/// Superblocks of one file have some facts in common: those that fit this rank and stripe are
/// believed, or else what most of them say. A drive that misdirects a write may put another file's
/// superblock here, whole.
void StoreSurvey::reject_foreign_copies() {
  const auto same_file = [](const Superblock& a, const Superblock& b) {
    return a.uuid == b.uuid && a.rank == b.rank && a.world_size == b.world_size &&
           a.stripe_index == b.stripe_index && a.stripe_count == b.stripe_count &&
           a.text_hash == b.text_hash;
  };
  std::vector<Copy*> whole;
  for (Side& side : sides_) {
    for (Copy& copy : side.copies) {
      if (copy.is_whole()) whole.push_back(&copy);
    }
  }
  const auto claim = [&](const Copy* candidate) {
    return std::pair(fits(candidate->superblock),
                     std::ranges::count_if(whole, [&](const Copy* other) {
                       return same_file(candidate->superblock, other->superblock);
                     }));
  };
  const auto best = std::ranges::max_element(whole, {}, claim);
  if (best == whole.end()) return;
  std::vector<Copy*> foreign;
  for (Copy* copy : whole) {
    if (same_file(copy->superblock, (*best)->superblock)) continue;
    if (claim(copy) == claim(*best))
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format(
              "{}: its superblocks belong to different stores; restore the file from a copy",
              path()));
    foreign.push_back(copy);
  }
  for (Copy* copy : foreign) {
    copy->verdict = SuperblockVerdict::kForeign;
    copy->fault = fmt::format("it is that of another file (rank {}, stripe {})",
                              copy->superblock.rank, copy->superblock.stripe_index);
  }
}

bool StoreSurvey::fits(const Superblock& superblock) const noexcept {
  const Quorum& ranks = environment_.ranks;
  return superblock.rank == static_cast<std::uint32_t>(ranks.rank()) &&
         superblock.world_size == static_cast<std::uint32_t>(ranks.world_size()) &&
         superblock.stripe_index == environment_.stripe_index &&
         superblock.stripe_count == environment_.stripe_count;
}

void StoreSurvey::collect(unsigned parity) {
  Side& side = sides_[parity];
  const auto order = [](const Superblock& s) {
    return std::tuple(s.generation, !s.in_progress, s.epoch);
  };
  for (const Copy& copy : side.copies) {
    if (!copy.is_whole()) continue;
    const std::uint64_t hash = superblock_hash(copy.superblock);
    if (std::ranges::find(side.found, hash, superblock_hash) == side.found.end())
      side.found.push_back(copy.superblock);
  }
  std::ranges::sort(side.found, std::greater<>(), order);
  for (int i = 0; i < kSuperblockCopies; ++i) {
    const Copy& copy = side.copies[i];
    if (!is_damage(copy.verdict)) continue;
    damaged_ = true;
    notes_.push_back(fmt::format("superblock {}, {}: {}; {}", parity_name(parity), copy_name(i),
                                 copy.fault.empty() ? to_string(copy.verdict) : copy.fault,
                                 side.newest() ? fmt::format("{} used", copy_name(1 - i))
                                               : "no copy is whole, so a generation is lost"));
  }
}

std::string StoreSurvey::faults() const {
  std::string text;
  for (const unsigned parity : {0u, 1u}) {
    for (int i = 0; i < kSuperblockCopies; ++i) {
      const Copy& copy = sides_[parity].copies[i];
      text += fmt::format("{}{} {}: {}", text.empty() ? "" : "; ", parity_name(parity),
                          copy_name(i), copy.fault.empty() ? to_string(copy.verdict) : copy.fault);
    }
  }
  return text;
}

const Superblock& StoreSurvey::any_superblock() const {
  const Superblock* even = sides_[0].newest();
  const Superblock* odd = sides_[1].newest();
  return even == nullptr || (odd != nullptr && odd->generation > even->generation) ? *odd : *even;
}

void StoreSurvey::require_superblock() const {
  if (sides_[0].newest() != nullptr || sides_[1].newest() != nullptr) return;
  for (const Side& side : sides_) {
    for (const Copy& copy : side.copies) {
      if (copy.verdict == SuperblockVerdict::kWrongVersion)
        throw Error(
            ErrorCode::kInvalidArgument,
            fmt::format("{}: its store format has version {}, but this program reads version {}: "
                        "use the version of ziggurat that wrote it, or export it there",
                        path(), copy.superblock.version, kStoreFormatVersion));
    }
  }
  throw Error(ErrorCode::kDataLoss,
              fmt::format("{}: both superblocks are damaged, so no generation can be trusted ({}). "
                          "What remains: the records between offsets {} and {} are not touched, "
                          "but which generation each belongs to is lost. Restore this file from a "
                          "copy, or start anew with `resume=never`",
                          path(), faults(), 2 * kRegionBytes, size_bytes_ - 2 * kRegionBytes));
}

void StoreSurvey::check_shape() const {
  const Superblock& s = any_superblock();
  const auto& ranks = environment_.ranks;
  if (s.world_size != static_cast<std::uint32_t>(ranks.world_size()))
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: the store was made by {} rank{}, but is opened by {}: run with the world "
                    "size that it was made for, cut it anew (`resume=reshard`), or choose another "
                    "store directory",
                    path(), s.world_size, s.world_size == 1 ? "" : "s", ranks.world_size()));
  if (s.stripe_count != environment_.stripe_count)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: the store has {} stripe{}, but was opened with {} director{}: give the "
                    "directories that it was made with, all of them and no other",
                    path(), s.stripe_count, s.stripe_count == 1 ? "" : "s",
                    environment_.stripe_count, environment_.stripe_count == 1 ? "y" : "ies"));
  if (s.stripe_index != environment_.stripe_index)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: holds stripe {}, not stripe {}; was it renamed?", path(),
                            s.stripe_index, environment_.stripe_index));
  if (s.rank != static_cast<std::uint32_t>(ranks.rank()))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: holds the state of rank {}, not of rank {}; was it renamed?",
                            path(), s.rank, ranks.rank()));
}

}  // namespace ziggurat
