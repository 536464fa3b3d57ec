// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_norm.cc: rounding with sums, and their way to the other ranks.
#include "core/schedule/gradients/gradient_norm.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/checksum.h"
#include "optimizer/gradient.h"

namespace ziggurat {
namespace {

template <class T>
std::byte* put(std::byte* at, std::span<const T> values) {
  std::memcpy(at, values.data(), values.size_bytes());
  return at + values.size_bytes();
}

}  // namespace

GradientNorm::GradientNorm(const ChunkTable& table)
    : table_(table),
      sums_(table.tile_count() * static_cast<std::size_t>(table.sharding().tensor.ranks), 0.0) {
  for (UnitId u = 0; u < table.unit_count(); ++u) message_bytes_ += slice_tiles(u) * sizeof(double);
  if (table.sharding().tensor.ranks == 1) return;
  message_bytes_ += table.unit_count() * sizeof(std::uint64_t);
  shared_hashes_.resize(table.tile_count(), 0);
  first_hashes_.resize(static_cast<std::size_t>(table.sharding().total()) * table.unit_count(), 0);
}

void GradientNorm::round(UnitId unit, std::uint64_t begin, std::span<const float> values,
                         TypedSpan<std::byte> out) {
  for (std::size_t at = 0; at < values.size(); at += kTileElements) {
    round_tile(unit, begin + at, values.subspan(at, kTileElements), out.subspan(at, kTileElements));
  }
}

/// Runs that parts share and runs that they do not, one after the other; most tiles are one run.
void GradientNorm::round_tile(UnitId unit, std::uint64_t begin, std::span<const float> values,
                              TypedSpan<std::byte> out) {
  const TensorPart part = table_.sharding().tensor;
  const std::size_t tile = table_.unit(unit).first_tile + begin / kTileElements;
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
  sums_[static_cast<std::size_t>(part.rank) * table_.tile_count() + tile] = sum;
  if (!shared_hashes_.empty()) shared_hashes_[tile] = hash;
}

std::uint64_t GradientNorm::shared_hash(UnitId unit) const {
  const UnitChunks& of = table_.unit(unit);
  const std::size_t first =
      of.first_tile + static_cast<std::size_t>(table_.sharding().rank) * slice_tiles(unit);
  const std::span tiles = std::span(shared_hashes_).subspan(first, slice_tiles(unit));
  return hash64(std::as_bytes(tiles), unit);
}

void GradientNorm::write_message(std::span<std::byte> message) const {
  ZIGGURAT_CHECK(message.size() == message_bytes_, "a message of {} bytes", message.size());
  const Sharding& own = table_.sharding();
  std::byte* at = message.data();
  for (UnitId u = 0; u < table_.unit_count(); ++u) {
    const std::size_t first = static_cast<std::size_t>(own.tensor.rank) * table_.tile_count() +
                              table_.unit(u).first_tile +
                              static_cast<std::size_t>(own.rank) * slice_tiles(u);
    at = put(at, std::span(sums_).subspan(first, slice_tiles(u)));
  }
  for (UnitId u = 0; u < table_.unit_count() && !shared_hashes_.empty(); ++u) {
    const std::uint64_t hash = shared_hash(u);
    at = put(at, std::span(&hash, 1));
  }
}

std::optional<GradientNorm::Difference> GradientNorm::read_message(
    int rank, std::span<const std::byte> message) {
  ZIGGURAT_CHECK(message.size() == message_bytes_, "a message of {} bytes", message.size());
  const Sharding& own = table_.sharding();
  const int part = rank % own.tensor.ranks;
  const int data_rank = rank / own.tensor.ranks;
  const auto slice = static_cast<std::size_t>(data_rank % own.world_size);
  const std::byte* at = message.data();
  for (UnitId u = 0; u < table_.unit_count(); ++u) {
    const std::size_t first = static_cast<std::size_t>(part) * table_.tile_count() +
                              table_.unit(u).first_tile + slice * slice_tiles(u);
    std::memcpy(&sums_[first], at, slice_tiles(u) * sizeof(double));
    at += slice_tiles(u) * sizeof(double);
  }
  std::optional<Difference> differs;
  for (UnitId u = 0; u < table_.unit_count() && !shared_hashes_.empty(); ++u) {
    std::uint64_t hash = 0;
    std::memcpy(&hash, at, sizeof(hash));
    at += sizeof(hash);
    std::uint64_t& first =
        first_hashes_[static_cast<std::size_t>(data_rank) * table_.unit_count() + u];
    if (part == 0) first = hash;
    if (hash != first && !differs)
      differs = Difference{.unit = u, .first_rank = rank - part, .rank = rank};
  }
  return differs;
}

double GradientNorm::squared() const noexcept {
  double sum = 0;
  for (const double tile : sums_) sum += tile;
  return sum;
}

}  // namespace ziggurat
