// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/shard_plan.h: which boxes of which tensors a rank writes, and into which files.
//
// State that several ranks hold is written by one of them: by the first copy of a hybrid's groups;
// in stage 0 by the rank whose slice it would be; and for a parameter that tensor-parallel ranks do
// not divide, by the first of these ranks. A slice of a tensor is several boxes, but readers of
// safetensors find a tensor only once in a file, so the boxes of one tensor go into several files.
// Arithmetic only; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/manifest.h"

namespace ziggurat {

/// Most bytes of tensors in a file; its header is not counted.
inline constexpr std::uint64_t kShardBytesMax = std::uint64_t{4} << 30;

/// Says which of the ranks that save a rank is.
struct SavingRank {
  int rank = 0;
  int ranks = 1;
  int replica = 0;  ///< which copy of the state the rank has
};

struct ShardPlan {
  /// Pieces with their offsets in their files, but without hashes yet.
  std::vector<StatePiece> pieces;
  std::vector<StateFile> files;      ///< names, and sizes with the headers
  std::vector<std::string> headers;  ///< of each file: what comes before its first tensor

  std::uint64_t size_bytes() const noexcept;
};

/// Says which chunks, and which parameters of a chunk, this rank writes. A rank writes all of a
/// chunk's elements of a parameter or none of them.
class WrittenChunks {
 public:
  WrittenChunks(const ChunkTable& table, const SavingRank& rank) : table_(table), rank_(rank) {}
  bool writes(ChunkId chunk) const noexcept;
  /// Returns true if this rank writes what it has of `param`. What tensor-parallel ranks do not
  /// divide is written by the first of them.
  bool writes(const ParamSpec& param) const noexcept {
    const TensorPart part = table_.sharding().tensor;
    return part.ranks == 1 || part.rank == 0 || param.tp_dim >= 0;
  }

 private:
  const ChunkTable& table_;
  SavingRank rank_;
};

/// Plans the files of this rank's part of a state. A test may give a smaller `shard_bytes_max`.
ShardPlan plan_shards(const ChunkTable& table, const ChunkRuns& runs, const SavingRank& rank,
                      std::uint64_t shard_bytes_max = kShardBytesMax);
/// Plans the files of tensors that one rank has whole.
ShardPlan plan_whole_tensors(const std::vector<StateTensor>& tensors,
                             std::uint64_t shard_bytes_max = kShardBytesMax);
/// The boxes that this rank has of one tensor.
struct TensorBoxes {
  std::uint32_t tensor = 0;
  std::vector<TensorBox> boxes;
};
ShardPlan plan_boxes(const std::vector<StateTensor>& tensors, const std::vector<TensorBoxes>& parts,
                     const SavingRank& rank, std::uint64_t shard_bytes_max = kShardBytesMax);

}  // namespace ziggurat
