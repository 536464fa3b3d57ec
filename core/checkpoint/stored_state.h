// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/stored_state.h: a store of any number of ranks as a source of state, at rest or
// while its owner trains on. Whoever reshards, exports or inspects it needs neither its ranks nor a
// model. Reactor's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/runtime/worker_pool.h"
#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/proven_bytes.h"
#include "core/checkpoint/state_source.h"
#include "tiers/store/store_reader.h"

namespace ziggurat {

class StoredState final : public StateSource {
 public:
  /// Most bytes of records that are kept, in case the next chunk needs the rest of them.
  static constexpr std::uint64_t kKeptBytesMax = std::uint64_t{64} << 20;

  /// Opens a store. Errors: those of StoreReader; kDataLoss for an impossible layout.
  static Task<std::unique_ptr<StoredState>> open(Reactor& reactor, Workers& workers,
                                                 std::vector<StripePlace> places);

  const StateContent& content() const noexcept override { return content_; }
  /// Has the errors of StateSource::read() and kUnavailable if the store's owner has overwritten
  /// what is read: open the store again then.
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override;
  std::string place() const override { return place_; }

  /// What is damaged but was not needed, and which newer generation was given up because of damage.
  const std::vector<std::string>& notes() const noexcept { return reader_->state().notes; }
  /// How the store is divided, as ChunkTable::from_layout() wants it.
  const std::string& layout() const noexcept { return reader_->state().layout; }
  /// Returns true if the store's trainer lends its parameters. Each rank then has pieces of its
  /// own, of any shapes, which JoinedState puts together if the layouts say how. content() has the
  /// pieces of all ranks as tensors; a piece with the name of another rank's piece is called
  /// "rank1/NAME".
  bool of_pieces() const noexcept { return of_pieces_; }
  /// Return what a rank of a store of pieces has: its layout, its table, the number of its first
  /// tensor in content(), and its trainer's blob.
  const std::string& layout(int rank) const { return reader_->layout(rank); }
  const ChunkTable& table(int rank) const { return tables_[static_cast<std::size_t>(rank)]; }
  std::size_t first_tensor(int rank) const {
    return first_tensors_[static_cast<std::size_t>(rank)];
  }
  /// Errors: kDataLoss for a blob that no engine has written.
  std::span<const std::byte> blob(int rank) const;
  /// Refuses `what` for a store of pieces. Errors: kInvalidArgument, saying that only the store's
  /// trainer can do it.
  void require_whole(const char* what) const;
  /// Number of slots that its records have.
  std::uint32_t slots() const noexcept { return reader_->state().slots; }
  /// Returns the table of the same state on one rank, in chunks of at most `chunk_tiles_max` tiles.
  /// Errors: kInvalidArgument for pieces of several ranks.
  ChunkTable whole_table(std::uint64_t chunk_tiles_max) const;
  /// Reads and compares every record.
  Task<> prove(const std::function<void(std::uint64_t done, std::uint64_t total)>& progress);

 private:
  StoredState(Reactor& reactor, Workers& workers)
      : reactor_(reactor), workers_(workers), records_(reactor, memory_, kKeptBytesMax) {}

  /// Elements of a tensor that lie in one record.
  struct Stretch {
    std::uint64_t first, count, at;
    std::uint32_t rank;
    ChunkId chunk;
    std::uint32_t array;
  };
  void describe();
  void read_tables();
  void describe_tensors();
  void add_stretches(int rank);
  Task<> read_record(int rank, ChunkId chunk, std::span<std::byte> into);

  Reactor& reactor_;
  Workers& workers_;
  std::unique_ptr<StoreReader> reader_;
  std::string place_;
  StateContent content_;
  bool of_pieces_ = false;
  std::vector<ChunkTable> tables_;               // by rank
  std::vector<std::size_t> first_tensors_;       // by rank: its first tensor in content_
  std::vector<std::vector<Stretch>> stretches_;  // by tensor, in the order of elements
  AlignedPool memory_;
  ProvenBytes records_;
};

}  // namespace ziggurat
