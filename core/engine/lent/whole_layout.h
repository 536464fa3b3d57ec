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

/// How a unit's parameters come: all in their own type, or those that are quantized
/// (WholeParam::quantized) in blocks of int8 codes.
enum class WholeForm : std::uint8_t { kExact, kQuantized };

class WholeLayout {
 public:
  /// Errors: kInvalidArgument for units that are not numbered from 0 without gaps.
  explicit WholeLayout(const std::vector<WholeParam>& wholes);

  struct Unit {
    std::vector<std::size_t> wholes;  ///< in their order
    std::uint64_t elements = 0;
    std::uint64_t bytes = 0;  ///< on the device, with what lies between them
    bool optional = false;
    bool trained = false;    ///< one of its parameters is
    bool quantized = false;  ///< one of its parameters is
  };
  const std::vector<Unit>& units() const noexcept { return units_; }
  /// Returns where a parameter begins in its unit, in bytes.
  std::uint64_t offset_of(std::size_t whole) const { return offsets_[whole]; }

  /// The elements of a parameter that one rank has.
  struct Slice {
    std::uint64_t first = 0;
    std::uint64_t count = 0;
    bool operator==(const Slice&) const = default;
  };
  /// Takes each rank's slices of all parameters. If ranks have the same slices as those before
  /// them, the ranks are in groups, each of which has all slices. Errors: kInvalidArgument, which
  /// names the parameter, unless the slices of each follow one another in the order of a group's
  /// ranks and are all of it.
  void set_slices(const std::vector<std::vector<Slice>>& of_ranks);
  /// Returns how many consecutive ranks have all slices together.
  std::size_t group_ranks() const noexcept { return group_ranks_; }
  const Slice& slice_of(std::size_t rank, std::size_t whole) const { return slices_[rank][whole]; }

  /// Elements of a rank's slice of a parameter.
  struct Run {
    std::size_t whole = 0;
    std::uint64_t first = 0;  ///< in the slice; where a block of codes begins
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;  ///< as they travel
  };
  /// What goes from rank to rank in one message: a large slice alone, or all small ones of a unit
  /// together. The codes of a large slice go in several messages, so that little memory decodes
  /// them.
  struct Message {
    std::vector<Run> runs;
    std::uint64_t bytes = 0;
    bool quantized = false;
  };
  /// Returns in which messages `rank` sends its slices of a unit. Those of a slice follow one
  /// another.
  std::vector<Message> messages_of(std::size_t rank, std::size_t unit, WholeForm form) const;
  /// Returns where a rank's slice, or a run of it, lies in its unit on the device: first byte and
  /// size.
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  Range range_of(std::size_t rank, std::size_t whole) const;
  Range range_of(std::size_t rank, const Run& run) const;

 private:
  std::vector<WholeParam> wholes_;
  std::vector<Unit> units_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::vector<Slice>> slices_;  // by rank
  std::size_t group_ranks_ = 1;
};

}  // namespace ziggurat
