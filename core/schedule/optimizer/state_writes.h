// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/state_writes.h: state that a trainer has written, until a sweep puts it
// into the records.
//
// A record changes in a sweep only, which writes it as the next generation's: so what is written
// between two steps becomes durable as a whole, with the step after it, or not at all, at whatever
// instant the process is killed; with one slot too, and a checkpoint that is under way stores the
// records of its own generation. It costs memory until then: 4 bytes a value. Reactor's thread
// only, but for apply().
//
// Another rank may read a chunk's state while this one's trainer writes it anew: values that were
// given out by of() stay as they are for whoever holds them.
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
  /// Values of a chunk, without padding, by their place among state_names().
  using Arrays = std::map<std::size_t, std::shared_ptr<const std::vector<float>>>;

  explicit StateWrites(StateKind state) : state_(state) {}

  /// In place of what was written of that array before.
  void put(ChunkId chunk, std::size_t index, std::vector<float> values) {
    std::shared_ptr<const Arrays>& its = chunks_[chunk];
    Arrays arrays = its ? *its : Arrays();
    arrays[index] = std::make_shared<const std::vector<float>>(std::move(values));
    its = std::make_shared<const Arrays>(std::move(arrays));
  }
  /// The chunk's parameters are made of its masters once more, if no gradient changes them.
  void round_again(ChunkId chunk) {
    std::shared_ptr<const Arrays>& its = chunks_[chunk];
    if (!its) its = std::make_shared<const Arrays>();
    rounded_again_.insert(chunk);
  }
  /// Its parameters are not those of its masters any more.
  bool publishes(ChunkId chunk) const {
    const std::shared_ptr<const Arrays> its = of(chunk);
    return its && (its->contains(0) || rounded_again_.contains(chunk));
  }
  /// What was written by now; null: nothing.
  std::shared_ptr<const Arrays> of(ChunkId chunk) const {
    const auto found = chunks_.find(chunk);
    return found == chunks_.end() ? nullptr : found->second;
  }
  /// On any thread.
  void apply(const Arrays& arrays, std::span<std::byte> record) const {
    for (const auto& [index, values] : arrays) write_state_values(state_, index, *values, record);
  }
  /// They are in the record.
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
