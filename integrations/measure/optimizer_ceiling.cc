// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_ceiling.cc: 64 elements of each stream at a time: whole cache
// lines, whatever the size of an element.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/measure/optimizer_ceiling.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstdint>

#include "integrations/measure/optimizer_ceiling.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::measure::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Words = hn::ScalableTag<std::uint32_t>;

/// The sum of `bytes` from `data` on, so that they are really read.
HWY_INLINE hn::Vec<Words> read_lines(const std::byte* data, std::size_t bytes) {
  const Words d;
  const auto* from = reinterpret_cast<const std::uint32_t*>(data);
  hn::Vec<Words> sum = hn::Zero(d);
  for (std::size_t i = 0; i < bytes / sizeof(*from); i += hn::Lanes(d))
    sum = hn::Add(sum, hn::Load(d, from + i));
  return sum;
}

HWY_INLINE void update_lines(std::byte* data, std::size_t bytes, hn::Vec<Words> with) {
  const Words d;
  auto* at = reinterpret_cast<std::uint32_t*>(data);
  for (std::size_t i = 0; i < bytes / sizeof(*at); i += hn::Lanes(d))
    hn::Store(hn::Xor(hn::Load(d, at + i), with), d, at + i);
}

void ceiling(const CeilingShape& shape_in, std::size_t elements) {
  CeilingShape shape = shape_in;
  for (std::size_t i = 0; i < elements; i += kCeilingElements) {
    const std::size_t read_bytes = shape.read.element_bytes * kCeilingElements;
    const hn::Vec<Words> with = read_lines(shape.read.data, read_bytes);
    shape.read.data += read_bytes;
    for (CeilingStream& stream : shape.in_place) {
      const std::size_t bytes = stream.element_bytes * kCeilingElements;
      update_lines(stream.data, bytes, with);
      stream.data += bytes;
    }
  }
}

}  // namespace ziggurat::measure::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::measure {

HWY_EXPORT(ceiling);

void run_ceiling(const CeilingShape& shape, std::size_t elements) {
  HWY_DYNAMIC_DISPATCH(ceiling)(shape, elements);
}

}  // namespace ziggurat::measure
#endif
