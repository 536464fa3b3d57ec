// SPDX-License-Identifier: Apache-2.0
// tiers/state_store.h: optimizer records on NVMe, two slots each, so that every finished step is
// durable without extra bytes.
//
// One file per rank and drive: superblocks, tables, blobs, then each record's slots. A step writes
// its records into the slots of its generation's parity, then commit() seals it: fdatasync,
// superblock, fdatasync. Whatever instant the machine dies at, open() finds the newest generation
// that is whole on every rank. ARCHITECTURE.md has the rules and the crash schedule behind each.
// Reactor's thread only. Hashes are computed by the caller (record_hash.h), because it has the
// bytes in cache.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "aio/io_engine.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "tiers/quorum.h"
#include "tiers/record_format.h"

namespace ziggurat {

using ChunkId = std::uint32_t;

/// What a new store is made for. All of it is kept in the store.
struct StoreSpec {
  /// Model, chunk table and formats, canonical JSON; its hash is the layout hash
  std::string layout;
  std::string run_identity;                 ///< what may not change at resume
  std::string numerics_fingerprint;         ///< what is reported when it changes
  std::vector<std::uint64_t> record_bytes;  ///< per chunk; multiples of kTileBytes
  RecordFormat record_format{};             ///< of every record: how it is verified
  /// Stripes only: the number that each chunk of this file has in the whole store, ascending.
  std::vector<ChunkId> chunks{};
  ChunkId chunk_name(ChunkId chunk) const noexcept {
    return chunks.empty() ? chunk : chunks[chunk];
  }
  std::uint32_t slots = 2;
  std::uint64_t blob_capacity_bytes = 64 * 1024;
};

struct StoreEnvironment {
  Reactor& reactor;
  IoEngine& io;
  Quorum& ranks;
  IoObservers observers;
  /// Aligned memory for superblocks, tables and blobs, StateStore::staging_bytes() long, for the
  /// store's lifetime; and fill memory for create() and open() (any size that is a multiple of 1
  /// MiB, at least that), needed only during them.
  std::function<std::span<std::byte>(std::uint64_t size_bytes)> staging;
  std::span<std::byte> fill;
  std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)> progress;
  std::uint32_t stripe_index = 0;  ///< see striped_store.h
  std::uint32_t stripe_count = 1;
};

/// What a superblock says, beside the layout: for reports, and to decide at resume.
struct StoreState {
  std::uint64_t generation = 0;
  std::uint64_t epoch = 0;
  std::uint32_t slots = 2;
  std::string layout;
  std::string run_identity;
  std::string numerics_fingerprint;
  std::vector<std::byte> blob;
  std::vector<std::string> notes;  ///< what recovery found and did: "superblock 1, first copy:
                                   ///< checksum wrong; second copy used", ...
};

class StateStore {
 public:
  /// File name of `rank`'s state inside the directory, and of one under construction.
  static std::string file_name(int rank, std::uint32_t stripe = 0);
  static std::string temporary_name(int rank, std::uint32_t stripe = 0);
  /// A store (finished) of this rank is in `directory`. If any rank says yes, all open(): a
  /// creation that was cut short between two ranks' renames is finished there.
  static bool exists(IoEngine& io, const std::string& directory, int rank);
  static std::uint64_t staging_bytes(const StoreSpec& spec);
  /// Bytes of file that `spec` needs.
  static std::uint64_t file_bytes(const StoreSpec& spec);

  /// Builds a store under a temporary name: space reserved and filled once. It becomes a store, and
  /// replaces an older one of that name, when generation 0 is committed. Errors: kResourceExhausted
  /// (says needed and free bytes), errno's with the path.
  static Task<std::unique_ptr<StateStore>> create(StoreEnvironment environment,
                                                  std::string directory, StoreSpec spec);

  /// Opens the finished store and recovers: the newest generation valid on every rank is agreed,
  /// newer superblocks are erased, a new epoch begins. Falling back to an older generation verifies
  /// every one of its records first. Errors: kInvalidArgument (not there; other rank, world size or
  /// version), kUnavailable (in use), kDataLoss (names what is damaged and what remains).
  static Task<std::unique_ptr<StateStore>> open(StoreEnvironment environment,
                                                std::string directory);

  ~StateStore();

  const StoreState& state() const noexcept;
  std::size_t chunk_count() const noexcept;
  /// The number that `chunk` of this file has in the whole store.
  ChunkId chunk_name(ChunkId chunk) const noexcept;
  std::uint64_t record_bytes(ChunkId chunk) const noexcept;
  std::uint64_t blob_capacity_bytes() const noexcept;
  std::uint64_t durable_generation() const noexcept;
  /// The newest generation known durable on every rank (the engine learns it with the norm's
  /// all-reduce).
  void set_durable_everywhere(std::uint64_t generation) noexcept;
  std::uint64_t durable_everywhere() const noexcept;

  /// Seed of a record's hash when written in `generation`; carries uuid, chunk, generation and
  /// attempt, so it changes with discard().
  std::uint64_t write_seed(ChunkId chunk, std::uint64_t generation) const noexcept;
  /// Seed and expected hash of the record as read() gives it.
  struct Expected {
    std::uint64_t seed;
    std::uint64_t hash;
  };
  Expected expected(ChunkId chunk, std::uint64_t generation) const;

  /// Reads the record of `generation` (the durable one or one written since). The caller verifies
  /// the hash where it has the bytes in cache, and reports a mismatch with corrupt_record().
  /// The first `skipped_bytes` of the record are not wanted, and not read as far as the drive's
  /// alignment allows.
  Task<> read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
              IoPriority priority = IoPriority::kDemand, std::uint64_t skipped_bytes = 0);
  /// Writes into the slot of `generation`'s parity. Checked: the generation before is durable on
  /// every rank, and no other write to this slot is under way.
  Task<> write(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record,
               std::uint64_t hash, IoPriority priority = IoPriority::kDemand);
  /// Gives up what was written of `generation`, writes under way included: it will never verify,
  /// and commit() wants every record written again. The generation before is as it was. Two slots
  /// only.
  void discard(std::uint64_t generation);
  /// The error for a record whose hash is wrong: file, chunk, generation, offset, and what is still
  /// safe. kDataLoss.
  Error corrupt_record(ChunkId chunk, std::uint64_t generation) const;

  /// Every record of `generation` is written: makes it durable with `blob`. `before_seal` runs just
  /// before the superblock is written.
  Task<> commit(std::uint64_t generation, std::span<const std::byte> blob,
                const std::function<void()>& before_seal);

  struct Impl;  ///< state_store_impl.h, private to tiers/

 private:
  explicit StateStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ziggurat
