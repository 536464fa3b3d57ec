// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_norm.h: the sums of squares of a step's gradients, tile by tile,
// from which every rank takes the same norm.
//
// A tile's sum is of the rounded gradient, made in the pass that rounds it. Each rank has the tiles
// of its slices and exchanges them once a step; all ranks then add all tiles in one order: by
// tensor-parallel part, and within it by the model's. What all parts share (parameters that are not
// divided) is counted in the first; that it has the same bits in the others is checked on the way.
//
// At a trillion parameters the sums are half a gigabyte on every rank: they are held once, in the
// messages as they travel, and are part of the host budget.
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
  /// Room in front of each message for what else the ranks tell each other at the end of a step.
  static constexpr std::size_t kHeadBytes = 64;

  /// What it takes of host memory.
  static std::uint64_t memory_bytes(const ChunkTable& table);
  /// `rank`: this one, of all ranks. `memory`: memory_bytes() of it, for good.
  GradientNorm(const ChunkTable& table, int rank, std::span<std::byte> memory);

  /// Rounds elements [begin, begin + values.size()) of `unit`, whole tiles, into `out`, as
  /// round_gradient() does, and keeps the sums of those of this rank's slice. Different tiles from
  /// several threads at once.
  void round(UnitId unit, std::uint64_t begin, std::span<const float> values,
             TypedSpan<std::byte> out);

  /// Where round() would put the sums of those elements; empty where it takes more than a sum of
  /// each tile: of parts that ranks share, and of what is in another rank's slice.
  std::span<double> whole_tiles(UnitId unit, std::uint64_t begin, std::uint64_t count) noexcept;

  /// This rank's gradients are all rounded: its message is whole but for the head.
  void finish_message();
  /// All ranks' messages side by side, as an all-gather wants them; and one's, its head first.
  std::span<std::byte> messages() noexcept { return memory_.first(message_bytes_ * ranks_); }
  std::span<std::byte> message(int rank) const noexcept {
    return memory_.subspan(message_bytes_ * static_cast<std::size_t>(rank), message_bytes_);
  }

  /// A unit whose shared parameters have other gradients on `rank` than on `first_rank` of its
  /// tensor-parallel group.
  struct Difference {
    UnitId unit;
    int first_rank;
    int rank;
  };
  /// Once the messages of all are there: the first, if there is one. Every rank finds the same.
  std::optional<Difference> difference() const;
  /// The sum over the whole model, then too.
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
  std::vector<std::size_t> first_tile_;  // by unit, among a rank's own; and at the end their number
  std::size_t message_bytes_;
  std::span<std::byte> memory_;
  std::span<std::uint64_t> tile_hashes_;  // of this rank's slices, of what parts share
};

}  // namespace ziggurat
