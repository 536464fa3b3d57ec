// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_ceiling.cc: walks through the streams, a run of each in turn, in
// registers.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/measure/optimizer_ceiling.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <numeric>

#include "integrations/measure/optimizer_ceiling.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::measure::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Words = hn::ScalableTag<std::uint32_t>;
using W = hn::Vec<Words>;

constexpr std::size_t kLineBytes = 64;

/// Calls `body` for four registers per turn, so that the loop itself costs nothing beside the lines
/// that it moves.
template <class Body>
HWY_INLINE void for_each_register(std::size_t bytes, const Body& body) {
  const std::size_t step = hn::Lanes(Words());
  const std::size_t count = bytes / sizeof(std::uint32_t);
  std::size_t i = 0;
  for (; i + 4 * step <= count; i += 4 * step) {
    body(i);
    body(i + step);
    body(i + 2 * step);
    body(i + 3 * step);
  }
  for (; i < count; i += step) body(i);
}

HWY_INLINE void ask_ahead(const std::byte* data, std::size_t bytes, std::size_t ahead_bytes) {
  if (ahead_bytes == 0) return;
  for (std::size_t at = 0; at < bytes; at += kLineBytes) hwy::Prefetch(data + ahead_bytes + at);
}

HWY_INLINE W read_run(const std::byte* data, std::size_t bytes, W sum) {
  const Words d;
  const auto* const from = reinterpret_cast<const std::uint32_t*>(data);
  for_each_register(bytes, [&](std::size_t i) { sum = hn::Add(sum, hn::Load(d, from + i)); });
  return sum;
}

template <bool kPastCache>
HWY_INLINE void update_run(std::byte* data, std::size_t bytes, W with) {
  const Words d;
  auto* const at = reinterpret_cast<std::uint32_t*>(data);
  for_each_register(bytes, [&](std::size_t i) {
    const W value = hn::Xor(hn::Load(d, at + i), with);
    if (kPastCache)
      hn::Stream(value, d, at + i);
    else
      hn::Store(value, d, at + i);
  });
}

HWY_INLINE void write_run(std::byte* data, std::size_t bytes, W value) {
  const Words d;
  auto* const to = reinterpret_cast<std::uint32_t*>(data);
  for_each_register(bytes, [&](std::size_t i) { hn::Stream(value, d, to + i); });
}

template <bool kPastCache>
std::uint32_t walk_streams(CeilingShape shape, const CeilingWalk& walk, std::size_t elements,
                           std::uint32_t zero) {
  const Words d;
  const W with = hn::Set(d, zero);
  W sum = hn::Zero(d);
  const auto run_bytes = [&](const CeilingStream& stream) {
    return stream.element_bytes * walk.run_elements;
  };
  for (std::size_t i = 0; i < elements; i += walk.run_elements) {
    ask_ahead(shape.read.data, run_bytes(shape.read), walk.ahead_bytes);
    sum = read_run(shape.read.data, run_bytes(shape.read), sum);
    shape.read.data += run_bytes(shape.read);
    for (CeilingStream& stream : shape.in_place) {
      if (stream.element_bytes == 0) break;
      ask_ahead(stream.data, run_bytes(stream), walk.ahead_bytes);
      update_run<kPastCache>(stream.data, run_bytes(stream), with);
      stream.data += run_bytes(stream);
    }
    write_run(shape.written.data, run_bytes(shape.written), with);
    shape.written.data += run_bytes(shape.written);
  }
  // Added by hand: GCC's reduction of 512 bits adds signed numbers, which overflow.
  HWY_ALIGN std::array<std::uint32_t, hn::MaxLanes(Words())> lanes{};
  hn::Store(sum, d, lanes.data());
  return std::accumulate(lanes.begin(), lanes.end(), std::uint32_t{0});
}

std::uint32_t ceiling(const CeilingShape& shape, const CeilingWalk& walk, std::size_t elements,
                      std::uint32_t zero) {
  return walk.past_cache ? walk_streams<true>(shape, walk, elements, zero)
                         : walk_streams<false>(shape, walk, elements, zero);
}

}  // namespace ziggurat::measure::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::measure {

HWY_EXPORT(ceiling);

void run_ceiling(const CeilingShape& shape, const CeilingWalk& walk, std::size_t elements) {
  // A compiler that knew that this is zero would not write, and one that knew that the sum is not
  // used would not read.
  static volatile std::uint32_t zero = 0;
  static std::atomic<std::uint32_t> sums{0};
  sums += HWY_DYNAMIC_DISPATCH(ceiling)(shape, walk, elements, zero);
  hwy::FlushStream();
}

}  // namespace ziggurat::measure
#endif
