// SPDX-License-Identifier: Apache-2.0
// tiers/store/state_store_impl.h: what an open store keeps in memory, for its sources:
// state_store.cc (reads and writes), state_store_commit.cc, state_store_create.cc,
// state_store_open.cc (which file) and store_recovery.cc (which generation). Private to tiers/.
#pragma once

#include <array>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tiers/store/state_store.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/superblock.h"

namespace ziggurat {

class StoreRecovery;

/// What is known of one slot: which record it has, whole or being written.
struct SlotEntry {
  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t hash = 0;
  std::uint64_t attempt = 0;  ///< result of StateStore::Impl::record_attempt() when it was written
  std::uint64_t generation = kNone;
  bool complete = false;
  bool writing = false;  ///< also true for a record that was discarded meanwhile
};
using SlotTable = std::vector<SlotEntry>;

std::uint64_t record_seed(const StoreUuid& uuid, ChunkId chunk, std::uint64_t generation,
                          std::uint64_t attempt) noexcept;

/// Returns a random number from the system's entropy.
std::uint64_t random_u64();

/// Converts a table to the bytes of its region and back; `generation` is that of all its entries.
void encode_table(const SlotTable& table, std::span<std::byte> region);
SlotTable decode_table(std::span<const std::byte> region, std::size_t chunk_count,
                       std::uint64_t generation);

struct StateStore::Impl {
  Impl(StoreEnvironment environment_, std::string directory_);
  ~Impl();

  std::string final_path() const {
    return directory + "/" + file_name(environment.ranks.rank(), environment.stripe_index);
  }
  std::string temporary_path() const {
    return directory + "/" + temporary_name(environment.ranks.rank(), environment.stripe_index);
  }

  /// Takes spec, layout and the staging memory. create() and open() both end with this.
  void adopt(StoreSpec spec, StoreLayout layout);
  /// Describes where `chunk`'s record of `generation` is. what_remains() says what is still safe
  /// although that record is damaged.
  std::string place_of(ChunkId chunk, std::uint64_t generation) const;
  std::string what_remains(ChunkId chunk, std::uint64_t damaged_generation) const;
  std::string what_remains_here(ChunkId chunk, std::uint64_t damaged_generation) const;

  Task<> write_superblock(const Superblock& superblock);
  Task<> sync();
  Task<> write_superblock_copy(unsigned parity, int copy);
  Task<> mark_in_progress(std::uint64_t generation);
  Task<> seal(std::uint64_t generation, std::span<const std::byte> blob,
              const std::function<void()>& before_seal);
  Task<> publish(Task<> sealing);
  Task<> take_name();
  void remove_rest_of_replaced();

  StoreEnvironment environment;
  std::string directory;
  std::shared_ptr<DirectFile> file;
  std::unique_ptr<StoreRecovery> recovery;  ///< set from open() until settle()
  std::unique_ptr<DirectFile> replaced;  ///< the older store, locked until this one takes its name
  /// The files of that store in this directory whose ranks this one does not have.
  std::vector<std::string> replaced_rest;
  bool temporary = false;   ///< not a store yet: generation 0 is not sealed on every rank
  bool seal_begun = false;  ///< from here on another rank may rely on this file

  StoreSpec spec;
  StoreLayout layout;
  StoreState state;
  std::string copies;  ///< StateStore::set_copies()
  /// Drawn each time the store is opened, the same on every rank. The epoch alone is not enough: if
  /// nothing of an epoch was sealed before a crash, the next run has the same number.
  std::uint64_t attempt = 0;
  /// How many attempts at next_generation were discarded. The number enters the seeds of records
  /// only, because superblocks fold `attempt` into the lineage, which all ranks share.
  std::uint64_t discarded = 0;
  std::uint64_t record_attempt(std::uint64_t generation) const noexcept;
  /// Returns the generation in which the chunk's record of `generation` was made; 0 for a constant
  /// one.
  std::uint64_t made_in(ChunkId chunk, std::uint64_t generation) const noexcept {
    return spec.is_constant(chunk) ? 0 : generation;
  }
  void carry_constants(std::uint64_t generation);
  Superblock newest;  ///< as last sealed; until then only the identity fields have a meaning
  std::array<SlotTable, 2> tables;    ///< by parity
  std::uint64_t next_generation = 0;  ///< the one being written; all before it are durable on this
                                      ///< rank
  std::uint64_t durable_everywhere = 0;

  std::span<std::byte> superblock_memory;
  std::span<std::byte> table_memory;
  std::span<std::byte> blob_memory;
  bool committing = false;
  bool vouching = false;  ///< the commit under way has begun to write its superblock
  /// A failed sync, or a failed write of a superblock: nothing may be sealed after it.
  std::exception_ptr broken;

  bool mark_begun = false;  ///< for slots = 1: the in-progress superblock of next_generation was
                            ///< begun
  Signal marked;
};

}  // namespace ziggurat
