// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_oracle.h: what a store's files still prove, found by looking at every slot of
// them, byte by byte, without the store.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "aio/simulated_engine.h"
#include "tiers/store/record_format.h"
#include "tiers/store/state_store.h"

namespace ziggurat::faults {

/// Who wrote a record or blob: in every sector of it.
struct Tag {
  std::uint64_t launch;
  std::uint64_t generation;
  bool operator==(const Tag&) const = default;
};

/// Two words of tag at the head of every 512-byte sector, the rest a function of the tag and the
/// place.
void write_pattern(std::span<std::byte> bytes, Tag tag, std::uint64_t place);
bool has_pattern(std::span<const std::byte> bytes, Tag tag, std::uint64_t place);
Tag tag_in(std::span<const std::byte> bytes);
std::uint64_t place_of(int rank, ChunkId chunk);
std::vector<std::byte> blob_of(Tag tag, int rank);

struct OracleFinding {
  /// All files are there and of one store: a creation is not under way, so that the store must open
  /// `newest`, or refuse if there is none.
  bool applies = false;
  std::optional<Tag> newest;  ///< whole on every rank and stripe, and of one history
  /// The newest generation that a superblock of any file speaks of: one that is given up for an
  /// older one must be named.
  std::uint64_t heard_of = 0;
};

/// `paths`: by rank, then stripe.
OracleFinding look_at(const SimulatedDisk& disk,
                      const std::vector<std::vector<std::string>>& paths);

}  // namespace ziggurat::faults
