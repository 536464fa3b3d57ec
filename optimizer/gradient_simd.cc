// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_simd.cc: gradient_scalar.cc for every target that Highway compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/gradient_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "optimizer/kernels.h"
#include "optimizer/simd_target.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 || HWY_HAVE_SCALABLE
void round_to_bf16_simd(const float* values, bf16* out, std::size_t count) {
  scalar::round_to_bf16(values, out, count);
}
void round_and_square_simd(const float* values, bf16* out, std::size_t count, float* lanes) {
  scalar::round_and_square(values, out, count, lanes);
}
#else

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::CappedTag<float, kSumLanes>;
using Words = hn::RebindToUnsigned<Floats>;
using Halves = hn::Repartition<bf16, Floats>;
using F = hn::Vec<Floats>;
using W = hn::Vec<Words>;
constexpr std::size_t kLanes = hn::MaxLanes(Floats());
constexpr std::size_t kSums = kSumLanes / kLanes;  // registers that hold the virtual lanes
constexpr std::size_t kStride = 2 * kSumLanes;     // whole pairs of registers on every target

/// The bf16 of each lane in its upper 16 bits; the lower ones are rubbish.
HWY_INLINE W round(F value) {
  const W bits = hn::BitCast(Words(), value);
  const W nearest = hn::Add(bits, hn::Set(Words(), 0x8000u));
  const W quiet_nan = hn::Or(bits, hn::Set(Words(), 0x00400000u));
  const auto is_nan = hn::RebindMask(Words(), hn::IsNaN(value));
  return hn::IfThenElse(is_nan, quiet_nan, nearest);
}

/// Both registers were loaded before this store: `out` may lie over their memory.
HWY_INLINE void store_pair(W low, W high, bf16* out) {
  const Halves d;
  hn::StoreU(hn::ConcatOdd(d, hn::BitCast(d, high), hn::BitCast(d, low)), d, out);
}

HWY_INLINE F square(W rounded) {
  const F widened = hn::BitCast(Floats(), hn::And(rounded, hn::Set(Words(), 0xffff0000u)));
  return hn::Mul(widened, widened);
}

void round_to_bf16_simd(const float* values, bf16* out, std::size_t count) {
  const Floats d;
  std::size_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const W low = round(hn::LoadU(d, values + i));
    const W high = round(hn::LoadU(d, values + i + kLanes));
    store_pair(low, high, out + i);
  }
  scalar::round_to_bf16(values + i, out + i, count - i);
}

void round_and_square_simd(const float* values, bf16* out, std::size_t count, float* lanes) {
  const Floats d;
  F sums[kSums];
  for (std::size_t s = 0; s < kSums; ++s) sums[s] = hn::LoadU(d, lanes + s * kLanes);
  std::size_t i = 0;
  for (; i + kStride <= count; i += kStride) {
    for (std::size_t r = 0; r < kStride / kLanes; r += 2) {
      const std::size_t at = i + r * kLanes;
      const W low = round(hn::LoadU(d, values + at));
      const W high = round(hn::LoadU(d, values + at + kLanes));
      store_pair(low, high, out + at);
      sums[r % kSums] = hn::Add(sums[r % kSums], square(low));
      sums[(r + 1) % kSums] = hn::Add(sums[(r + 1) % kSums], square(high));
    }
  }
  for (std::size_t s = 0; s < kSums; ++s) hn::StoreU(sums[s], d, lanes + s * kLanes);
  scalar::round_and_square(values + i, out + i, count - i,
                           lanes);  // kStride keeps i % kSumLanes at 0
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(round_to_bf16_simd);
HWY_EXPORT(round_and_square_simd);

void round_to_bf16(const float* values, bf16* out, std::size_t count) {
  select_kernel(scalar::round_to_bf16, HWY_DISPATCH_TABLE(round_to_bf16_simd))(values, out, count);
}

void round_and_square(const float* values, bf16* out, std::size_t count, float* lanes) {
  select_kernel(scalar::round_and_square, HWY_DISPATCH_TABLE(round_and_square_simd))(values, out,
                                                                                     count, lanes);
}

}  // namespace ziggurat::internal
#endif
