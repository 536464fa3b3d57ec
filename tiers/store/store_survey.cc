// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_survey.cc: reads a store that may have been cut off at any instant, or damaged
// since: text, tables and blobs, and which generations they leave. Superblocks are in
// store_survey_superblocks.cc.
#include "tiers/store/store_survey.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {

std::unique_ptr<StoreSurvey> StoreSurvey::open(const StoreEnvironment& environment,
                                               const std::string& path) {
  ZIGGURAT_CHECK(!environment.scratch.empty() && environment.scratch.size() % kMiB == 0,
                 "scratch memory of {} bytes", environment.scratch.size());
  OpenOptions options;
  options.writable = true;
  options.lock = true;
  auto file =
      DirectFile::open(environment.reactor, environment.io, path, options, environment.observers);
  return std::unique_ptr<StoreSurvey>(new StoreSurvey(environment, std::move(file)));
}

std::unique_ptr<StoreSurvey> StoreSurvey::open_to_look(const StoreEnvironment& environment,
                                                       const std::string& path) {
  auto file =
      DirectFile::open(environment.reactor, environment.io, path, {}, environment.observers);
  std::unique_ptr<StoreSurvey> survey(new StoreSurvey(environment, std::move(file)));
  survey->only_looks_ = true;
  return survey;
}

Task<std::vector<std::byte>> StoreSurvey::read_bytes(std::uint64_t offset,
                                                     std::uint64_t size_bytes) {
  std::vector<std::byte> bytes;
  if (offset > size_bytes_ || size_bytes > size_bytes_ - offset) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("a file of {2} bytes does not have {0} bytes at offset {1}", size_bytes,
                            offset, size_bytes_));
  }
  bytes.reserve(size_bytes);
  while (bytes.size() < size_bytes) {
    const std::uint64_t wanted =
        std::min<std::uint64_t>(size_bytes - bytes.size(), environment_.scratch.size());
    const auto piece =
        environment_.scratch.first(round_up(wanted, file_->alignment().offset_bytes));
    co_await file_->read(offset + bytes.size(), piece);
    bytes.insert(bytes.end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(wanted));
  }
  co_return bytes;
}

bool StoreSurvey::is_sealed_creation() const noexcept {
  const Superblock* sealed = sides_[0].newest();
  return sealed != nullptr && sealed->generation == 0 && !sealed->in_progress &&
         sides_[1].newest() == nullptr;
}

StoreUuid StoreSurvey::uuid() const noexcept { return identity().uuid; }

Task<> StoreSurvey::read_contents() {
  const Superblock& s = identity();
  if (s.file_bytes != size_bytes_)
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} has {} bytes, but its superblock says {}; another program cut or "
                            "extended the file. Restore it from a copy, or start from the "
                            "beginning with `resume=never`",
                            path(), size_bytes_, s.file_bytes));
  co_await read_text();
  for (const unsigned parity : {0u, 1u}) co_await read_generation(parity);
  for (const unsigned parity : {0u, 1u}) judge_generation(parity);
  note_overwriting();
}

Task<> StoreSurvey::read_text() {
  const Superblock& s = identity();
  const std::uint64_t region = round_up(s.text_bytes, kRegionBytes);
  const std::array<std::uint64_t, 2> offsets{s.text_offset_bytes,
                                             size_bytes_ - 2 * kRegionBytes - region};
  bool found = false;
  std::string faults;
  for (int copy = 0; copy < kSuperblockCopies; ++copy) {
    std::string fault = "checksum wrong";
    try {
      const auto bytes = co_await read_bytes(offsets[copy], s.text_bytes);
      if (hash64(bytes, 0) == s.text_hash) {
        text_.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        found = true;
        continue;
      }
    } catch (const Error& error) {
      fault = error.what();
    }
    text_damaged_[copy] = damaged_ = true;
    notes_.push_back(fmt::format("layout text, {}: {}", copy_name(copy), fault));
    faults += fmt::format("{}{}: {}", faults.empty() ? "" : "; ", copy_name(copy), fault);
  }
  if (!found)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("{}: both copies of the layout text are damaged ({}), so it is not known where "
                    "each record begins. The superblocks and records are not touched. Restore the "
                    "file from a copy",
                    path(), faults));
  spec_ = parse_store_text(text_, path());
  try {
    layout_ = StoreLayout::of(spec_, text_.size());
  } catch (const Error& error) {
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("the layout text of {} is not that of a store: {}", path(), error.what()));
  }
  if (layout_.file_bytes != size_bytes_ || layout_.slots != s.slots ||
      spec_.record_bytes.size() != s.chunk_count)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "the layout text of {} does not fit its superblock; restore the file from a copy",
            path()));
}

Task<> StoreSurvey::read_generation(unsigned parity) {
  Side& side = sides_[parity];
  for (const Superblock& superblock : side.found) {
    if (superblock.in_progress) continue;
    std::string fault;
    side.whole = co_await read_generation(superblock, fault);
    if (side.whole) co_return;
    if (side.fault.empty()) side.fault = std::move(fault);
  }
}

/// Reads table and blob of a sealed superblock. A damaged table makes its generation useless,
/// because nothing says which bytes are right.
Task<std::optional<StoreSurvey::Generation>> StoreSurvey::read_generation(
    const Superblock& superblock, std::string& fault) {
  const unsigned parity = parity_of(superblock.generation);
  Generation read{.superblock = superblock, .table = {}, .blob = {}};
  try {
    if (superblock.blob_bytes > spec_.blob_capacity_bytes)
      throw Error(ErrorCode::kDataLoss, "the trainer blob is longer than the room for it");
    const auto table =
        co_await read_bytes(layout_.table_offset[parity], layout_.table_region_bytes);
    read.blob = co_await read_bytes(layout_.blob_offset[parity], superblock.blob_bytes);
    read.table = decode_table(table, spec_.record_bytes.size(), superblock.generation);
    if (hash64(table, superblock.generation) != superblock.table_hash) {
      fault = "the checksum table is damaged";
    } else if (hash64(read.blob, superblock.generation) != superblock.blob_hash) {
      fault = "the trainer blob is damaged";
    }
  } catch (const Error& error) {
    fault = error.what();
  }
  if (!fault.empty()) co_return std::nullopt;
  co_return read;
}

/// Judges a generation whose table or blob is no longer its own. It is damaged, unless a newer one
/// is whole. In that case a commit of the next generation was cut off before its superblock, and
/// was allowed to overwrite them.
void StoreSurvey::judge_generation(unsigned parity) {
  const Side& side = sides_[parity];
  const Side& other = sides_[1 - parity];
  if (side.fault.empty() || side.whole) return;
  const std::uint64_t generation = side.newest()->generation;
  if (other.whole && other.whole->superblock.generation > generation) return;
  damaged_ = true;
  notes_.push_back(fmt::format("generation {} cannot be used, because {}", generation, side.fault));
}

/// Notes that the only copy was being overwritten. A run that was cut off then may not have come to
/// the first record.
void StoreSurvey::note_overwriting() {
  if (layout_.slots != 1) return;
  for (const Side& side : sides_) {
    const Superblock* newest = side.newest();
    if (newest == nullptr || !newest->in_progress) continue;
    damaged_ = true;
    notes_.push_back(
        fmt::format("the run was cut off while generation {} was being written over generation {}, "
                    "the only one that a store with `slots=1` has",
                    newest->generation, newest->generation - 1));
  }
}

/// Returns whether the records of a generation are overwritten: with one slot, those of all
/// generations but the newest sealed one are.
bool StoreSurvey::overwritten(std::uint64_t generation) const noexcept {
  if (layout_.slots != 1) return false;
  return std::ranges::any_of(sides_, [&](const Side& side) {
    return std::ranges::any_of(side.found, [&](const Superblock& superblock) {
      return !superblock.in_progress && superblock.generation > generation;
    });
  });
}

std::optional<std::uint64_t> StoreSurvey::newest_candidate(std::uint64_t limit) const noexcept {
  std::optional<std::uint64_t> newest;
  for (const Side& side : sides_) {
    if (!side.whole) continue;
    const std::uint64_t generation = side.whole->superblock.generation;
    if (generation >= limit || overwritten(generation)) continue;
    newest = std::max(newest.value_or(0), generation);
  }
  return newest;
}

std::uint64_t StoreSurvey::newest_seen() const noexcept { return identity().generation; }

std::uint64_t StoreSurvey::epoch_seen() const noexcept {
  std::uint64_t epoch = 0;
  for (const Side& side : sides_) {
    for (const Copy& copy : side.copies) {
      if (copy.is_whole()) epoch = std::max(epoch, copy.superblock.epoch);
    }
  }
  return epoch;
}

const StoreSurvey::Generation& StoreSurvey::generation(std::uint64_t generation) const {
  const auto& whole = sides_[parity_of(generation)].whole;
  ZIGGURAT_CHECK(whole && whole->superblock.generation == generation, "generation {} is not here",
                 generation);
  return *whole;
}

const StoreSurvey::Generation* StoreSurvey::before(std::uint64_t chosen) const noexcept {
  const auto& other = sides_[parity_of(chosen + 1)].whole;
  const bool made_from_it =
      other && layout_.slots == 2 && other->superblock.generation + 1 == chosen &&
      generation(chosen).superblock.previous_hash == superblock_hash(other->superblock);
  return made_from_it ? &*other : nullptr;
}

}  // namespace ziggurat
