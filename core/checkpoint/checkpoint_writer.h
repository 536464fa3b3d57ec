// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_writer.h: the files of a checkpoint that one rank writes: filled in
// any order, hashed on the way, synced at the end. Reactor's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aio/blocking_calls.h"
#include "aio/range_file.h"
#include "base/runtime/worker_pool.h"
#include "core/checkpoint/shard_plan.h"
#include "core/checkpoint/state_source.h"

namespace ziggurat {

class CheckpointWriter final : public StateSink {
 public:
  struct Environment {
    Reactor& reactor;
    Workers& workers;
    IoEngine& io;
    IoObservers observers{};
    BlockingCalls calls{};
  };
  /// Makes the files of `plan` in `directory`, which must exist, reserves their space and writes
  /// their headers. `tensors` are ChunkRuns::tensors(). Errors: kResourceExhausted if there is too
  /// little space; system errors. After an error the files are removed again.
  static Task<std::unique_ptr<CheckpointWriter>> create(Environment environment,
                                                        std::string directory, ShardPlan plan,
                                                        std::vector<StateTensor> tensors);
  /// Removes its files unless keep() was called.
  ~CheckpointWriter() override;

  /// Leaves what no piece of this rank covers to other ranks.
  Task<> write(std::size_t tensor, std::span<const TensorRun> runs,
               std::span<const std::byte> array) override;
  std::uint64_t lead_bytes(std::size_t tensor, std::uint64_t first) const override;
  /// Syncs the files after everything was given, and returns the pieces with their hashes. The
  /// files are durable when their directory is synced, too. Errors: kInvalidArgument naming a
  /// tensor of which a part was not given or was given twice; system errors.
  Task<std::vector<StatePiece>> finish();
  /// Leaves the files when this is destroyed.
  void keep() noexcept { kept_ = true; }

  const std::vector<StateFile>& files() const noexcept { return plan_.files; }
  std::uint64_t size_bytes() const noexcept { return plan_.size_bytes(); }
  std::uint64_t written_bytes() const noexcept { return written_bytes_; }

 private:
  CheckpointWriter(Environment environment, std::string directory, ShardPlan plan,
                   std::vector<StateTensor> tensors);
  /// Elements that follow one another both in the array and in a piece.
  struct Segment {
    std::uint64_t in_piece, at, count;
  };
  std::vector<Segment> segments(const StateTensor& tensor, const StatePiece& piece,
                                std::span<const TensorRun> runs) const;
  static bool lie_together(std::span<const Segment> segments);
  Task<> write_piece(std::size_t piece, std::span<const Segment> segments,
                     std::span<const std::byte> array);
  void make_files();
  void finish_piece(std::size_t piece);
  void remove_files() noexcept;

  Environment environment_;
  std::string directory_;
  ShardPlan plan_;
  std::vector<StateTensor> tensors_;
  std::vector<std::unique_ptr<RangeFile>> files_;
  std::vector<std::string> paths_;
  std::vector<std::vector<std::size_t>> pieces_of_;  // per tensor
  /// Per piece: the stretches that were written, by where they begin.
  std::vector<std::map<std::uint64_t, HashedBytes>> hashed_;
  std::uint64_t written_bytes_ = 0;
  AlignedPool memory_;
  bool kept_ = false;
};

}  // namespace ziggurat
