// SPDX-License-Identifier: Apache-2.0
// tiers/state_store.cc: the steady state of a store: records in, records out, and the commit that
// makes a generation durable.
#include "tiers/state_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/log.h"
#include "tiers/record_hash.h"
#include "tiers/state_store_impl.h"

namespace ziggurat {

std::uint64_t record_seed(const StoreUuid& uuid, ChunkId chunk, std::uint64_t generation,
                          std::uint64_t attempt) noexcept {
  return mix_seed(mix_seed(mix_seed(uuid.key(), chunk), generation), attempt);
}

void encode_table(const SlotTable& table, std::span<std::byte> region) {
  std::ranges::fill(region, std::byte{0});
  std::size_t offset = 0;
  for (const SlotEntry& entry : table) {
    for (const std::uint64_t value : {entry.hash, entry.attempt}) {
      for (int i = 0; i < 8; ++i) region[offset++] = static_cast<std::byte>(value >> (8 * i));
    }
  }
}

SlotTable decode_table(std::span<const std::byte> region, std::size_t chunk_count,
                       std::uint64_t generation) {
  std::size_t offset = 0;
  const auto load = [&] {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i)
      value |= std::to_integer<std::uint64_t>(region[offset++]) << (8 * i);
    return value;
  };
  SlotTable table(chunk_count);
  for (SlotEntry& entry : table) {
    entry.hash = load();
    entry.attempt = load();
    entry.generation = generation;
    entry.complete = true;
  }
  return table;
}

Task<> together(Quorum& ranks, Task<> mine, const char* what) {
  std::exception_ptr error;
  try {
    co_await std::move(mine);
  } catch (...) {
    error = std::current_exception();
  }
  const std::uint64_t failures = co_await ranks.max(error ? 1 : 0);
  if (error) std::rethrow_exception(error);
  if (failures != 0)
    throw PeerFailed(
        ErrorCode::kUnavailable,
        fmt::format("another rank could not {}, so rank {} stops too; that rank's message says why",
                    what, ranks.rank()));
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
  // A file that never got as far as its seal is of no use to anyone. After that, another rank may
  // already have renamed its own: then this one is needed to finish the rename at the next open.
  if (impl_->temporary && !impl_->seal_begun && impl_->file) {
    try {
      impl_->environment.io.remove(impl_->temporary_path());  // before the lock goes with the file
    } catch (const std::exception& error) {
      log().warn("the unfinished store {} is left behind: {}", impl_->temporary_path(),
                 error.what());
    }
  }
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
  return record_seed(impl_->newest.uuid, chunk_name(chunk), generation,
                     impl_->record_attempt(generation));
}

/// Records of a later generation may already be hashed while next_generation is being sealed.
std::uint64_t StateStore::Impl::record_attempt(std::uint64_t generation) const noexcept {
  return discarded == 0 || generation != next_generation ? attempt : mix_seed(attempt, discarded);
}

StateStore::Expected StateStore::expected(ChunkId chunk, std::uint64_t generation) const {
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  const SlotEntry& entry = impl_->tables[parity_of(generation)][chunk];
  ZIGGURAT_CHECK(entry.complete && entry.generation == generation,
                 "chunk {}: generation {} asked for, the slot holds {} ({})", chunk, generation,
                 entry.generation, entry.complete ? "whole" : "being written");
  if (impl_->layout.slots == 1) {
    const SlotEntry& other = impl_->tables[parity_of(generation + 1)][chunk];
    ZIGGURAT_CHECK(other.generation == SlotEntry::kNone || other.generation < generation,
                   "chunk {}: generation {} asked for, its only slot was given to {}", chunk,
                   generation, other.generation);
  }
  return {record_seed(impl_->newest.uuid, chunk_name(chunk), generation, entry.attempt),
          entry.hash};
}

Task<> StateStore::read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
                        IoPriority priority, std::uint64_t skipped_bytes) {
  expected(chunk, generation);
  ZIGGURAT_CHECK(record.size() == record_bytes(chunk), "chunk {}: {} bytes for a record of {}",
                 chunk, record.size(), record_bytes(chunk));
  ZIGGURAT_CHECK(skipped_bytes < record.size(), "chunk {}: {} bytes skipped of {}", chunk,
                 skipped_bytes, record.size());
  const std::uint64_t begin = skipped_bytes - skipped_bytes % impl_->file->alignment().offset_bytes;
  co_await impl_->file->read(impl_->layout.record_offset(chunk, generation) + begin,
                             record.subspan(begin), priority);
}

Task<> StateStore::write(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record,
                         std::uint64_t hash, IoPriority priority) {
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  ZIGGURAT_CHECK(record.size() == record_bytes(chunk), "chunk {}: {} bytes for a record of {}",
                 chunk, record.size(), record_bytes(chunk));
  ZIGGURAT_CHECK(generation == impl_->next_generation && !impl_->committing,
                 "chunk {}: generation {} may not be written, {} is next{}", chunk, generation,
                 impl_->next_generation, impl_->committing ? " and is being sealed" : "");
  // A rank two ahead would have overwritten the generation that the slowest rank must fall back to.
  ZIGGURAT_CHECK(generation == 0 || impl_->durable_everywhere + 1 == generation,
                 "chunk {}: generation {} may not be written, durable on every rank is only {}",
                 chunk, generation, impl_->durable_everywhere);
  if (impl_->broken) std::rethrow_exception(impl_->broken);
  SlotEntry& entry = impl_->tables[parity_of(generation)][chunk];
  // Of two writes to one slot at a time, either may be the one that stays.
  ZIGGURAT_CHECK(!entry.writing, "chunk {}: written twice at a time", chunk);
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
    entry.generation = SlotEntry::kNone;  // unknown bytes; may be written again
    std::rethrow_exception(error);
  }
  entry.complete = entry.generation == generation;  // not if it was discarded meanwhile
}

void StateStore::discard(std::uint64_t generation) {
  ZIGGURAT_CHECK(generation == impl_->next_generation && !impl_->committing,
                 "generation {} cannot be discarded, {} is next{}", generation,
                 impl_->next_generation, impl_->committing ? " and is being sealed" : "");
  ZIGGURAT_CHECK(impl_->layout.slots == 2,
                 "generation {} cannot be discarded: it was written over the one before",
                 generation);
  for (SlotEntry& entry : impl_->tables[parity_of(generation)]) {
    if (entry.generation != generation) continue;
    entry.generation = SlotEntry::kNone;
    entry.complete = false;
  }
  ++impl_->discarded;
}

Error StateStore::corrupt_record(ChunkId chunk, std::uint64_t generation) const {
  const std::uint64_t offset = impl_->layout.record_offset(chunk, generation);
  const auto& older = impl_->tables[parity_of(generation + 1)];
  const bool older_whole = impl_->layout.slots == 2 && generation > 0 &&
                           std::ranges::all_of(older, [&](const SlotEntry& entry) {
                             return entry.complete && entry.generation == generation - 1;
                           });
  std::string safe = "the other records were not touched";
  if (older_whole) {
    safe = fmt::format(
        "generation {} of every record is still in the other slots, and nothing was overwritten",
        generation - 1);
  } else if (impl_->layout.slots == 1) {
    safe += ", but with `slots=1` there is no older generation to go back to";
  }
  return {ErrorCode::kDataLoss,
          fmt::format("{}: the record of chunk {}, generation {} ({} at offset {}) has a wrong "
                      "checksum: the drive did not return "
                      "what was written. Still safe: {}. Stop, copy the file away, check the drive "
                      "(smartctl, dmesg), then restore "
                      "this file from a copy or start anew with `resume=never`",
                      impl_->file->path(), chunk_name(chunk), generation,
                      format_bytes(record_bytes(chunk)), offset, safe)};
}

Task<> StateStore::commit(std::uint64_t generation, std::span<const std::byte> blob,
                          const std::function<void()>& before_seal) {
  ZIGGURAT_CHECK(generation == impl_->next_generation && !impl_->committing,
                 "generation {} cannot be sealed, {} is next", generation, impl_->next_generation);
  const SlotTable& table = impl_->tables[parity_of(generation)];
  for (ChunkId chunk = 0; chunk < table.size(); ++chunk) {
    ZIGGURAT_CHECK(table[chunk].complete && table[chunk].generation == generation,
                   "generation {} cannot be sealed: chunk {} holds {} ({})", generation, chunk,
                   table[chunk].generation, table[chunk].complete ? "whole" : "being written");
  }
  if (impl_->broken) std::rethrow_exception(impl_->broken);
  if (blob.size() > impl_->spec.blob_capacity_bytes)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("blob: {} bytes, this store holds {} (blob_capacity_bytes when created)",
                    blob.size(), impl_->spec.blob_capacity_bytes));
  impl_->committing = true;
  std::exception_ptr error;
  try {
    Task<> sealing = impl_->seal(generation, blob, before_seal);
    if (impl_->temporary) sealing = impl_->publish(std::move(sealing));
    co_await std::move(sealing);
  } catch (...) {
    error = std::current_exception();
  }
  impl_->committing = false;
  if (error) {
    impl_->broken = error;
    std::rethrow_exception(error);
  }
  impl_->state.generation = generation;
  impl_->state.blob.assign(blob.begin(), blob.end());
  impl_->next_generation = generation + 1;
  impl_->discarded = 0;
  impl_->mark_begun = false;
  impl_->marked.reset();
  if (generation == 0 || impl_->environment.ranks.world_size() == 1)
    impl_->durable_everywhere = generation;
}

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

Task<> StateStore::Impl::write_superblock_copy(unsigned parity, int copy) {
  co_await file->write(StoreLayout::superblock_offset(parity, copy, layout.file_bytes),
                       superblock_memory);
}

/// Both copies, durable.
Task<> StateStore::Impl::write_superblock(const Superblock& superblock) {
  encode_superblock(superblock, superblock_memory);
  for (int copy = 0; copy < kSuperblockCopies; ++copy) {
    co_await write_superblock_copy(parity_of(superblock.generation), copy);
    // With one slot there must never be an instant at which neither an in-progress nor a sealed
    // copy is whole: what would be left is the superblock of the generation whose records are gone.
    // With two slots that generation is still there.
    if (layout.slots == 1) co_await file->sync();
  }
  if (layout.slots == 2) co_await file->sync();
}

/// slots = 1: no record is overwritten before the file says, durably, that it is being overwritten.
Task<> StateStore::Impl::mark_in_progress(std::uint64_t generation) {
  if (mark_begun) {
    co_await marked.wait();
    co_return;
  }
  mark_begun = true;
  Superblock mark = newest;
  mark.generation = generation;
  mark.epoch = state.epoch;
  mark.in_progress = true;
  std::exception_ptr error;
  try {
    co_await write_superblock(mark);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    broken = error;
    marked.fail(error);
    std::rethrow_exception(error);
  }
  marked.set();
}

Task<> StateStore::Impl::seal(std::uint64_t generation, std::span<const std::byte> blob,
                              const std::function<void()>& before_seal) {
  const unsigned parity = parity_of(generation);
  encode_table(tables[parity], table_memory);
  std::ranges::fill(blob_memory, std::byte{0});
  std::ranges::copy(blob, blob_memory.begin());

  Superblock next = newest;
  next.in_progress = false;
  next.previous_hash = generation == 0 ? 0 : superblock_hash(newest);
  next.lineage =
      extend_lineage(generation == 0 ? newest.uuid.key() : newest.lineage, generation, attempt);
  next.generation = generation;
  next.optimizer_step = generation;
  next.epoch = state.epoch;
  next.table_offset_bytes = layout.table_offset[parity];
  next.table_hash = hash64(table_memory, generation);
  next.blob_offset_bytes = layout.blob_offset[parity];
  next.blob_bytes = blob.size();
  next.blob_hash = hash64(blob, generation);

  co_await file->write(next.table_offset_bytes, table_memory);
  const std::uint64_t blob_io_bytes = round_up(blob.size(), superblock_memory.size());
  if (blob_io_bytes > 0)
    co_await file->write(next.blob_offset_bytes, blob_memory.first(blob_io_bytes));
  co_await file->sync();  // records, table and blob before the superblock that vouches for them
  if (before_seal) before_seal();
  seal_begun = true;
  co_await write_superblock(next);
  newest = next;
}

/// The first generation makes the file a store. Two rules make every instant of it recoverable:
///  - No rank renames before all have sealed. So if any rank has the new name, every other has it
///  too or a sealed temporary file
///    of the same uuid, and open() finishes the rename. If none has, all still have what was there
///    before: an older store, whole on every rank, or nothing.
///  - No rank writes generation 1 before all have renamed, durably. So what open() renames is
///  always generation 0 among ranks
///    that are at generation 0 themselves.
Task<> StateStore::Impl::publish(Task<> sealing) {
  Task<> sealed = together(environment.ranks, std::move(sealing), "seal its new store");
  co_await std::move(sealed);
  Task<> naming = take_name();
  Task<> named = together(environment.ranks, std::move(naming), "give its new store its name");
  co_await std::move(named);
}

Task<> StateStore::Impl::take_name() {
  environment.io.rename(temporary_path(), final_path());
  environment.io.sync_directory(directory);
  file->set_path(final_path());
  temporary = false;
  replaced.reset();
  co_return;
}

}  // namespace ziggurat
