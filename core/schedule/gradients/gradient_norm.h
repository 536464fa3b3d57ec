// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_norm.h: the sums of squares of a step's gradients, tile by tile,
// from which every rank takes the same norm.
//
// A tile's sum is of the rounded gradient, made in the pass that rounds it. Each rank has the tiles
// of its slices; the others' come in a message once a step, and all are added in one order: by
// tensor-parallel part, and within it by the model's. What all parts share (parameters that are not
// divided) is counted in the first; that it has the same bits in the others is checked on the way.
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
  explicit GradientNorm(const ChunkTable& table);

  /// Rounds elements [begin, begin + values.size()) of `unit`, whole tiles, into `out`, as
  /// round_gradient() does, and keeps their sums. Different tiles from several threads at once.
  void round(UnitId unit, std::uint64_t begin, std::span<const float> values,
             TypedSpan<std::byte> out);

  /// Of this rank's slices, for the others.
  std::size_t message_bytes() const noexcept { return message_bytes_; }
  void write_message(std::span<std::byte> message) const;
  /// A unit whose shared parameters have other gradients on `rank` than on `first_rank` of its
  /// tensor-parallel group.
  struct Difference {
    UnitId unit;
    int first_rank;
    int rank;
  };
  /// Takes what rank `rank` of all ranks wrote; of each step in the order of ranks, this one
  /// included. Returns the first unit whose shared parameters' gradients differ within a
  /// tensor-parallel group, if there is one: every rank finds the same.
  std::optional<Difference> read_message(int rank, std::span<const std::byte> message);

  /// Of the whole model, once the messages of all are read; of one rank's where that is all.
  double squared() const noexcept;

 private:
  void round_tile(UnitId unit, std::uint64_t begin, std::span<const float> values,
                  TypedSpan<std::byte> out);
  std::uint64_t shared_hash(UnitId unit) const;
  std::size_t slice_tiles(UnitId unit) const noexcept {
    return table_.unit(unit).slice_count / kTileElements;
  }

  const ChunkTable& table_;
  std::size_t message_bytes_ = 0;
  std::vector<double> sums_;                  // of each tile of each part
  std::vector<std::uint64_t> shared_hashes_;  // of each tile of this part, of what parts share
  std::vector<std::uint64_t> first_hashes_;   // of each unit, as each first part's ranks wrote it
};

}  // namespace ziggurat
