// SPDX-License-Identifier: Apache-2.0
// tiers/store/state_store_commit.cc: makes a generation durable; the first one makes the file a
// store.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/log.h"
#include "tiers/store/state_store_impl.h"

namespace ziggurat {

Task<> StateStore::commit(std::uint64_t generation, std::span<const std::byte> blob,
                          const std::function<void()>& before_seal) {
  require_writable();
  ZIGGURAT_CHECK(generation == impl_->next_generation && !impl_->committing,
                 "generation {} cannot be sealed, {} is next", generation, impl_->next_generation);
  impl_->carry_constants(generation);
  const SlotTable& table = impl_->tables[parity_of(generation)];
  for (ChunkId chunk = 0; chunk < table.size(); ++chunk) {
    ZIGGURAT_CHECK(table[chunk].complete && table[chunk].generation == generation,
                   "generation {} cannot be sealed: chunk {} holds {} ({})", generation, chunk,
                   table[chunk].generation, table[chunk].complete ? "whole" : "being written");
  }
  if (blob.size() > impl_->spec.blob_capacity_bytes)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the blob has {} bytes, but this store holds at most {} "
                            "(its blob_capacity_bytes was set when it was created)",
                            blob.size(), impl_->spec.blob_capacity_bytes));
  impl_->committing = true;
  impl_->vouching = false;
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
    if (impl_->vouching || impl_->temporary) impl_->broken = error;
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

Task<> StateStore::Impl::write_superblock_copy(unsigned parity, int copy) {
  co_await file->write(StoreLayout::superblock_offset(parity, copy, layout.file_bytes),
                       superblock_memory);
}

/// Both copies, durable.
Task<> StateStore::Impl::write_superblock(const Superblock& superblock) {
  encode_superblock(superblock, superblock_memory);
  for (int copy = 0; copy < kSuperblockCopies; ++copy) {
    co_await write_superblock_copy(parity_of(superblock.generation), copy);
    // With one slot, at least one copy of this superblock must be whole at every instant, so the
    // first is durable before the second is overwritten. If both were torn, only the other
    // superblock would be left, and its generation's records are overwritten. With two slots they
    // still exist.
    if (layout.slots == 1) co_await sync();
  }
  if (layout.slots == 2) co_await sync();
}

/// Syncs the file. A failed sync may have lost anything, so nothing is written after it.
Task<> StateStore::Impl::sync() {
  std::exception_ptr error;
  try {
    co_await file->sync();
  } catch (...) {
    error = broken = std::current_exception();
  }
  if (error) std::rethrow_exception(error);
}

/// Makes the file say that a generation is being overwritten, durably and before any record is.
/// Only for slots = 1.
Task<> StateStore::Impl::mark_in_progress(std::uint64_t generation) {
  if (mark_begun) {
    co_await marked.wait();
    co_return;
  }
  mark_begun = true;
  marked.reset();
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
    mark_begun = false;  // nothing was overwritten yet; unless a sync failed, it may be tried again
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
  copy_bytes(blob, blob_memory);

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
  co_await sync();  // records, table and blob must be durable before the superblock that vouches
                    // for them
  if (before_seal) before_seal();
  seal_begun = true;
  vouching = true;  // until now nothing that is in use was touched
  co_await write_superblock(next);
  newest = next;
}

/// Makes the file a store with its first generation. Two rules make every instant recoverable:
/// - No rank renames before all have sealed. So if any rank has the new name, every other has it
///   too, or has a sealed temporary file of the same uuid, and open() finishes the rename. If none
///   has the new name, all still have what was there before: an older store, whole on every rank,
///   or nothing.
/// - No rank writes generation 1 before all have renamed, durably. So what open() renames is always
///   generation 0, among ranks that are at generation 0 themselves.
Task<> StateStore::Impl::publish(Task<> sealing) {
  Task<> sealed = together(environment.ranks, std::move(sealing), "seal its new store");
  co_await std::move(sealed);
  Task<> naming = take_name();
  Task<> named = together(environment.ranks, std::move(naming), "give its new store its name");
  co_await std::move(named);
  remove_rest_of_replaced();
}

/// Removes the files of the store that was replaced whose ranks this one does not have. All ranks
/// may do so at once. The new store stands whether they go or not: readers know its number of
/// ranks.
void StateStore::Impl::remove_rest_of_replaced() {
  for (const std::string& path : replaced_rest) {
    try {
      environment.io.remove(path);
      environment.io.sync_directory(directory);
    } catch (const Error& error) {
      if (error.native() == ENOENT) continue;  // another rank has removed it
      log().warn("{} is left of the store that was replaced, and no rank uses it: {}; remove it",
                 path, error.what());
    }
  }
  replaced_rest.clear();
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
