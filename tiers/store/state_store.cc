// SPDX-License-Identifier: Apache-2.0
// tiers/store/state_store.cc: reads and writes records of a store, and says what is left when one
// of them is damaged. The end of a generation is in state_store_commit.cc.
#include "tiers/store/state_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/log.h"
#include "tiers/store/record_hash.h"
#include "tiers/store/state_store_impl.h"
#include "tiers/store/store_recovery.h"

namespace ziggurat {
namespace {

/// Returns whether the error means that the drive cannot give back what was written to that place.
bool is_damage(const Error& error) {
  constexpr std::array kErrnos{EIO, EILSEQ, EBADMSG, ENODATA, EREMOTEIO};
  return error.code() == ErrorCode::kDataLoss ||
         std::ranges::find(kErrnos, error.native()) != kErrnos.end();
}

}  // namespace

StateStore::Impl::Impl(StoreEnvironment environment_, std::string directory_)
    : environment(std::move(environment_)),
      directory(std::move(directory_)),
      marked(environment.reactor) {}

StateStore::Impl::~Impl() = default;

void StateStore::Impl::adopt(StoreSpec spec_, StoreLayout layout_) {
  spec = std::move(spec_);
  layout = std::move(layout_);
  state.slots = spec.slots;
  state.layout = spec.layout;
  state.run_identity = spec.run_identity;
  state.numerics_fingerprint = spec.numerics_fingerprint;
  for (SlotTable& table : tables) table.resize(spec.record_bytes.size());
  const std::span<std::byte> memory = environment.staging(staging_bytes(spec));
  ZIGGURAT_CHECK(memory.size() >= staging_bytes(spec), "staging memory: {} bytes of {}",
                 memory.size(), staging_bytes(spec));
  superblock_memory = memory.first(round_up(kSuperblockBytes, file->alignment().offset_bytes));
  table_memory = memory.subspan(kRegionBytes, layout.table_region_bytes);
  blob_memory = memory.subspan(kRegionBytes + layout.table_region_bytes, layout.blob_region_bytes);
  std::ranges::fill(memory, std::byte{0});
}

std::string StateStore::file_name(int rank, std::uint32_t stripe) {
  if (stripe == 0) return fmt::format("rank{:05}.ziggurat", rank);
  return fmt::format("rank{:05}-stripe{:02}.ziggurat", rank, stripe);
}
std::string StateStore::temporary_name(int rank, std::uint32_t stripe) {
  return file_name(rank, stripe) + ".new";
}

bool StateStore::exists(IoEngine& io, const std::string& directory, int rank) {
  return io.exists(directory + "/" + file_name(rank));
}

std::uint64_t StateStore::file_bytes(const StoreSpec& spec) {
  return StoreLayout::of(spec, store_text(spec).size()).file_bytes;
}

std::uint64_t StateStore::staging_bytes(const StoreSpec& spec) {
  const StoreLayout layout = StoreLayout::of(spec, 0);
  return kRegionBytes + layout.table_region_bytes + layout.blob_region_bytes;
}

StateStore::StateStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StateStore::~StateStore() {
  // A file that was never sealed is of no use to anyone, so it is removed. Once the seal has begun,
  // another rank may already have renamed its own file, and this one is needed to finish the rename
  // at the next open.
  if (impl_->temporary && !impl_->seal_begun && impl_->file) {
    try {
      impl_->environment.io.remove(impl_->temporary_path());  // before the lock is released with
                                                              // the file
    } catch (const std::exception& error) {
      const auto* const its = dynamic_cast<const Error*>(&error);
      if (its != nullptr && its->native() == ENOENT) return;  // somebody has removed it already
      log().warn("the unfinished store {} is left behind: {}", impl_->temporary_path(),
                 error.what());
    }
  }
}

void StateStore::moved(const std::string& directory) {
  impl_->directory = directory;
  impl_->file->set_path(impl_->final_path());
}

const StoreState& StateStore::state() const noexcept { return impl_->state; }
std::size_t StateStore::chunk_count() const noexcept { return impl_->layout.record_bytes.size(); }
ChunkId StateStore::chunk_name(ChunkId chunk) const noexcept {
  return impl_->spec.chunk_name(chunk);
}
std::uint64_t StateStore::record_bytes(ChunkId chunk) const noexcept {
  return impl_->layout.record_bytes[chunk];
}
std::uint64_t StateStore::blob_capacity_bytes() const noexcept {
  return impl_->spec.blob_capacity_bytes;
}
std::uint64_t StateStore::durable_generation() const noexcept { return impl_->state.generation; }
std::uint64_t StateStore::durable_everywhere() const noexcept { return impl_->durable_everywhere; }

void StateStore::set_durable_everywhere(std::uint64_t generation) noexcept {
  ZIGGURAT_CHECK(generation <= durable_generation(),
                 "generation {} cannot be durable on every rank: here it is {}", generation,
                 durable_generation());
  impl_->durable_everywhere = std::max(impl_->durable_everywhere, generation);
}

std::uint64_t StateStore::write_seed(ChunkId chunk, std::uint64_t generation) const noexcept {
  return record_seed(impl_->newest.uuid, chunk_name(chunk), impl_->made_in(chunk, generation),
                     impl_->record_attempt(generation));
}

/// Returns the attempt number for a record of `generation`. Discarded attempts count only for
/// next_generation, because records of a later generation may be hashed while it is being sealed.
std::uint64_t StateStore::Impl::record_attempt(std::uint64_t generation) const noexcept {
  return discarded == 0 || generation != next_generation ? attempt : mix_seed(attempt, discarded);
}

StateStore::Expected StateStore::expected(ChunkId chunk, std::uint64_t generation) const {
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  const SlotEntry& entry = impl_->tables[parity_of(generation)][chunk];
  ZIGGURAT_CHECK(entry.complete && entry.generation == generation,
                 "chunk {}: generation {} asked for, the slot holds {} ({})", chunk, generation,
                 entry.generation, entry.complete ? "whole" : "being written");
  // A constant record is never overwritten, although the generation being sealed has it as its own.
  if (impl_->layout.slots == 1 && !impl_->spec.is_constant(chunk)) {
    const SlotEntry& other = impl_->tables[parity_of(generation + 1)][chunk];
    ZIGGURAT_CHECK(other.generation == SlotEntry::kNone || other.generation < generation,
                   "chunk {}: generation {} was asked for, but its only slot was given to {}",
                   chunk, generation, other.generation);
  }
  const std::uint64_t made_in = impl_->made_in(chunk, generation);
  return {record_seed(impl_->newest.uuid, chunk_name(chunk), made_in, entry.attempt), entry.hash};
}

/// Makes the constant records of the previous generation belong to `generation` too.
void StateStore::Impl::carry_constants(std::uint64_t generation) {
  if (generation == 0) return;
  for (ChunkId chunk = 0; chunk < spec.constant.size(); ++chunk) {
    if (!spec.constant[chunk]) continue;
    SlotEntry& entry = tables[parity_of(generation)][chunk];
    entry = tables[parity_of(generation - 1)][chunk];
    entry.generation = generation;
  }
}

Task<> StateStore::read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
                        IoPriority priority, std::uint64_t skipped_bytes) {
  expected(chunk, generation);
  ZIGGURAT_CHECK(record.size() == record_bytes(chunk), "chunk {}: {} bytes for a record of {}",
                 chunk, record.size(), record_bytes(chunk));
  ZIGGURAT_CHECK(skipped_bytes < record.size(), "chunk {}: {} bytes skipped of {}", chunk,
                 skipped_bytes, record.size());
  const std::uint64_t begin = skipped_bytes - skipped_bytes % impl_->file->alignment().offset_bytes;
  try {
    co_await impl_->file->read(impl_->layout.record_offset(chunk, generation) + begin,
                               record.subspan(begin), priority);
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    // In a recovery, settle() judges the candidate as a whole.
    if (impl_->recovery) throw Error(ErrorCode::kDataLoss, error.what(), error.native());
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} cannot be read: {}. {}", impl_->place_of(chunk, generation),
                            error.what(), impl_->what_remains(chunk, generation)),
                error.native());
  }
}

Task<> StateStore::write(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record,
                         std::uint64_t hash, IoPriority priority) {
  require_writable();
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  ZIGGURAT_CHECK(record.size() == record_bytes(chunk), "chunk {}: {} bytes for a record of {}",
                 chunk, record.size(), record_bytes(chunk));
  ZIGGURAT_CHECK(generation == impl_->next_generation && !impl_->committing,
                 "chunk {}: generation {} may not be written, {} is next{}", chunk, generation,
                 impl_->next_generation, impl_->committing ? " and is being sealed" : "");
  ZIGGURAT_CHECK(generation == 0 || !impl_->spec.is_constant(chunk),
                 "chunk {} is constant, and generation {} of it is written", chunk, generation);
  ZIGGURAT_CHECK(!impl_->recovery, "chunk {}: generation {} is written before settle()", chunk,
                 generation);
  // A rank that is two ahead would have overwritten the generation to which the slowest rank must
  // fall back.
  ZIGGURAT_CHECK(
      generation == 0 || impl_->durable_everywhere + 1 == generation,
      "chunk {}: generation {} may not be written, because only {} is durable on every rank", chunk,
      generation, impl_->durable_everywhere);
  SlotEntry& entry = impl_->tables[parity_of(generation)][chunk];
  // If two writes to one slot are under way at the same time, either may be the one that stays.
  ZIGGURAT_CHECK(!entry.writing,
                 "chunk {}: a second write of it was begun before the first had ended", chunk);
  entry = {.hash = hash,
           .attempt = impl_->record_attempt(generation),
           .generation = generation,
           .complete = false,
           .writing = true};

  std::exception_ptr error;
  try {
    if (impl_->layout.slots == 1 && generation > 0) co_await impl_->mark_in_progress(generation);
    co_await impl_->file->write(impl_->layout.record_offset(chunk, generation), record, priority);
  } catch (...) {
    error = std::current_exception();
  }
  entry.writing = false;
  if (error) {
    entry.generation = SlotEntry::kNone;  // its bytes are unknown; it may be written again
    std::rethrow_exception(error);
  }
  entry.complete = entry.generation == generation;  // not if it was discarded meanwhile
}

/// Throws if a write or sync has failed before. The first error says what failed; this one says
/// what that means.
void StateStore::require_writable() const {
  if (!impl_->broken) return;
  std::string why;
  try {
    std::rethrow_exception(impl_->broken);
  } catch (const PeerFailed&) {
    throw;
  } catch (const std::exception& error) {
    why = error.what();
  }
  throw Error(
      ErrorCode::kUnavailable,
      fmt::format(
          "{}: nothing is written to this store any more, because this process does not know "
          "what its drive has kept: {}. Generation {} is durable. Close the engine, "
          "check the drive (smartctl, dmesg), and open the store again",
          impl_->file->path(), why, durable_generation()));
}

Task<> StateStore::repair(ChunkId chunk, std::span<const std::byte> record) {
  const std::uint64_t generation = durable_generation();
  expected(chunk, generation);
  ZIGGURAT_CHECK(record.size() == record_bytes(chunk), "chunk {}: {} bytes for a record of {}",
                 chunk, record.size(), record_bytes(chunk));
  const auto is_next = [this](const SlotEntry& entry) {
    return entry.writing || entry.generation == impl_->next_generation;
  };
  ZIGGURAT_CHECK(!impl_->recovery && !impl_->mark_begun &&
                     std::ranges::none_of(impl_->tables[parity_of(generation + 1)], is_next),
                 "chunk {}: generation {} is repaired before settle() or after a write", chunk,
                 generation);
  std::exception_ptr error;
  try {
    co_await impl_->file->write(impl_->layout.record_offset(chunk, generation), record);
    co_await impl_->file->sync();
  } catch (...) {
    error = impl_->broken = std::current_exception();
  }
  if (error) std::rethrow_exception(error);
}

void StateStore::discard(std::uint64_t generation) {
  ZIGGURAT_CHECK(generation == impl_->next_generation && !impl_->committing,
                 "generation {} cannot be discarded, {} is next{}", generation,
                 impl_->next_generation, impl_->committing ? " and is being sealed" : "");
  ZIGGURAT_CHECK(impl_->layout.slots == 2,
                 "generation {} cannot be discarded: it was written over the previous one",
                 generation);
  for (SlotEntry& entry : impl_->tables[parity_of(generation)]) {
    if (entry.generation != generation) continue;
    entry.generation = SlotEntry::kNone;
    entry.complete = false;
  }
  ++impl_->discarded;
}

std::string StateStore::Impl::place_of(ChunkId chunk, std::uint64_t generation) const {
  return fmt::format("{}: the record of chunk {}, generation {} ({} at offset {})", file->path(),
                     spec.chunk_name(chunk), generation, format_bytes(layout.record_bytes[chunk]),
                     layout.record_offset(chunk, generation));
}

std::string StateStore::Impl::what_remains(ChunkId chunk, std::uint64_t damaged_generation) const {
  const std::string here = what_remains_here(chunk, damaged_generation);
  if (copies.empty()) return here;
  return fmt::format(
      "A copy of this record is on {}. Check the drive (smartctl, dmesg) and start again; then the "
      "record is repaired from that copy. If that copy is damaged too: {}",
      copies, here);
}

/// Describes what this process knows of the older generation: that it has not written to its slots.
/// What an earlier run did to them is found out when they are read.
std::string StateStore::Impl::what_remains_here(ChunkId chunk,
                                                std::uint64_t damaged_generation) const {
  constexpr const char* kAnew =
      "Restore the store from a copy or a checkpoint, or start from the beginning with "
      "`resume=never`";
  if (layout.slots == 1)
    return fmt::format(
        "The other records were not touched, but with `slots=1` the store has no older "
        "generation. {}",
        kAnew);
  if (spec.is_constant(chunk))
    return fmt::format(
        "The other records were not touched, but this one is frozen and belongs to every "
        "generation. {}",
        kAnew);
  const SlotTable& older = tables[parity_of(damaged_generation + 1)];
  const auto whole = std::ranges::count_if(older, [&](const SlotEntry& entry) {
    return entry.complete && entry.generation + 1 == damaged_generation;
  });
  if (damaged_generation > 0 && whole == std::ssize(older))
    return fmt::format(
        "Generation {} is still safe: every record of it is in the other slots, and this "
        "run has not overwritten any of them. Check the drive (smartctl, dmesg) and start "
        "again: training goes on from generation {}, once all of it has been verified",
        damaged_generation - 1, damaged_generation - 1);
  if (whole > 0)
    return fmt::format(
        "Only {} of {} records of generation {} are left, because the others were "
        "overwritten by generation {}, so this file has no whole generation. Check the "
        "drive (smartctl, dmesg). {}",
        whole, older.size(), damaged_generation - 1, damaged_generation + 1, kAnew);
  return fmt::format(
      "The other records were not touched, but this file has no whole older generation. Check the "
      "drive "
      "(smartctl, dmesg). {}",
      kAnew);
}

void StateStore::set_copies(const std::string& elsewhere) { impl_->copies = elsewhere; }

std::string StateStore::place_of(ChunkId chunk) const {
  return impl_->place_of(chunk, durable_generation());
}

Error StateStore::corrupt_record(ChunkId chunk, std::uint64_t generation) const {
  return {ErrorCode::kDataLoss,
          fmt::format("{} has a wrong checksum, so the drive did not return what was written. {}",
                      impl_->place_of(chunk, generation), impl_->what_remains(chunk, generation))};
}

Task<bool> StateStore::settle(std::vector<RecordDamage> damaged) {
  ZIGGURAT_CHECK(impl_->recovery, "{}: settled already", impl_->file->path());
  Task<bool> settling = impl_->recovery->settle(std::move(damaged));
  const bool stands = co_await std::move(settling);
  if (stands) impl_->recovery.reset();
  co_return stands;
}

}  // namespace ziggurat
