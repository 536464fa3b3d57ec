// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_simd.cc: gradient_scalar.cc for every target for which Highway compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/gradient_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/numerics/simd_target.h"
#include "optimizer/arrays_inl.h"
#include "optimizer/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS

static_assert(kLanes <= kSumLanes);
constexpr std::size_t kSums = kSumLanes / kLanes;  // registers that hold the virtual lanes
constexpr std::size_t kStride = 2 * kSumLanes;     // a whole number of register pairs on every
                                                   // target

/// Rounds each lane to bf16 in its upper 16 bits; the lower ones are not defined. A NaN keeps its
/// payload, as in float_to_bf16.
HWY_INLINE W round_bf16(F value) {
  const W bits = hn::BitCast(Words(), value);
  const W nearest = hn::Add(bits, hn::Set(Words(), 0x8000u));
  const W quiet_nan = hn::Or(bits, hn::Set(Words(), 0x00400000u));
  const auto is_nan = hn::RebindMask(Words(), hn::IsNaN(value));
  return hn::IfThenElse(is_nan, quiet_nan, nearest);
}

HWY_INLINE F square(F value) { return hn::Mul(value, value); }

/// Rounds a pair into `out`, and returns the squares. `out` may lie over the values, because both
/// registers are loaded before the store.
template <DType kTo>
HWY_INLINE Pair round_pair(const float* values, std::byte* out, std::size_t i) {
  const Pair pair = load_fp32(values, i);
  if constexpr (kTo == DType::kFloat32) {
    store_fp32(pair, out, i);
    return {square(pair.low), square(pair.high)};
  } else if constexpr (kTo == DType::kFloat16) {
    const WordPair halves{round_fp16(pair.low), round_fp16(pair.high)};
    store_halves(upper_halves(halves), out, i);
    return {square(widen_fp16(hn::ShiftRight<16>(halves.low))),
            square(widen_fp16(hn::ShiftRight<16>(halves.high)))};
  } else {
    const W upper = hn::Set(Words(), 0xffff0000u);
    const WordPair halves{hn::And(round_bf16(pair.low), upper),
                          hn::And(round_bf16(pair.high), upper)};
    store_halves(upper_halves(halves), out, i);
    return {square(hn::BitCast(Floats(), halves.low)), square(hn::BitCast(Floats(), halves.high))};
  }
}

void round_to_bf16_simd(const float* values, bf16* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    const Pair pair = load_fp32(values, i);
    store_halves(upper_halves({round_bf16(pair.low), round_bf16(pair.high)}), out, i);
  }
  scalar::round_to_bf16(values + i, out + i, count - i);
}

template <DType kTo>
HWY_INLINE void round_and_square_to(const float* values, std::byte* out, std::size_t count,
                                    float* lanes) {
  const Floats d;
  F sums[kSums];
  for (std::size_t s = 0; s < kSums; ++s) sums[s] = hn::LoadU(d, lanes + s * kLanes);
  std::size_t i = 0;
  for (; i + kStride <= count; i += kStride) {
    for (std::size_t r = 0; r < kStride / kLanes; r += 2) {
      const Pair squares = round_pair<kTo>(values, out, i + r * kLanes);
      sums[r % kSums] = hn::Add(sums[r % kSums], squares.low);
      sums[(r + 1) % kSums] = hn::Add(sums[(r + 1) % kSums], squares.high);
    }
  }
  for (std::size_t s = 0; s < kSums; ++s) hn::StoreU(sums[s], d, lanes + s * kLanes);
  // kStride keeps i % kSumLanes at 0
  scalar::round_and_square(values + i, kTo, out + i * size_bytes(kTo), count - i, lanes);
}

void round_and_square_simd(const float* values, DType dtype, std::byte* out, std::size_t count,
                           float* lanes) {
  switch (dtype) {
    case DType::kBFloat16: return round_and_square_to<DType::kBFloat16>(values, out, count, lanes);
    case DType::kFloat16: return round_and_square_to<DType::kFloat16>(values, out, count, lanes);
    case DType::kFloat32: return round_and_square_to<DType::kFloat32>(values, out, count, lanes);
  }
}

#else

void round_to_bf16_simd(const float* values, bf16* out, std::size_t count) {
  scalar::round_to_bf16(values, out, count);
}
void round_and_square_simd(const float* values, DType dtype, std::byte* out, std::size_t count,
                           float* lanes) {
  scalar::round_and_square(values, dtype, out, count, lanes);
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

void round_and_square(const float* values, DType dtype, std::byte* out, std::size_t count,
                      float* lanes) {
  select_kernel(scalar::round_and_square, HWY_DISPATCH_TABLE(round_and_square_simd))(
      values, dtype, out, count, lanes);
}

}  // namespace ziggurat::internal
#endif
