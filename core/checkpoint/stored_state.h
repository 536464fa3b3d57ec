// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/stored_state.h: a store, of however many ranks, as a source of state, at rest or
// while its owner trains on: what reshards, exports and looks at it needs neither its ranks nor a
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
#include "tiers/store_reader.h"

namespace ziggurat {

class StoredState final : public StateSource {
 public:
  /// Records that are kept, in case the next chunk needs the rest of them.
  static constexpr std::uint64_t kKeptBytesMax = std::uint64_t{64} << 20;

  /// Errors: StoreReader's; kDataLoss for a layout that makes no sense.
  static Task<std::unique_ptr<StoredState>> open(Reactor& reactor, WorkerPool& workers,
                                                 std::vector<StripePlace> places);

  const StateContent& content() const noexcept override { return content_; }
  /// Errors beside: kUnavailable where the owner has overtaken it: open it again.
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override;
  std::string place() const override { return place_; }

  /// What is damaged and was not needed, and which newer generation was given up for it.
  const std::vector<std::string>& notes() const noexcept { return reader_->state().notes; }
  /// How it is cut, as ChunkTable::from_layout() wants it.
  const std::string& layout() const noexcept { return reader_->state().layout; }
  /// Its trainer lends its parameters: each rank has pieces of its own, of any shapes, which the
  /// trainer alone puts together. They are the tensors of content(), of all ranks; where two ranks
  /// have one of the same name, as "rank1/NAME".
  bool of_pieces() const noexcept { return of_pieces_; }
  /// Errors: kInvalidArgument where it is of pieces, saying that `what` is none's but their
  /// trainer's.
  void require_whole(const char* what) const;
  /// That its records have.
  std::uint32_t slots() const noexcept { return reader_->state().slots; }
  /// The same state of one rank, in chunks of at most so many tiles. Errors: kInvalidArgument for
  /// pieces of several ranks.
  ChunkTable whole_table(std::uint64_t chunk_tiles_max) const;
  /// Reads and compares every record.
  Task<> prove(const std::function<void(std::uint64_t done, std::uint64_t total)>& progress);

 private:
  StoredState(Reactor& reactor, WorkerPool& workers)
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
  WorkerPool& workers_;
  std::unique_ptr<StoreReader> reader_;
  std::string place_;
  StateContent content_;
  bool of_pieces_ = false;
  std::vector<ChunkTable> tables_;               // by rank
  std::vector<std::size_t> first_tensors_;       // by rank: of content_, where it is of pieces
  std::vector<std::vector<Stretch>> stretches_;  // by tensor, in order
  AlignedPool memory_;
  ProvenBytes records_;
};

}  // namespace ziggurat
