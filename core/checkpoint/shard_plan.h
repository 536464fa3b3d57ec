// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/shard_plan.h: which boxes of which tensors a rank writes, and into which files.
//
// What lies on several ranks is written by one: the first copy of a hybrid's groups, in stage 0 the
// rank whose slice it would be, of a parameter that tensor-parallel ranks do not divide the first.
// A slice of a tensor is several boxes, and readers of safetensors find a tensor once a file, so
// the boxes of one tensor go into several files. Arithmetic only; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/manifest.h"

namespace ziggurat {

/// The largest file, header left out.
inline constexpr std::uint64_t kShardBytesMax = std::uint64_t{4} << 30;

/// A rank among those that save.
struct SavingRank {
  int rank = 0;
  int ranks = 1;
  int replica = 0;  ///< which copy of the state it has
};

struct ShardPlan {
  /// `pieces` have no hashes yet, and offsets from where their file's header ends.
  std::vector<StatePiece> pieces;
  std::vector<StateFile> files;      ///< names, and sizes with their headers
  std::vector<std::string> headers;  ///< of the files: what comes before the first tensor

  std::uint64_t size_bytes() const noexcept;
};

/// The chunk's elements from [first, end) of its record that this rank writes are all or none of a
/// parameter's, and of a stage 0 slice.
class WrittenChunks {
 public:
  WrittenChunks(const ChunkTable& table, const SavingRank& rank) : table_(table), rank_(rank) {}
  bool writes(ChunkId chunk) const noexcept;
  /// What is not divided among tensor-parallel ranks the first one writes.
  bool writes(const ParamSpec& param) const noexcept {
    const TensorPart part = table_.sharding().tensor;
    return part.ranks == 1 || part.rank == 0 || param.tp_dim >= 0;
  }

 private:
  const ChunkTable& table_;
  SavingRank rank_;
};

/// `shard_bytes_max`: kShardBytesMax, or less in a test.
ShardPlan plan_shards(const ChunkTable& table, const ChunkRuns& runs, const SavingRank& rank,
                      std::uint64_t shard_bytes_max = kShardBytesMax);
/// Tensors that one rank has whole.
ShardPlan plan_whole_tensors(const std::vector<StateTensor>& tensors,
                             std::uint64_t shard_bytes_max = kShardBytesMax);
/// Boxes of tensors, each of `tensors`, that this rank has.
struct TensorBoxes {
  std::uint32_t tensor = 0;
  std::vector<TensorBox> boxes;
};
ShardPlan plan_boxes(const std::vector<StateTensor>& tensors, const std::vector<TensorBoxes>& parts,
                     const SavingRank& rank, std::uint64_t shard_bytes_max = kShardBytesMax);

}  // namespace ziggurat
