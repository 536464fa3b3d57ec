// SPDX-License-Identifier: Apache-2.0
// tiers/store_reader.h: a whole store, the files of all its ranks and drives, read by one process,
// at rest or while its owner goes on.
//
// Nothing is written, locked, renamed or agreed on: the owner never notices, and may close and open
// the store meanwhile. Where a reshard was cut off after it was decided (store_succession.h), its
// store is read, wherever its files are by now. What is read is the newest generation that
// superblocks, tables and blobs of all files show whole and of one history; its records lie in
// slots that the owner writes over two steps later, so whoever reads compares each with expected(),
// and where one is wrong asks whether it was overtaken(). Reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tiers/host_mapping.h"
#include "tiers/state_store.h"
#include "tiers/store_succession.h"
#include "tiers/striping.h"

namespace ziggurat {

class StoreReader {
 public:
  /// The store in `places`, in whatever order they are given. Errors: kInvalidArgument where there
  /// is none, or a rank's file is missing, naming it; kDataLoss where no generation is common to
  /// all files.
  static Task<std::unique_ptr<StoreReader>> open(Reactor& reactor, std::vector<StripePlace> places);
  ~StoreReader();

  /// There is a store in `places`.
  static bool is_there(std::span<const StripePlace> places);
  /// What the first file of `rank` says of the store, whatever the others do; none where the file
  /// is not there. Errors: kDataLoss where it no longer says anything.
  static Task<std::optional<StoreSpec>> spec_of(Reactor& reactor, std::vector<StripePlace> places,
                                                int rank);

  int ranks() const noexcept { return ranks_; }
  /// Rank 0's; its notes are of all files, by their paths: what is damaged, and which generation
  /// was given up for it.
  const StoreState& state() const noexcept { return state_; }
  /// In that rank's files: where trainers lend, each has a layout of its own.
  const std::string& layout(int rank) const noexcept;
  std::size_t chunk_count(int rank) const noexcept;
  std::uint64_t record_bytes(int rank, ChunkId chunk) const;
  /// Chunks are those of the rank's whole store, over all its drives.
  StateStore::Expected expected(int rank, ChunkId chunk) const;
  /// Errors: the drive's.
  Task<> read(int rank, ChunkId chunk, std::span<std::byte> record) const;
  /// The record that was read is not expected(): the owner has made newer generations since, and
  /// may have written over it. Then the store is to be opened anew.
  Task<bool> overtaken(int rank, ChunkId chunk) const;
  /// For messages: the file, chunk, generation and place.
  std::string record_name(int rank, ChunkId chunk) const;
  /// For a record that was not overtaken. kDataLoss.
  Error corrupt_record(int rank, ChunkId chunk) const;

 private:
  struct File;
  struct Home {
    std::size_t file;
    ChunkId chunk;  ///< its number in the file
  };
  struct FileId {
    int rank;
    std::uint32_t stripe;
    std::uint32_t stripes;
  };
  StoreReader(Reactor& reactor, std::vector<StripePlace> places);
  std::unique_ptr<File> begin_look(FileId id, const StripePlace& place, const std::string& name);
  Task<> find_files();
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
  /// The files of a store that takes another's place, and has not done so in all its parts.
  std::optional<StoreSuccession::Names> decided_;
  std::uint32_t stripes_ = 0;
};

}  // namespace ziggurat
