// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/state_writes.h: keeps state that a trainer has written until a sweep puts
// it into the records.
//
// A record is changed only by a sweep, which writes it as part of the next generation. So whatever
// is written between two steps becomes durable together with the step after it, or not at all,
// whenever the process is killed. This holds with one slot too. A checkpoint that is under way
// stores the records of its own generation. Until the sweep, the values take 4 bytes each.
// Reactor's thread only, except apply().
//
// Another rank may read a chunk's state while this rank's trainer writes it again. So values that
// of() has returned never change while somebody holds them.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/sharding/chunk_table.h"
#include "optimizer/state_values.h"

namespace ziggurat {

class StateWrites {
 public:
  /// Values of a chunk, without padding, by their index in state_names().
  using Arrays = std::map<std::size_t, std::shared_ptr<const std::vector<float>>>;

  explicit StateWrites(StateKind state) : state_(state) {}

  /// Keeps `values`, instead of any that were written to the same array before.
  void put(ChunkId chunk, std::size_t index, std::vector<float> values) {
    std::shared_ptr<const Arrays>& its = chunks_[chunk];
    Arrays arrays = its ? *its : Arrays();
    arrays[index] = std::make_shared<const std::vector<float>>(std::move(values));
    its = std::make_shared<const Arrays>(std::move(arrays));
  }
  /// Has the chunk's parameters made from its masters again by the next sweep, if no gradient
  /// changes them.
  void round_again(ChunkId chunk) {
    std::shared_ptr<const Arrays>& its = chunks_[chunk];
    if (!its) its = std::make_shared<const Arrays>();
    rounded_again_.insert(chunk);
  }
  /// Whether the chunk's parameters must be made from its masters, because they no longer match.
  bool publishes(ChunkId chunk) const {
    const std::shared_ptr<const Arrays> its = of(chunk);
    return its && (its->contains(0) || rounded_again_.contains(chunk));
  }
  /// Returns what was written so far; null if nothing was.
  std::shared_ptr<const Arrays> of(ChunkId chunk) const {
    const auto found = chunks_.find(chunk);
    return found == chunks_.end() ? nullptr : found->second;
  }
  /// Writes `arrays` into a record. Any thread.
  void apply(const Arrays& arrays, std::span<std::byte> record) const {
    for (const auto& [index, values] : arrays) write_state_values(state_, index, *values, record);
  }
  /// Forgets the chunk's values, which are in its record now.
  void forget(ChunkId chunk) {
    chunks_.erase(chunk);
    rounded_again_.erase(chunk);
  }

 private:
  const StateKind state_;
  std::map<ChunkId, std::shared_ptr<const Arrays>> chunks_;
  std::set<ChunkId> rounded_again_;
};

}  // namespace ziggurat
