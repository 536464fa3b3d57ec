// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/steps_blob.h: the blob of a generation whose engine counts steps
// (EngineConfig::counts_steps): each parameter's count, and then the trainer's own blob. Any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/joined_state.h"

namespace ziggurat {

struct StepsBlob {
  std::vector<std::uint64_t> steps;  ///< per parameter
  /// If the store was divided anew since the trainer gave its blob: how many ranks it had then. The
  /// blob is that of their rank 0. Otherwise 0.
  std::uint64_t of_ranks = 0;
  std::span<const std::byte> own;  ///< the trainer's

  /// Most bytes before the trainer's own.
  static std::uint64_t head_bytes(std::size_t params);
  /// Reads the blob of `params` parameters. An empty one is that of generation 0. Errors:
  /// kDataLoss.
  static StepsBlob read(std::span<const std::byte> blob, std::size_t params);
  std::vector<std::byte> written() const;
};

/// Returns the blob of a rank whose parameters are parts of `wholes` (an empty name: of none), from
/// those of the `ranks` of a store: counts of steps by the names of whole tensors, all else from
/// rank 0. Errors: kUnimplemented if the ranks have counted different steps for one tensor;
/// kDataLoss.
std::vector<std::byte> joined_blob(std::span<const StoredRank> ranks,
                                   const std::vector<std::string>& wholes);

}  // namespace ziggurat
