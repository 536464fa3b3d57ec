// SPDX-License-Identifier: Apache-2.0
// tiers/store/state_store.h: optimizer records on NVMe, with two slots each, so that every finished
// step is durable without extra bytes.
//
// There is one file per rank and drive: superblocks, tables, blobs, then each record's slots. A
// step writes its records into the slots of its generation's parity. Then commit() seals the
// generation: fdatasync, superblock, fdatasync. At whatever instant the machine dies, and whatever
// the drive has lost since, open() and settle() find the newest generation that is whole on every
// rank. ARCHITECTURE.md has the rules, and the crash that each rule is for. Reactor's thread only.
// Callers compute the hashes (record_hash.h), because they have the bytes in cache.
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
#include "tiers/store/quorum.h"
#include "tiers/store/record_format.h"
#include "tiers/store/superblock.h"

namespace ziggurat {

using ChunkId = std::uint32_t;

/// What a new store is made for. All of it is kept in the store.
struct StoreSpec {
  /// Model, chunk table and formats as canonical JSON; its hash is the layout hash.
  std::string layout;
  std::string run_identity;                 ///< what may not change at resume
  std::string numerics_fingerprint;         ///< what is reported when it changes
  std::vector<std::uint64_t> record_bytes;  ///< per chunk; multiples of kTileBytes
  /// Per chunk; empty if no chunk is constant. A constant record is written once, for generation 0,
  /// and belongs to every generation. It has one slot, whatever `slots` says.
  std::vector<bool> constant{};
  RecordFormat record_format{};  ///< the segments of a record, unless the layout has others for it
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
  /// Returns aligned memory of StateStore::staging_bytes() for superblocks, tables and blobs, which
  /// the store uses as long as it lives. `scratch` is aligned memory that only create() and open()
  /// use: a multiple of 1 MiB, and at least that.
  std::function<std::span<std::byte>(std::uint64_t size_bytes)> staging;
  std::span<std::byte> scratch;
  std::uint32_t stripe_index = 0;  ///< see striped_store.h
  std::uint32_t stripe_count = 1;
};

/// What a superblock and the layout say, for reports and for decisions at resume.
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

/// A record that open()'s caller could not read, or whose bytes are not those that were written.
struct RecordDamage {
  ChunkId chunk = 0;
  std::string fault;  ///< "wrong checksum", or the error of the read
  int native = 0;     ///< errno of a read that failed
};

class StateStore {
 public:
  /// Returns the name of the file with `rank`'s state in the directory, or of one under
  /// construction.
  static std::string file_name(int rank, std::uint32_t stripe = 0);
  static std::string temporary_name(int rank, std::uint32_t stripe = 0);
  /// Returns whether `directory` has a finished store of this rank. If this is true on any rank,
  /// all ranks call open(), which finishes a creation that was cut off between two ranks' renames.
  static bool exists(IoEngine& io, const std::string& directory, int rank);
  static std::uint64_t staging_bytes(const StoreSpec& spec);
  /// Returns how many bytes of file `spec` needs.
  static std::uint64_t file_bytes(const StoreSpec& spec);

  /// Builds a store under a temporary name, with its space reserved. It becomes a store, and
  /// replaces an older one of that name, when generation 0 is committed. Errors: kResourceExhausted
  /// (with the needed and the free bytes), errno's with the path.
  static Task<std::unique_ptr<StateStore>> create(StoreEnvironment environment,
                                                  std::string directory, StoreSpec spec);

  /// Opens the finished store at a candidate: the newest generation that is whole and of one
  /// history by the superblocks, tables and blobs of all ranks. Only its records are not checked
  /// yet: the caller reads and compares every one, then calls settle(). Until then nothing may be
  /// written, and the file does not change, except that a creation that was cut off between two
  /// ranks' renames is finished. Errors: kInvalidArgument (missing; other rank, world size or
  /// version), kUnavailable (in use), kDataLoss (naming what is damaged and what is left).
  static Task<std::unique_ptr<StateStore>> open(StoreEnvironment environment,
                                                std::string directory);
  /// Decides on the candidate, together with all ranks. `damaged` has the records of this rank that
  /// cannot be read or verified. If no rank has any, the candidate is accepted: newer superblocks
  /// are erased, a new epoch begins, and writing may begin. Returns true. Otherwise all ranks fall
  /// back to the next older generation that is whole everywhere, and state() is now that one's.
  /// Returns false: read and compare all of it, and call settle() again. Nothing is written before
  /// a candidate is accepted, so a recovery after a crash in between takes the same way. Errors:
  /// kDataLoss, naming what is damaged, if no generation is left.
  Task<bool> settle(std::vector<RecordDamage> damaged);

  ~StateStore();
  /// Tells the store that its file was renamed into `directory`, under the same name.
  void moved(const std::string& directory);

  const StoreState& state() const noexcept;
  std::size_t chunk_count() const noexcept;
  /// Returns the number that `chunk` of this file has in the whole store.
  ChunkId chunk_name(ChunkId chunk) const noexcept;
  std::uint64_t record_bytes(ChunkId chunk) const noexcept;
  std::uint64_t blob_capacity_bytes() const noexcept;
  std::uint64_t durable_generation() const noexcept;
  /// Sets the newest generation that is known to be durable on every rank (the engine learns it
  /// with the norm's all-reduce).
  void set_durable_everywhere(std::uint64_t generation) noexcept;
  /// Throws if write() and commit() would throw because of an earlier failure.
  void require_writable() const;
  std::uint64_t durable_everywhere() const noexcept;

  /// Returns the seed of a record's hash if it is written in `generation`. It contains uuid, chunk,
  /// generation and attempt, so it changes with discard().
  std::uint64_t write_seed(ChunkId chunk, std::uint64_t generation) const noexcept;
  /// The seed and the expected hash of a record as read() gives it.
  struct Expected {
    std::uint64_t seed;
    std::uint64_t hash;
  };
  Expected expected(ChunkId chunk, std::uint64_t generation) const;

  /// Reads the record of `generation` (the durable one or one written since). The caller verifies
  /// the hash while it has the bytes in cache, and reports a mismatch with corrupt_record(). The
  /// first `skipped_bytes` of the record are not needed, and not read as far as the drive's
  /// alignment allows. Errors: kDataLoss if the drive cannot read it (EIO and similar, the end of
  /// the file), with the errno and what is still safe; otherwise DirectFile's.
  Task<> read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
              IoPriority priority = IoPriority::kDemand, std::uint64_t skipped_bytes = 0);
  /// Writes into the slot of `generation`'s parity. Checks that the previous generation is durable
  /// on every rank, and that no other write to this slot is under way. After an error the record
  /// may be written again. Errors: DirectFile's; kUnavailable if an earlier sync or superblock
  /// write has failed, so that it is not known what the drive has kept: then no call writes
  /// anything.
  Task<> write(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record,
               std::uint64_t hash, IoPriority priority = IoPriority::kDemand);
  /// Writes a damaged record of the accepted generation again; it is durable when this returns.
  /// `record` has the bytes that expected() describes. Only between settle() and the first write.
  Task<> repair(ChunkId chunk, std::span<const std::byte> record);
  /// Gives up all records written for `generation`, including writes under way: they will never
  /// verify, and commit() needs every record to be written again. The generation before does not
  /// change. For two slots only.
  void discard(std::uint64_t generation);
  /// Makes the error for a record whose hash is wrong: file, chunk, generation, offset, what is
  /// still safe, and how to continue. kDataLoss.
  Error corrupt_record(ChunkId chunk, std::uint64_t generation) const;
  /// Sets who else has these records ("rank 1"), for messages. If it is never called, nobody has.
  void set_copies(const std::string& elsewhere);
  /// Describes a record for messages: file, chunk, generation (the durable one) and offset.
  std::string place_of(ChunkId chunk) const;

  /// Makes `generation` durable, with `blob`, after every record of it was written. `before_seal`
  /// runs just before the superblock is written. If an error comes until then and is not a sync's,
  /// the durable generation stays as it was, and `generation` may be committed again, with or
  /// without writing its records again. Any other error, and any error in a store's first
  /// generation, ends all writing.
  Task<> commit(std::uint64_t generation, std::span<const std::byte> blob,
                const std::function<void()>& before_seal);

  struct Impl;  ///< state_store_impl.h, private to tiers/

 private:
  explicit StateStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ziggurat
