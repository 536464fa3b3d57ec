// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_norm.cc: rounds gradients, sums their squares, and lays out the
// messages:
//
//   head | sums of the tiles of the rank's slices, by unit | if layers are divided: one hash per
//   unit
#include "core/schedule/gradients/gradient_norm.h"

#include <algorithm>

#include "base/checksum.h"
#include "optimizer/gradient.h"

namespace ziggurat {
namespace {

/// Returns the number of tiles in one rank's slices.
std::size_t own_tiles(const ChunkTable& table) {
  std::size_t tiles = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u)
    tiles += table.unit(u).slice_count / kTileElements;
  return tiles;
}

std::size_t message_bytes_of(const ChunkTable& table) {
  const std::size_t hashes = table.sharding().tensor.ranks > 1 ? table.unit_count() : 0;
  return GradientNorm::kHeadBytes + own_tiles(table) * sizeof(double) +
         hashes * sizeof(std::uint64_t);
}

template <class T>
std::span<T> as(std::span<std::byte> bytes) noexcept {
  return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
}

}  // namespace

std::uint64_t GradientNorm::memory_bytes(const ChunkTable& table) {
  const std::uint64_t hashes = table.sharding().tensor.ranks > 1 ? own_tiles(table) : 0;
  return message_bytes_of(table) * static_cast<std::uint64_t>(table.sharding().ranks()) +
         hashes * sizeof(std::uint64_t);
}

GradientNorm::GradientNorm(const ChunkTable& table, int rank, std::span<std::byte> memory)
    : table_(table),
      rank_(rank),
      ranks_(static_cast<std::size_t>(table.sharding().ranks())),
      message_bytes_(message_bytes_of(table)),
      memory_(memory.first(memory_bytes(table))) {
  std::size_t tiles = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    first_tile_.push_back(tiles);
    tiles += slice_tiles(u);
  }
  first_tile_.push_back(tiles);
  std::ranges::fill(memory_, std::byte{0});
  if (has_parts()) tile_hashes_ = as<std::uint64_t>(memory_.subspan(message_bytes_ * ranks_));
}

std::span<double> GradientNorm::sums(int rank) const noexcept {
  return as<double>(message(rank).subspan(kHeadBytes, first_tile_.back() * sizeof(double)));
}

std::span<std::uint64_t> GradientNorm::unit_hashes(int rank) const noexcept {
  return as<std::uint64_t>(message(rank).subspan(kHeadBytes + first_tile_.back() * sizeof(double)));
}

void GradientNorm::round(UnitId unit, std::uint64_t begin, std::span<const float> values,
                         TypedSpan<std::byte> out) {
  for (std::size_t at = 0; at < values.size(); at += kTileElements) {
    round_tile(unit, begin + at, values.subspan(at, kTileElements), out.subspan(at, kTileElements));
  }
}

/// Rounds a tile range by range: ranges that tensor-parallel parts share alternate with ranges that
/// they do not share. Most tiles have only one range.
void GradientNorm::round_tile(UnitId unit, std::uint64_t begin, std::span<const float> values,
                              TypedSpan<std::byte> out) {
  const TensorPart part = table_.sharding().tensor;
  const std::uint64_t end = begin + values.size();
  double sum = 0;
  std::uint64_t hash = 0;
  std::uint64_t at = begin;
  const auto round_to = [&](std::uint64_t to, bool shared) {
    if (at >= to) return;
    const TypedSpan<std::byte> rounded = out.subspan(at - begin, to - at);
    const double squares = round_gradient(values.subspan(at - begin, to - at), rounded);
    if (!shared || part.rank == 0) sum = sum + squares;
    if (shared) hash = hash64(rounded.bytes, hash + at);
    at = to;
  };
  for (const ElementRun& run : table_.shared_runs(unit)) {
    round_to(std::clamp(run.begin, begin, end), false);
    round_to(std::clamp(run.end, begin, end), true);
  }
  round_to(end, false);
  const std::uint64_t own_begin = table_.own_begin(unit);
  if (begin < own_begin || begin >= own_begin + table_.unit(unit).slice_count) return;
  const std::size_t tile = first_tile_[unit] + (begin - own_begin) / kTileElements;
  sums(rank_)[tile] = sum;
  if (has_parts()) tile_hashes_[tile] = hash;
}

std::span<double> GradientNorm::whole_tiles(UnitId unit, std::uint64_t begin,
                                            std::uint64_t count) noexcept {
  const std::uint64_t own_begin = table_.own_begin(unit);
  const std::uint64_t own_end = own_begin + table_.unit(unit).slice_count;
  if (has_parts() || begin < own_begin || begin + count > own_end) return {};
  const std::size_t tile = first_tile_[unit] + (begin - own_begin) / kTileElements;
  return sums(rank_).subspan(tile, count / kTileElements);
}

void GradientNorm::leave_out(UnitId unit) noexcept {
  std::ranges::fill(sums(rank_).subspan(first_tile_[unit], slice_tiles(unit)), 0.0);
  if (has_parts()) std::ranges::fill(tile_hashes_.subspan(first_tile_[unit], slice_tiles(unit)), 0);
}

void GradientNorm::finish_message() {
  for (UnitId u = 0; u < table_.unit_count() && has_parts(); ++u) {
    const auto tiles = tile_hashes_.subspan(first_tile_[u], slice_tiles(u));
    unit_hashes(rank_)[u] = hash64(std::as_bytes(tiles), u);
  }
}

std::optional<GradientNorm::Difference> GradientNorm::difference() const {
  const int parts = table_.sharding().tensor.ranks;
  for (int rank = 0; rank < static_cast<int>(ranks_) && has_parts(); ++rank) {
    const int first = rank - rank % parts;
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      if (unit_hashes(rank)[u] != unit_hashes(first)[u])
        return Difference{.unit = u, .first_rank = first, .rank = rank};
    }
  }
  return {};
}

/// If groups of ranks each have a copy of the state, all groups have the same sums, so only those
/// of the first group are added.
double GradientNorm::squared() const {
  const Sharding& sharding = table_.sharding();
  double sum = 0;
  for (int part = 0; part < sharding.tensor.ranks; ++part) {
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      for (int slice = 0; slice < sharding.world_size; ++slice) {
        const auto tiles = sums(slice * sharding.tensor.ranks + part);
        for (const double tile : tiles.subspan(first_tile_[u], slice_tiles(u))) sum += tile;
      }
    }
  }
  return sum;
}

}  // namespace ziggurat
