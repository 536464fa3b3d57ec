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

#include <compare>
#include <cstddef>
#include <cstdint>
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
  static constexpr std::size_t kMaster = 0;  ///< index in state_names()
  /// Values of a parameter's run in a chunk.
  struct Place {
    std::size_t index;    ///< in state_names()
    std::uint64_t begin;  ///< ParamRun::begin
    auto operator<=>(const Place&) const = default;
  };
  using Arrays = std::map<Place, std::shared_ptr<const std::vector<float>>>;

  /// Keeps the values of a whole run, instead of any that were written there before.
  void put(ChunkId chunk, Place place, std::vector<float> values) {
    std::shared_ptr<Arrays>& its = chunks_[chunk];
    if (!its || its.use_count() > 1)
      its = its ? std::make_shared<Arrays>(*its) : std::make_shared<Arrays>();
    (*its)[place] = std::make_shared<const std::vector<float>>(std::move(values));
  }
  /// Has a run's parameters made from its masters again by the next sweep, if no gradient changes
  /// them.
  void round_again(ChunkId chunk, const ParamRun& run) {
    std::shared_ptr<Arrays>& its = chunks_[chunk];
    if (!its) its = std::make_shared<Arrays>();
    rounded_again_[chunk].insert(run.begin);
  }
  /// Whether a run's parameters must be made from its masters, because they no longer match.
  bool publishes(ChunkId chunk, const ParamRun& run) const {
    const std::shared_ptr<const Arrays> its = of(chunk);
    if (!its) return false;
    const auto again = rounded_again_.find(chunk);
    return its->contains({.index = kMaster, .begin = run.begin}) ||
           (again != rounded_again_.end() && again->second.contains(run.begin));
  }
  /// Returns what was written so far; null if nothing was.
  std::shared_ptr<const Arrays> of(ChunkId chunk) const {
    const auto found = chunks_.find(chunk);
    return found == chunks_.end() ? nullptr : found->second;
  }
  /// Writes `arrays` into a record of `state`. Any thread.
  static void apply(const StateKind& state, const Arrays& arrays, std::span<std::byte> record) {
    for (const auto& [place, values] : arrays)
      write_state_values(state, place.index, place.begin, *values, record);
  }
  /// Forgets the chunk's values, which are in its record now.
  void forget(ChunkId chunk) {
    chunks_.erase(chunk);
    rounded_again_.erase(chunk);
  }

 private:
  std::map<ChunkId, std::shared_ptr<Arrays>> chunks_;
  std::map<ChunkId, std::set<std::uint64_t>> rounded_again_;  // by ParamRun::begin
};

}  // namespace ziggurat
