// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_layout.h: how a unit of whole parameters lies on the device, and which
// rank has which slice of them. Private to the engine. Arithmetic only; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/engine/engine_config.h"

namespace ziggurat {

class WholeLayout {
 public:
  /// Errors: kInvalidArgument for units that are not numbered from 0 without gaps.
  explicit WholeLayout(const std::vector<WholeParam>& wholes);

  struct Unit {
    std::vector<std::size_t> wholes;  ///< in their order
    std::uint64_t elements = 0;
    std::uint64_t bytes = 0;  ///< on the device, with what lies between them
    bool optional = false;
    bool trained = false;  ///< one of its parameters is
  };
  const std::vector<Unit>& units() const noexcept { return units_; }
  /// Returns where a parameter begins in its unit, in bytes.
  std::uint64_t offset_of(std::size_t whole) const { return offsets_[whole]; }

  /// The elements of a parameter that one rank has.
  struct Slice {
    std::uint64_t first = 0;
    std::uint64_t count = 0;
  };
  /// Takes each rank's slices of all parameters. Errors: kInvalidArgument, which names the
  /// parameter, unless the slices of each follow one another in the order of ranks and are all of
  /// it.
  void set_slices(const std::vector<std::vector<Slice>>& of_ranks);
  const Slice& slice_of(std::size_t rank, std::size_t whole) const { return slices_[rank][whole]; }

  /// Slices that go from rank to rank in one message: a large one alone, or all small ones of a
  /// unit together.
  struct Message {
    std::vector<std::size_t> wholes;
    std::uint64_t bytes = 0;
  };
  /// Returns in which messages `rank` sends its slices of a unit.
  std::vector<Message> messages_of(std::size_t rank, std::size_t unit) const;
  /// Returns where a rank's slice lies in its unit on the device: first byte and size.
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  Range range_of(std::size_t rank, std::size_t whole) const;

 private:
  std::vector<WholeParam> wholes_;
  std::vector<Unit> units_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::vector<Slice>> slices_;  // by rank
};

}  // namespace ziggurat
