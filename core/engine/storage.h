// SPDX-License-Identifier: Apache-2.0
// core/engine/storage.h: the drives of one engine, the directories on them, and the store in those.
// Private to core/engine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aio/io_activity.h"
#include "aio/io_engine.h"
#include "collectives/communicator.h"
#include "core/engine/communicator_quorum.h"
#include "core/engine/engine_config.h"
#include "core/engine/runtime.h"
#include "tiers/host_mapping.h"
#include "tiers/striped_store.h"

namespace ziggurat {

/// Page-aligned memory outside the pool, for superblocks and tables: a
/// few MiB at most. Not in forked children, as all that a drive reads into.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::uint64_t size_bytes);
  std::span<std::byte> bytes() const noexcept { return mapping_.bytes().first(size_bytes_); }

 private:
  std::uint64_t size_bytes_;
  HostMapping mapping_;
};

/// Files of one engine and the memory its store works in. Made and destroyed on the reactor.
struct Storage {
  /// `agreements`: the store's own communicator.
  explicit Storage(Communicator& agreements) : ranks(agreements) {}

  std::vector<std::unique_ptr<IoEngine>> drives;  ///< one ring per block device
  std::vector<StripePlace> places;                ///< one per directory of the store
  /// NUMA node of each directory's drive, -1 where unknown; empty where memory is one.
  std::map<std::string, int> drive_nodes;
  /// One for all drives: what is busy is the set, and its bandwidth is what a step is bound by.
  IoActivity activity;
  Communicator& ranks;
  CommunicatorQuorum quorum{ranks};
  std::vector<AlignedMemory> staging;
  std::optional<AlignedMemory> scratch;
  std::unique_ptr<StripedStore> store;

  /// Makes the directories if needed and picks an IoEngine for each drive; its ring's memory and
  /// its threads are on the drive's NUMA node.
  static std::unique_ptr<Storage> open(Runtime& runtime, Communicator& agreements,
                                       const std::vector<StoreDirectory>& store);
  /// CPUs on the node of the directory's drive; none where that does not matter or is not known.
  std::span<const int> cpus_near(const Topology& topology, const std::string& directory) const;
  /// NUMA node of the drive that holds each chunk's record; empty where memory is one.
  std::vector<int> chunk_drive_nodes() const;
  StripedStore::Environment environment(Runtime& runtime);
  /// The store's files were renamed into other directories of the same drives, by place.
  void moved(std::span<const std::string> directories);
  std::string paths() const;  ///< for messages: as given to --store
};

}  // namespace ziggurat
