// SPDX-License-Identifier: Apache-2.0
// core/engine/state/storage.h: the drives of one engine, the directories on them, and the store in
// these directories. Private to core/engine.
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
#include "core/engine/engine_config.h"
#include "core/engine/runtime.h"
#include "core/engine/state/communicator_quorum.h"
#include "tiers/pool/host_mapping.h"
#include "tiers/store/striped_store.h"

namespace ziggurat {

/// Page-aligned memory outside the pool, at most a few MiB, for superblocks and tables. Forked
/// children do not inherit it, like all memory into which drives read.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::uint64_t size_bytes);
  std::span<std::byte> bytes() const noexcept { return mapping_.bytes().first(size_bytes_); }

 private:
  std::uint64_t size_bytes_;
  HostMapping mapping_;
};

/// The files of one engine and the memory that its store works in. Made and destroyed on the
/// reactor.
struct Storage {
  /// Uses `agreements`, a communicator that only the store uses.
  explicit Storage(Communicator& agreements) : ranks(agreements) {}

  std::vector<std::unique_ptr<IoEngine>> drives;  ///< one ring per block device
  std::vector<StripePlace> places;                ///< one per directory of the store
  /// The NUMA node of each directory's drive, -1 if unknown. Empty on a machine with one node.
  std::map<std::string, int> drive_nodes;
  /// One activity for all drives, because a step is limited by their bandwidth together.
  IoActivity activity;
  Communicator& ranks;
  CommunicatorQuorum quorum{ranks};
  std::vector<AlignedMemory> staging;
  std::optional<AlignedMemory> scratch;
  std::unique_ptr<StripedStore> store;

  /// Makes missing directories and chooses an IoEngine for each drive. The memory of its ring and
  /// its threads are on the drive's NUMA node.
  static std::unique_ptr<Storage> open(Runtime& runtime, Communicator& agreements,
                                       const std::vector<StoreDirectory>& store);
  /// Returns the CPUs on the node of the directory's drive; empty if the node is unknown or makes
  /// no difference.
  std::span<const int> cpus_near(const Topology& topology, const std::string& directory) const;
  /// Returns the NUMA node of the drive that holds each chunk's record; empty on a machine with one
  /// node.
  std::vector<int> chunk_drive_nodes() const;
  StripedStore::Environment environment(Runtime& runtime);
  /// Notes that the store's files were renamed into other directories of the same drives.
  /// `directories` has one for each place.
  void moved(std::span<const std::string> directories);
  std::string paths() const;  ///< for messages: the paths as given to --store
};

}  // namespace ziggurat
