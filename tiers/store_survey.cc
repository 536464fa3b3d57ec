// SPDX-License-Identifier: Apache-2.0
// tiers/store_survey.cc: reading a store that may have been cut off at any instant, or damaged
// since.
#include "tiers/store_survey.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

const char* parity_name(unsigned parity) { return parity == 0 ? "even" : "odd"; }
const char* copy_name(int copy) { return copy == 0 ? "first copy" : "second copy"; }
bool is_whole(SuperblockVerdict verdict) { return verdict == SuperblockVerdict::kValid; }
bool is_damage(SuperblockVerdict verdict) {
  return verdict == SuperblockVerdict::kForeign || verdict == SuperblockVerdict::kWrongChecksum;
}

}  // namespace

std::unique_ptr<StoreSurvey> StoreSurvey::open(const StoreEnvironment& environment,
                                               const std::string& path) {
  ZIGGURAT_CHECK(!environment.fill.empty() && environment.fill.size() % kMiB == 0,
                 "fill memory of {} bytes", environment.fill.size());
  OpenOptions options;
  options.writable = true;
  options.lock = true;
  auto file =
      DirectFile::open(environment.reactor, environment.io, path, options, environment.observers);
  return std::unique_ptr<StoreSurvey>(new StoreSurvey(environment, std::move(file)));
}

Task<std::vector<std::byte>> StoreSurvey::read_bytes(std::uint64_t offset,
                                                     std::uint64_t size_bytes) {
  std::vector<std::byte> bytes;
  bytes.reserve(size_bytes);
  while (bytes.size() < size_bytes) {
    const std::uint64_t wanted =
        std::min<std::uint64_t>(size_bytes - bytes.size(), environment_.fill.size());
    const auto piece = environment_.fill.first(round_up(wanted, file_->alignment().offset_bytes));
    co_await file_->read(offset + bytes.size(), piece);
    bytes.insert(bytes.end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(wanted));
  }
  co_return bytes;
}

Task<StoreSurvey::Copy> StoreSurvey::read_copy(unsigned parity, int copy) {
  Copy result;
  try {
    const auto block = co_await read_bytes(
        StoreLayout::superblock_offset(parity, copy, size_bytes_), kSuperblockBytes);
    result.verdict = decode_superblock(block, result.superblock);
    if (is_whole(result.verdict) && parity_of(result.superblock.generation) != parity) {
      // Whole, and not here: a drive put it 64 KiB from where it was told to.
      result.fault = fmt::format("it is generation {}'s, whose place is another",
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
  co_await file_->sync();
  size_bytes_ = file_->size_bytes();
  if (size_bytes_ < 4 * kRegionBytes)
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: {} bytes is less than any store has; nothing of it remains",
                            path(), size_bytes_));
  for (const unsigned parity : {0u, 1u}) {
    for (int copy = 0; copy < kSuperblockCopies; ++copy)
      sides_[parity].copies[copy] = co_await read_copy(parity, copy);
    choose_newest(parity);
  }
  check_identity();
}

/// The newest whole copy of a parity speaks for it. Copies differ after a crash between the two
/// writes, or after damage.
void StoreSurvey::choose_newest(unsigned parity) {
  Side& side = sides_[parity];
  const auto order = [](const Superblock& s) { return std::pair(s.generation, !s.in_progress); };
  for (const Copy& copy : side.copies) {
    if (is_whole(copy.verdict) && (!side.newest || order(copy.superblock) > order(*side.newest)))
      side.newest = copy.superblock;
  }
  for (int i = 0; i < kSuperblockCopies; ++i) {
    const Copy& copy = side.copies[i];
    if (!is_damage(copy.verdict)) continue;
    damaged_ = true;
    notes_.push_back(
        fmt::format("superblock {}, {}: {}; {}", parity_name(parity), copy_name(i),
                    copy.fault.empty() ? to_string(copy.verdict) : copy.fault,
                    side.newest ? fmt::format("{} used", copy_name(1 - i)) : "no whole copy"));
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
  const bool odd = !sides_[0].newest || (sides_[1].newest && sides_[1].newest->generation >
                                                                 sides_[0].newest->generation);
  return *sides_[odd].newest;
}

void StoreSurvey::check_identity() const {
  if (!sides_[0].newest && !sides_[1].newest) {
    for (const Side& side : sides_) {
      for (const Copy& copy : side.copies) {
        if (copy.verdict == SuperblockVerdict::kWrongVersion)
          throw Error(
              ErrorCode::kInvalidArgument,
              fmt::format("{}: store format version {}, this program reads {}; use the version "
                          "of ziggurat that wrote it, or export it there",
                          path(), copy.superblock.version, kStoreFormatVersion));
      }
    }
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: both superblocks are damaged, so no generation can be trusted "
                            "({}). What remains: the records between "
                            "offsets {} and {} are not touched, but which generation each belongs "
                            "to is lost. Restore this file from "
                            "a copy, or start anew with `resume=never`",
                            path(), faults(), 2 * kRegionBytes, size_bytes_ - 2 * kRegionBytes));
  }
  if (sides_[0].newest && sides_[1].newest && sides_[0].newest->uuid != sides_[1].newest->uuid)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "{}: its two superblocks belong to different stores; restore the file from a copy",
            path()));
  const Superblock& s = any_superblock();
  const auto& ranks = environment_.ranks;
  if (s.world_size != static_cast<std::uint32_t>(ranks.world_size()))
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: a store of {} rank{}, opened by {}; run with the world size it was made "
                    "for, or choose another `store` directory",
                    path(), s.world_size, s.world_size == 1 ? "" : "s", ranks.world_size()));
  if (s.stripe_count != environment_.stripe_count)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: one of {} stripe{} of a store, opened with {} director{}; give the "
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

bool StoreSurvey::is_sealed_creation() const noexcept {
  return sides_[0].newest && sides_[0].newest->generation == 0 && !sides_[0].newest->in_progress &&
         !sides_[1].newest;
}

StoreUuid StoreSurvey::uuid() const noexcept { return any_superblock().uuid; }

Task<> StoreSurvey::read_contents() {
  const Superblock& s = any_superblock();
  if (s.file_bytes != size_bytes_)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "{}: {} bytes long, its superblock says {}; the file was cut or extended by something "
            "else. Restore it from a copy, or start anew with `resume=never`",
            path(), size_bytes_, s.file_bytes));
  co_await read_text();
  for (const unsigned parity : {0u, 1u}) co_await read_generation(parity);
  check_not_overwritten();
}

Task<> StoreSurvey::read_text() {
  const Superblock& s = any_superblock();
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
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: both copies of the layout text are damaged ({}). The superblocks "
                            "and records remain, but not where each record begins. Restore the "
                            "file from a copy",
                            path(), faults));
  spec_ = parse_store_text(text_, path());
  layout_ = StoreLayout::of(spec_, text_.size());
  if (layout_.file_bytes != size_bytes_ || layout_.slots != s.slots ||
      spec_.record_bytes.size() != s.chunk_count)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("{}: its layout text does not fit its superblock; restore the file from a copy",
                    path()));
}

/// Table and blob of a sealed superblock. A table that is wrong takes its generation with it:
/// nothing says which bytes are right.
Task<> StoreSurvey::read_generation(unsigned parity) {
  Side& side = sides_[parity];
  if (!side.newest || side.newest->in_progress) co_return;
  const Superblock& s = *side.newest;
  std::string fault;
  try {
    if (s.blob_bytes > spec_.blob_capacity_bytes)
      throw Error(ErrorCode::kDataLoss, "its blob is longer than the room for it");
    const auto table =
        co_await read_bytes(layout_.table_offset[parity], layout_.table_region_bytes);
    auto blob = co_await read_bytes(layout_.blob_offset[parity], s.blob_bytes);
    if (hash64(table, s.generation) != s.table_hash) fault = "its checksum table is damaged";
    if (hash64(blob, s.generation) != s.blob_hash) fault = "its trainer blob is damaged";
    if (fault.empty()) {
      side.whole.emplace();
      side.whole->superblock = s;
      side.whole->table = decode_table(table, spec_.record_bytes.size(), s.generation);
      side.whole->blob = std::move(blob);
      co_return;
    }
  } catch (const Error& error) {
    fault = error.what();
  }
  damaged_ = true;
  notes_.push_back(fmt::format("generation {}: {}; it cannot be used", s.generation, fault));
}

void StoreSurvey::check_not_overwritten() const {
  if (layout_.slots != 1) return;
  for (const Side& side : sides_) {
    if (!side.newest || !side.newest->in_progress) continue;
    const std::uint64_t generation = side.newest->generation;
    if (newest_candidate(generation) == generation) continue;
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: the run was cut off while generation {} was being written over "
                            "generation {}. The store was made with "
                            "`slots=1`, which halves the space and gives up exactly this: a step "
                            "cannot be undone, so neither "
                            "generation is whole. Restore the directory from a copy or a "
                            "checkpoint, or start anew with "
                            "`resume=never` (and `slots=2`, if twice the space can be had)",
                            path(), generation, generation - 1));
  }
}

std::optional<std::uint64_t> StoreSurvey::newest_candidate(std::uint64_t bound) const noexcept {
  std::optional<std::uint64_t> newest;
  for (const Side& side : sides_) {
    if (side.whole && side.whole->superblock.generation <= bound)
      newest = std::max(newest.value_or(0), side.whole->superblock.generation);
  }
  return newest;
}

std::uint64_t StoreSurvey::newest_seen() const noexcept { return any_superblock().generation; }

std::uint64_t StoreSurvey::epoch_seen() const noexcept {
  std::uint64_t epoch = 0;
  for (const Side& side : sides_) {
    for (const Copy& copy : side.copies) {
      if (is_whole(copy.verdict)) epoch = std::max(epoch, copy.superblock.epoch);
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

void StoreSurvey::check_chain(std::uint64_t chosen) const {
  const Superblock& here = generation(chosen).superblock;
  const auto& other = sides_[parity_of(chosen + 1)].newest;
  if (!other || other->in_progress) return;
  const bool broken =
      (other->generation + 1 == chosen && here.previous_hash != superblock_hash(*other)) ||
      (other->generation == chosen + 1 && other->previous_hash != superblock_hash(here));
  if (broken)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "{}: generations {} and {} are not of one history; was the file put together from "
            "two copies? Restore one of them whole",
            path(), here.generation, other->generation));
}

Task<> StoreSurvey::verify_records(std::uint64_t chosen) {
  const Generation& whole = generation(chosen);
  if (layout_.slots == 1 && newest_seen() > chosen)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "{}: the ranks have only generation {} in common, which here was written over by {}: "
            "`slots=1` keeps one. Restore the directory from a copy or a checkpoint, or start "
            "anew with `resume=never`",
            path(), chosen, newest_seen()));
  for (ChunkId chunk = 0; chunk < layout_.record_bytes.size(); ++chunk) {
    const std::uint64_t record_bytes = layout_.record_bytes[chunk];
    const std::uint64_t offset = layout_.record_offset(chunk, chosen);
    RecordHash hash(spec_.record_format, record_bytes);
    for (std::uint64_t done = 0; done < record_bytes;) {
      const auto piece = environment_.fill.first(
          std::min<std::uint64_t>(environment_.fill.size(), record_bytes - done));
      co_await file_->read(offset + done, piece);
      hash.add(done, piece);
      done += piece.size();
    }
    const SlotEntry& entry = whole.table[chunk];
    const ChunkId name = spec_.chunk_name(chunk);
    if (hash.finish(record_seed(whole.superblock.uuid, name, chosen, entry.attempt)) != entry.hash)
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format("{}: falling back to generation {} would need every record of it, and that "
                      "of chunk {} ({} at offset {}) "
                      "has a wrong checksum. Nothing was changed; the newest generation seen here "
                      "is {}. Restore this file from "
                      "a copy, or start anew with `resume=never`",
                      path(), chosen, name, format_bytes(record_bytes), offset, newest_seen()));
  }
}

/// `bytes`, then zeros up to `region_bytes`.
Task<> StoreSurvey::write_region(std::uint64_t offset, std::span<const std::byte> bytes,
                                 std::uint64_t region_bytes) {
  for (std::uint64_t done = 0; done < region_bytes;) {
    const auto piece = environment_.fill.first(
        std::min<std::uint64_t>(environment_.fill.size(), region_bytes - done));
    const auto part = bytes.first(std::min(bytes.size(), piece.size()));
    std::ranges::copy(part, piece.begin());
    std::ranges::fill(piece.subspan(part.size()), std::byte{0});
    co_await file_->write(offset + done, piece);
    bytes = bytes.subspan(part.size());
    done += piece.size();
  }
}

/// What leave_only() must write. Every region of it is one that nobody needs as it is, so the order
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
    return is_whole(copy.verdict) && superblock_hash(copy.superblock) == superblock_hash(wanted);
  };

  const unsigned parity = parity_of(chosen);
  const Superblock& kept = generation(chosen).superblock;
  const Side& other = sides_[1 - parity];
  const bool older_whole = other.whole && other.whole->superblock.generation + 1 == chosen;
  const Superblock* older = older_whole ? &other.whole->superblock : nullptr;
  for (int copy = 0; copy < kSuperblockCopies; ++copy) {
    // A copy that is damaged or one seal behind: one more fault would cost the generation.
    if (!copy_is(sides_[parity].copies[copy], kept)) write_copy(parity, copy, &kept);
    const Copy& found = other.copies[copy];
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
  const auto& other = sides_[parity_of(chosen + 1)].newest;
  if (other && other->generation > chosen)
    notes_.push_back(
        fmt::format("generation {} was not whole on every rank; erased", other->generation));
}

}  // namespace ziggurat
