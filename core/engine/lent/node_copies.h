// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/node_copies.h: keeps slices of ranks of other nodes for the ranks of this one,
// as hpZ does (Wang et al. 2023, ZeRO++, section 4.2): each slice comes to a node once, to the rank
// that keeps it, and from there to the others.
//
// A slice is kept until parameters change. In a generation in which the trainer writes parameters
// nothing is kept from then on, because another rank may write its slice later, after this rank has
// brought it ahead for a third one. What is written before anything was brought, as the values with
// which a model begins, is not meant.
//
// Slices are kept as they have come: of quantized parameters the codes. Private to the engine.
// Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/runtime/async.h"
#include "core/engine/lent/unit_service.h"

namespace ziggurat {

class NodeCopies {
 public:
  explicit NodeCopies(CancelScope& cancel) : cancel_(cancel) {}

  /// Fills memory with the slices that are asked for.
  using Bring = std::function<Task<UnitService::Came>(std::span<std::byte> all)>;
  struct Copy {
    UnitService::Came came = UnitService::Came::kWhole;
    std::shared_ptr<const std::vector<std::byte>> bytes;
  };
  /// Returns the slices of `size_bytes` that a rank has of a unit at a generation. Whoever comes
  /// first brings them. Errors: those of `bring`.
  Task<Copy> get(std::size_t rank, StreamedUnit unit, std::uint64_t generation,
                 std::uint64_t size_bytes, const Bring& bring);
  /// Forgets all: a generation begins.
  void begin_generation() {
    kept_.clear();
    keeps_ = true;
  }
  /// Notes that this rank's trainer writes parameters, as those of all ranks do.
  void written() {
    kept_.clear();
    keeps_ = keeps_ && !was_asked_;
  }

 private:
  struct Entry {
    explicit Entry(CancelScope& cancel) : ended(cancel) {}
    std::uint64_t generation = 0;
    std::shared_ptr<std::vector<std::byte>> bytes;
    bool is_whole = false;
    Signal ended;
  };
  using Key = std::pair<std::size_t, StreamedUnit>;
  Task<UnitService::Came> fill(Entry& its, const Bring& bring);

  CancelScope& cancel_;
  std::map<Key, std::shared_ptr<Entry>> kept_;
  bool keeps_ = true;
  bool was_asked_ = false;
};

}  // namespace ziggurat
