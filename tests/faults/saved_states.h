// SPDX-License-Identifier: Apache-2.0
// tests/faults/saved_states.h: checkpoints and stores that real ranks wrote, as files in memory:
// what a campaign damages, what lay in the same places earlier, and what a reader must give.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/checkpoint/manifest.h"
#include "optimizer/state_kind.h"

namespace ziggurat::faults {

using Files = std::map<std::string, std::vector<std::byte>>;  ///< by path
/// Every tensor by name, whole.
using TensorBytes = std::map<std::string, std::vector<std::byte>>;

/// Bytes of a file that mean one thing.
struct Region {
  std::string what;  ///< "superblock", "shard header", ..
  std::string path;
  std::uint64_t begin;
  std::uint64_t end;
};

struct SavedState {
  std::string name;
  bool is_store = false;
  /// The store's, or the folder of the checkpoints.
  std::vector<std::string> directories;
  std::uint64_t newest = 0;  ///< the step that is damaged: of a store, one before is there too
  Files now;
  Files old;  ///< of two steps before, or the checkpoint before: what a lost write leaves there
  std::map<std::uint64_t, TensorBytes> tensors;  ///< by step
  std::vector<Region> regions;
  Manifest manifest;  ///< a checkpoint's newest
};

struct Saver {
  std::string name;
  int ranks = 1;
  StateFormat format = StateFormat::kFp32;
  int stripes = 1;  ///< of a store
};
/// Checkpoints of steps 1 and 2.
SavedState saved_checkpoints(const Saver& saver);
/// Generations 3 and 2; `old` is of generation 1.
SavedState saved_store(const Saver& saver);

}  // namespace ziggurat::faults
