// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/gradient.cc: checks arguments, and chooses in how many launches a gradient is
// rounded.
#include "optimizer/cuda/gradient.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/error.h"
#include "optimizer/cuda/gradient_programs.h"

namespace ziggurat::cuda {
namespace {

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  return !a.empty() && !b.empty() && a.data() < b.data() + b.size() &&
         b.data() < a.data() + a.size();
}

[[noreturn]] void refuse_overlap(const char* call, const void* from, const void* to) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} from {} to {} is not possible: the arrays overlap, and blocks run in "
                          "any order; give it "
                          "arrays that do not overlap",
                          call, from, to));
}

void require_aligned_array(const char* what, TypedSpan<const std::byte> values) {
  require_aligned(what, values.bytes.data(), size_bytes(values.dtype));
}

}  // namespace

void clear(StreamHandle stream, std::span<std::byte> bytes) {
  launch_clear(bytes.data(), bytes.size(), stream);
}

void accumulate_gradient(StreamHandle stream, TypedSpan<const std::byte> values, float scale,
                         std::span<float> sums) {
  ZIGGURAT_CHECK(values.count() == sums.size(), "{} values into {} sums", values.count(),
                 sums.size());
  require_aligned_array("gradient", values);
  require_aligned("accumulator", sums.data(), sizeof(float));
  if (overlap(values.bytes, std::as_bytes(sums)))
    refuse_overlap("accumulate_gradient", values.bytes.data(), sums.data());
  launch(Accumulate{values.bytes.data(), values.dtype, scale, sums.data(), sums.size()}, stream);
}

void round_gradient(StreamHandle stream, std::span<const float> accumulator,
                    TypedSpan<std::byte> out, std::span<double> tile_sums) {
  const std::uint64_t tiles = blocks_of(accumulator.size(), kTileElements);
  ZIGGURAT_CHECK(out.count() == accumulator.size() && tile_sums.size() == tiles,
                 "{} values into {} places and {} sums", accumulator.size(), out.count(),
                 tile_sums.size());
  require_aligned("accumulator", accumulator.data(), sizeof(float));
  require_aligned_array("rounded gradient", out);
  require_aligned("sums", tile_sums.data(), sizeof(double));
  const std::span<const std::byte> values = std::as_bytes(accumulator);
  const bool in_place = overlap(values, out.bytes);
  if (in_place && values.data() != out.bytes.data())
    refuse_overlap("round_gradient", accumulator.data(), out.bytes.data());
  RoundTiles<false> all{values.data(), out.dtype,       out.bytes.data(), accumulator.size(), 0,
                        tiles,         tile_sums.data()};
  if (!in_place || out.dtype == DType::kFloat32) return launch(all, stream);
  launch(RoundTiles<true>{values.data(), out.dtype, out.bytes.data(), accumulator.size(), 0, 1,
                          tile_sums.data()},
         stream);
  // Tiles [n, 2n) become bytes of tiles [n / 2, n), which the launch before has read.
  for (std::uint64_t first = 1; first < tiles; first *= 2) {
    all.first_tile = first;
    all.tiles = std::min(first, tiles - first);
    launch(all, stream);
  }
}

void widen(StreamHandle stream, TypedSpan<const std::byte> values, std::span<float> out) {
  ZIGGURAT_CHECK(values.count() == out.size(), "{} values into {} places", values.count(),
                 out.size());
  require_aligned_array("values", values);
  require_aligned("widened values", out.data(), sizeof(float));
  if (overlap(values.bytes, std::as_bytes(out)))
    refuse_overlap("widen", values.bytes.data(), out.data());
  launch(Widen{values.bytes.data(), values.dtype, out.data(), out.size()}, stream);
}

void scale_gradient(StreamHandle stream, TypedSpan<std::byte> values, float factor,
                    std::span<std::uint32_t> tile_not_finite) {
  ZIGGURAT_CHECK(tile_not_finite.size() == blocks_of(values.count(), kTileElements),
                 "{} tiles' words for {} values", tile_not_finite.size(), values.count());
  require_aligned_array("gradient", values);
  require_aligned("tiles' words", tile_not_finite.data(), sizeof(std::uint32_t));
  launch(
      ScaleTiles{values.bytes.data(), values.dtype, factor, values.count(), tile_not_finite.data()},
      stream);
}

}  // namespace ziggurat::cuda
