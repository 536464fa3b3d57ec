// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_norm.h: keeps the sums of squares of a step's gradients, tile by
// tile. Every rank computes the same norm from them.
//
// A tile's sum is computed from the rounded gradient, in the pass that rounds it. Each rank has the
// tiles of its slices and exchanges their sums once a step. All ranks then add all sums in the same
// order: one tensor-parallel part after another, and within a part in the order of the model.
// Parameters that are not divided are shared by all parts. They are counted in the first part, and
// the ranks check that their gradients have the same bits in all parts.
//
// At a trillion parameters the sums take half a gigabyte on every rank. They are therefore stored
// only once, in the messages in which they travel. They are part of the host budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/sharding/chunk_table.h"

namespace ziggurat {

class GradientNorm {
 public:
  /// Bytes at the beginning of each message for other values that the ranks exchange at the end of
  /// a step.
  static constexpr std::size_t kHeadBytes = 64;

  /// Returns how much host memory a GradientNorm needs.
  static std::uint64_t memory_bytes(const ChunkTable& table);
  /// Keeps `memory`, which has memory_bytes(). `rank` is this rank among all ranks.
  GradientNorm(const ChunkTable& table, int rank, std::span<std::byte> memory);

  /// Rounds elements [begin, begin + values.size()) of `unit`, whole tiles, into `out` as
  /// round_gradient() does. Keeps the sums of those tiles that are in this rank's slice. Several
  /// threads may round different tiles at once.
  void round(UnitId unit, std::uint64_t begin, std::span<const float> values,
             TypedSpan<std::byte> out);

  /// Counts nothing for a unit that has no gradient in this step.
  void leave_out(UnitId unit) noexcept;

  /// Returns where round() would put the sums of those elements. Empty if a plain sum per tile is
  /// not enough: for parameters that tensor-parallel ranks share, and for elements in another
  /// rank's slice.
  std::span<double> whole_tiles(UnitId unit, std::uint64_t begin, std::uint64_t count) noexcept;

  /// Completes this rank's message, all but its head, when all of this rank's gradients are
  /// rounded.
  void finish_message();
  /// Return the messages of all ranks side by side, as an all-gather needs them, and the message of
  /// one rank, which begins with its head.
  std::span<std::byte> messages() noexcept { return memory_.first(message_bytes_ * ranks_); }
  std::span<std::byte> message(int rank) const noexcept {
    return memory_.subspan(message_bytes_ * static_cast<std::size_t>(rank), message_bytes_);
  }

  /// A unit whose shared parameters have different gradients on two ranks of a tensor-parallel
  /// group.
  struct Difference {
    UnitId unit;
    int first_rank;
    int rank;
  };
  /// Returns the first such unit, if there is one, when the messages of all ranks have arrived.
  /// Every rank finds the same one.
  std::optional<Difference> difference() const;
  /// Returns the sum of squares over the whole model, when the messages of all ranks have arrived.
  double squared() const;

 private:
  void round_tile(UnitId unit, std::uint64_t begin, std::span<const float> values,
                  TypedSpan<std::byte> out);
  std::size_t slice_tiles(UnitId unit) const noexcept {
    return table_.unit(unit).slice_count / kTileElements;
  }
  bool has_parts() const noexcept { return table_.sharding().tensor.ranks > 1; }
  std::span<double> sums(int rank) const noexcept;
  std::span<std::uint64_t> unit_hashes(int rank) const noexcept;

  const ChunkTable& table_;
  int rank_;
  std::size_t ranks_;
  // Each unit's first tile among this rank's own; the last entry is the number of tiles.
  std::vector<std::size_t> first_tile_;
  std::size_t message_bytes_;
  std::span<std::byte> memory_;
  // For this rank's slices of parameters that all parts share.
  std::span<std::uint64_t> tile_hashes_;
};

}  // namespace ziggurat
