// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_survey_superblocks.cc: reads the four superblock copies of a file: which of
// them are whole, which belong to this file, and what they say that it is.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <tuple>

#include "base/error.h"
#include "tiers/store/store_survey.h"

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
      // The copy is whole, but at the wrong place: a drive wrote it 64 KiB from where it should be.
      result.fault = fmt::format("this copy belongs to generation {}, which has another place",
                                 result.superblock.generation);
      result.verdict = SuperblockVerdict::kForeign;
    }
  } catch (const Error& error) {
    result.verdict = SuperblockVerdict::kForeign;  // an unreadable copy is as useless as a damaged
                                                   // one
    result.fault = error.what();
  }
  co_return result;
}

Task<> StoreSurvey::read_superblocks() {
  // A killed process leaves writes that can be read but are still in the drive's cache. A
  // generation is trusted, and the previous one overwritten, only when its superblock cannot be
  // lost any more.
  if (!only_looks_) co_await file_->sync();  // nothing is built on a file that is only read
  // If a sync of that process failed, the page cache shows bytes as clean that the drive never got.
  // So everything is read from the drive.
  file_->drop_cache();
  size_bytes_ = file_->size_bytes();
  if (size_bytes_ < 4 * kRegionBytes)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "{} has {} bytes, which is less than any store has, so no part of the store is left",
            path(), size_bytes_));
  for (const unsigned parity : {0u, 1u}) {
    for (int copy = 0; copy < kSuperblockCopies; ++copy)
      sides_[parity].copies[copy] = co_await read_copy(parity, copy);
  }
  reject_foreign_copies();
  for (const unsigned parity : {0u, 1u}) collect(parity);
  require_superblock();
}

/// Rejects superblocks of other files. A drive that misdirects a write may put another file's
/// superblock into this file, whole. Superblocks of one file have some facts in common. Those that
/// fit this rank and stripe are believed, or else those on which most of them agree.
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
              "the superblocks of {} belong to different stores; restore the file from a copy",
              path()));
    foreign.push_back(copy);
  }
  for (Copy* copy : foreign) {
    copy->verdict = SuperblockVerdict::kForeign;
    copy->fault = fmt::format("this copy belongs to another file (rank {}, stripe {})",
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

const Superblock& StoreSurvey::identity() const {
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
            fmt::format("{} has store format version {}, but this program reads version {}; "
                        "use the version of ziggurat that wrote the store, or export the store "
                        "with that version",
                        path(), copy.superblock.version, kStoreFormatVersion));
    }
  }
  throw Error(
      ErrorCode::kDataLoss,
      fmt::format("{}: both superblocks are damaged, so no generation can be trusted ({}). "
                  "The records between offsets {} and {} are not touched, but it is not known "
                  "to which generation each belongs. Restore this file from a copy, or "
                  "start from the beginning with `resume=never`",
                  path(), faults(), 2 * kRegionBytes, size_bytes_ - 2 * kRegionBytes));
}

void StoreSurvey::check_shape() const {
  const Superblock& s = identity();
  const auto& ranks = environment_.ranks;
  if (s.world_size != static_cast<std::uint32_t>(ranks.world_size()))
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "{}: the store was made by {} rank{}, but is opened by {}; start as many ranks as "
            "it was made by, reshard it (`resume=reshard`), or choose another "
            "store directory",
            path(), s.world_size, s.world_size == 1 ? "" : "s", ranks.world_size()));
  if (s.stripe_count != environment_.stripe_count)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: the store has {} stripe{}, but was opened with {} director{}; give all "
                    "directories with which it was made, and no others",
                    path(), s.stripe_count, s.stripe_count == 1 ? "" : "s",
                    environment_.stripe_count, environment_.stripe_count == 1 ? "y" : "ies"));
  if (s.stripe_index != environment_.stripe_index)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} holds stripe {}, not stripe {}; if it was renamed, give it its old name",
                    path(), s.stripe_index, environment_.stripe_index));
  if (s.rank != static_cast<std::uint32_t>(ranks.rank()))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} holds the state of rank {}, not of rank {}; if it was renamed, "
                            "give it its old name",
                            path(), s.rank, ranks.rank()));
}

}  // namespace ziggurat
