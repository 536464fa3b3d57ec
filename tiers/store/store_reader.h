// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_reader.h: lets one process read a whole store, with the files of all its ranks
// and drives, at rest or while its owner runs.
//
// Nothing is written, locked, renamed or agreed on. The owner never notices, and may close and open
// the store meanwhile. If a reshard was cut off after it was decided (store_succession.h), its
// store is read, wherever its files are now. The reader gives the newest generation that is whole
// and of one history by the superblocks, tables and blobs of all files. The owner writes over the
// slots of its records two steps later. So the caller compares each record with expected(), and if
// one is wrong, asks whether it was overtaken(). Reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tiers/pool/host_mapping.h"
#include "tiers/store/state_store.h"
#include "tiers/store/store_succession.h"
#include "tiers/store/striping.h"

namespace ziggurat {

class StoreReader {
 public:
  /// Opens the store in `places`, in whatever order they are given. Errors: kInvalidArgument if
  /// there is none, or a rank's file is missing, naming it; kDataLoss if no generation is common to
  /// all files.
  static Task<std::unique_ptr<StoreReader>> open(Reactor& reactor, std::vector<StripePlace> places);
  ~StoreReader();

  /// Returns whether there is a store in `places`.
  static bool is_there(std::span<const StripePlace> places);
  /// Returns the specification in the first file of `rank`, without looking at other files; none if
  /// that file does not exist. Errors: kDataLoss if the file no longer has one.
  static Task<std::optional<StoreSpec>> spec_of(Reactor& reactor, std::vector<StripePlace> places,
                                                int rank);

  int ranks() const noexcept { return ranks_; }
  /// Returns rank 0's state. Its notes are about all files, with their paths: what is damaged, and
  /// which generation was given up because of it.
  const StoreState& state() const noexcept { return state_; }
  /// Returns the layout in that rank's files. If trainers lend, each rank has its own.
  const std::string& layout(int rank) const noexcept;
  /// Returns the blob that the rank stored with this generation.
  std::span<const std::byte> blob(int rank) const;
  std::size_t chunk_count(int rank) const noexcept;
  std::uint64_t record_bytes(int rank, ChunkId chunk) const;
  /// Returns seed and hash of a record. Chunks are those of the rank's whole store, over all its
  /// drives.
  StateStore::Expected expected(int rank, ChunkId chunk) const;
  /// Reads a record. Errors: the drive's.
  Task<> read(int rank, ChunkId chunk, std::span<std::byte> record) const;
  /// Returns whether the owner has made newer generations since, so that it may have written over
  /// the record that was read and is not expected(). Then the store must be opened again.
  Task<bool> overtaken(int rank, ChunkId chunk) const;
  /// Describes a record for messages: file, chunk, generation and offset.
  std::string record_name(int rank, ChunkId chunk) const;
  /// Makes the error of a record that was not overtaken. kDataLoss.
  Error corrupt_record(int rank, ChunkId chunk) const;

 private:
  struct File;
  struct Home {
    std::size_t file;
    ChunkId chunk;  ///< number of the chunk in the file
  };
  struct FileId {
    int rank;
    std::uint32_t stripe;
    std::uint32_t stripes;
  };
  StoreReader(Reactor& reactor, std::vector<StripePlace> places);
  std::unique_ptr<File> begin_look(FileId id, const StripePlace& place, const std::string& name);
  Task<> find_files();
  Task<> leave_out_strangers();
  const StripePlace* place_with(const std::string& name) const;
  std::string path_in(const StripePlace& place, const std::string& name) const;
  Task<> look_at_all();
  Task<> look(int rank, std::uint32_t stripe);
  Task<bool> owner_went_on() const;
  void choose();
  Error nothing_common() const;
  std::vector<std::string> notes() const;
  void find_homes();
  const Home& home(int rank, ChunkId chunk) const;

  Reactor& reactor_;
  std::vector<StripePlace> places_;
  HostMapping scratch_;
  int ranks_ = 0;
  StoreState state_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<std::vector<Home>> homes_;  // by rank and chunk
  /// The files of a store that is taking the place of another one, and has not finished.
  std::optional<StoreSuccession::Names> decided_;
  std::uint32_t stripes_ = 0;
};

}  // namespace ziggurat
