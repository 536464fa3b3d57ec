// SPDX-License-Identifier: Apache-2.0
// tiers/state_store.h: optimizer records on NVMe, two slots each, so that every finished step is
// durable without extra bytes.
//
// One file per rank and drive: superblocks, tables, blobs, then each record's slots. A step writes
// its records into the slots of its generation's parity, then commit() seals it: fdatasync,
// superblock, fdatasync. Whatever instant the machine dies at, and whatever the drive lost since,
// open() and settle() find the newest generation that is whole on every rank. ARCHITECTURE.md has
// the rules and the crash schedule behind each.
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
#include "tiers/superblock.h"

namespace ziggurat {

using ChunkId = std::uint32_t;

/// What a new store is made for. All of it is kept in the store.
struct StoreSpec {
  /// Model, chunk table and formats, canonical JSON; its hash is the layout hash
  std::string layout;
  std::string run_identity;                 ///< what may not change at resume
  std::string numerics_fingerprint;         ///< what is reported when it changes
  std::vector<std::uint64_t> record_bytes;  ///< per chunk; multiples of kTileBytes
  /// Per chunk; empty: none. A constant record is written once, for generation 0, and is that of
  /// every generation: it has one slot, whatever `slots` says.
  std::vector<bool> constant{};
  RecordFormat record_format{};  ///< of every record: how it is verified
  /// Stripes only: the number that each chunk of this file has in the whole store, ascending.
  std::vector<ChunkId> chunks{};
  ChunkId chunk_name(ChunkId chunk) const noexcept {
    return chunks.empty() ? chunk : chunks[chunk];
  }
  bool is_constant(ChunkId chunk) const noexcept { return !constant.empty() && constant[chunk]; }
  std::uint32_t slots = 2;
  std::uint64_t blob_capacity_bytes = 64 * 1024;
};

struct StoreEnvironment {
  Reactor& reactor;
  IoEngine& io;
  Quorum& ranks;
  IoObservers observers;
  /// Aligned memory for superblocks, tables and blobs, StateStore::staging_bytes() long, for the
  /// store's lifetime; and scratch memory for create() and open() (a multiple of 1 MiB, at least
  /// that), needed only during them.
  std::function<std::span<std::byte>(std::uint64_t size_bytes)> staging;
  std::span<std::byte> scratch;
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
  StoreUuid uuid;
};

/// A record that open()'s caller could not read, or that is not what was written.
struct RecordDamage {
  ChunkId chunk = 0;
  std::string fault;  ///< "wrong checksum", or the read's error
  int native = 0;     ///< errno of a read that failed
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

  /// Builds a store under a temporary name, its space reserved. It becomes a store, and replaces an
  /// older one of that name, when generation 0 is committed. Errors: kResourceExhausted (says
  /// needed and free bytes), errno's with the path.
  static Task<std::unique_ptr<StateStore>> create(StoreEnvironment environment,
                                                  std::string directory, StoreSpec spec);

  /// Opens the finished store at a candidate: the newest generation that superblocks, tables and
  /// blobs of all ranks show whole and of one history. What is missing is the proof of its records:
  /// the caller reads and compares every one, then calls settle(). Until then the file stays as it
  /// is (a creation that was cut off between two ranks' renames is finished, though), and nothing
  /// may be written. Errors: kInvalidArgument (not there; other rank, world size or version),
  /// kUnavailable (in use), kDataLoss (names what is damaged and what remains).
  static Task<std::unique_ptr<StateStore>> open(StoreEnvironment environment,
                                                std::string directory);
  /// The verdict on the candidate, taken by all ranks together. `damaged`: the records here that
  /// cannot be read or do not verify. If no rank has any, the candidate stands: newer superblocks
  /// are erased, a new epoch begins, writing may begin. True.
  /// Else the candidate is given up for the next older generation that is whole everywhere: state()
  /// is that one's from now on. Read and compare all of it, and settle again. False. Nothing is
  /// written before a candidate stands, so a crash anywhere in this leads the same way again.
  /// Errors: kDataLoss if no generation is left: names what is damaged.
  Task<bool> settle(std::vector<RecordDamage> damaged);

  ~StateStore();
  /// Its file was renamed into `directory`, under the same name.
  void moved(const std::string& directory);

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
  /// Throws where write() and commit() would, because of what failed before.
  void require_writable() const;
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
  /// Errors: kDataLoss where the drive cannot read it (EIO and its like, the end of the file), with
  /// the errno and what is still safe; else DirectFile's.
  /// The first `skipped_bytes` of the record are not wanted, and not read as far as the drive's
  /// alignment allows.
  Task<> read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
              IoPriority priority = IoPriority::kDemand, std::uint64_t skipped_bytes = 0);
  /// Writes into the slot of `generation`'s parity. Checked: the generation before is durable on
  /// every rank, and no other write to this slot is under way. After an error the record may be
  /// written again. Errors: DirectFile's; kUnavailable where what is on the drive is not known any
  /// more, since a sync or a superblock failed: nothing is written then, by any call.
  Task<> write(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record,
               std::uint64_t hash, IoPriority priority = IoPriority::kDemand);
  /// Writes a damaged record of the generation that stands anew, durable when it returns. `record`
  /// has the bytes that expected() speaks of. Between settle() and the first write only.
  Task<> repair(ChunkId chunk, std::span<const std::byte> record);
  /// Gives up what was written of `generation`, writes under way included: it will never verify,
  /// and commit() wants every record written again. The generation before is as it was. Two slots
  /// only.
  void discard(std::uint64_t generation);
  /// The error for a record whose hash is wrong: file, chunk, generation, offset, what is still
  /// safe, and how to go on. kDataLoss.
  Error corrupt_record(ChunkId chunk, std::uint64_t generation) const;
  /// For messages: who else has these records ("rank 1"); not called: nobody.
  void set_copies(const std::string& elsewhere);
  /// For messages: file, chunk, generation (the durable one) and offset of a record.
  std::string place_of(ChunkId chunk) const;

  /// Every record of `generation` is written: makes it durable with `blob`. `before_seal` runs just
  /// before the superblock is written. An error before that, unless of a sync, leaves the
  /// generation before as it was: this one may be sealed again, its records written anew or not.
  /// Any other ends all writing.
  Task<> commit(std::uint64_t generation, std::span<const std::byte> blob,
                const std::function<void()>& before_seal);

  struct Impl;  ///< state_store_impl.h, private to tiers/

 private:
  explicit StateStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ziggurat
