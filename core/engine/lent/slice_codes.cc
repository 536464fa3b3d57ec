// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/slice_codes.cc: cuts slices into jobs.
#include "core/engine/lent/slice_codes.h"

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "collectives/quantize/quantize.h"
#include "core/schedule/quantized_jobs.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

/// Calls `work(first, count)` for runs of whole tiles that are all of `count` elements. So little
/// that a worker would cost more is done at once.
Task<> in_jobs(Context& context, const char* name, std::uint64_t bytes, std::uint64_t count,
               const std::function<void(std::uint64_t first, std::uint64_t count)>& work) {
  if (count <= kTileElements) {
    work(0, count);
    co_return;
  }
  std::vector<std::function<void()>> jobs;
  each_quantized_job(count, [&](std::uint64_t first, std::uint64_t elements) {
    jobs.emplace_back([&work, first, elements] { work(first, elements); });
  });
  co_await context.run_all({name, bytes}, jobs);
}

template <class Byte>
std::span<Byte> codes_at(std::span<Byte> codes, std::uint64_t first, std::uint64_t count) {
  return codes.subspan(quantized_bytes(kSliceBits, first), quantized_bytes(kSliceBits, count));
}

/// Rounds tile by tile, so that the codes stay in a core's cache.
void round_tiles(TypedSpan<const std::byte> values, TypedSpan<std::byte> rounded) {
  std::array<std::byte, quantized_bytes(kSliceBits, kTileElements)> room;
  const std::uint64_t count = values.count();
  for (std::uint64_t first = 0; first < count; first += kTileElements) {
    const std::uint64_t elements = std::min<std::uint64_t>(kTileElements, count - first);
    const auto codes = std::span(room).first(quantized_bytes(kSliceBits, elements));
    quantize(kSliceBits, values.subspan(first, elements), codes);
    dequantize(kSliceBits, codes, rounded.subspan(first, elements));
  }
}

}  // namespace

Task<> encode_slice(Context& context, TypedSpan<const std::byte> values,
                    std::span<std::byte> codes) {
  const std::function<void(std::uint64_t, std::uint64_t)> work = [&](std::uint64_t first,
                                                                     std::uint64_t count) {
    quantize(kSliceBits, values.subspan(first, count), codes_at(codes, first, count));
  };
  co_await in_jobs(context, "quantize params", values.bytes.size() + codes.size(), values.count(),
                   work);
}

Task<> decode_slice(Context& context, std::span<const std::byte> codes,
                    TypedSpan<std::byte> values) {
  const std::function<void(std::uint64_t, std::uint64_t)> work = [&](std::uint64_t first,
                                                                     std::uint64_t count) {
    dequantize(kSliceBits, codes_at(codes, first, count), values.subspan(first, count));
  };
  co_await in_jobs(context, "dequantize params", values.bytes.size() + codes.size(), values.count(),
                   work);
}

Task<> round_slice(Context& context, TypedSpan<const std::byte> values,
                   TypedSpan<std::byte> rounded) {
  const std::function<void(std::uint64_t, std::uint64_t)> work = [&](std::uint64_t first,
                                                                     std::uint64_t count) {
    round_tiles(values.subspan(first, count), rounded.subspan(first, count));
  };
  co_await in_jobs(context, "round params", 2 * values.bytes.size(), values.count(), work);
}

}  // namespace ziggurat
