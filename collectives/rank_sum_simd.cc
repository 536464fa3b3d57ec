// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum_simd.cc: rank_sum.cc for every target for which Highway compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "collectives/rank_sum_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/numerics/float16_inl.h"
#include "base/numerics/rounding.h"
#include "base/numerics/simd_target.h"
#include "collectives/rank_sum.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::ranks::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Contributions = std::span<const std::byte* const>;

#if HWY_TARGET != HWY_SCALAR

using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;
using HalfRegister = hn::Rebind<std::uint16_t, Floats>;
using F = hn::Vec<Floats>;

template <DType kType>
HWY_INLINE F widened(const std::byte* values, std::size_t i) {
  if constexpr (kType == DType::kFloat32) {
    return hn::LoadU(Floats(), reinterpret_cast<const float*>(values) + i);
  } else {
    const auto half = hn::PromoteTo(
        Words(), hn::LoadU(HalfRegister(), reinterpret_cast<const std::uint16_t*>(values) + i));
    if constexpr (kType == DType::kFloat16) return float16::HWY_NAMESPACE::widen(Floats(), half);
    return hn::BitCast(Floats(), hn::ShiftLeft<16>(half));
  }
}

template <DType kType>
HWY_INLINE void store_rounded(F total, std::byte* sum, std::size_t i) {
  total =
      hn::IfThenElse(hn::IsNaN(total), hn::BitCast(Floats(), hn::Set(Words(), kNaNBits)), total);
  if constexpr (kType == DType::kFloat32) {
    hn::StoreU(total, Floats(), reinterpret_cast<float*>(sum) + i);
  } else {
    auto half = hn::Zero(Words());
    if constexpr (kType == DType::kFloat16) {
      half = float16::HWY_NAMESPACE::round(Floats(), total);
    } else {  // the one NaN stays a NaN in this addition
      half = hn::ShiftRight<16>(hn::Add(hn::BitCast(Words(), total), hn::Set(Words(), 0x8000u)));
    }
    hn::StoreU(hn::TruncateTo(HalfRegister(), half), HalfRegister(),
               reinterpret_cast<std::uint16_t*>(sum) + i);
  }
}

template <DType kType>
HWY_INLINE std::size_t sum_registers(Contributions contributions, std::size_t count,
                                     std::byte* sum) {
  const std::size_t lanes = hn::Lanes(Floats());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    F total = widened<kType>(contributions[0], i);
    for (std::size_t r = 1; r < contributions.size(); ++r) {
      total = hn::Add(total, widened<kType>(contributions[r], i));
    }
    store_rounded<kType>(total, sum, i);
  }
  return i;
}

void rank_sum_simd(Contributions contributions, DType dtype, std::size_t first, std::size_t count,
                   std::byte* sum) {
  std::size_t done = first;
  switch (dtype) {
    case DType::kFloat32: done = sum_registers<DType::kFloat32>(contributions, count, sum); break;
    case DType::kBFloat16: done = sum_registers<DType::kBFloat16>(contributions, count, sum); break;
    case DType::kFloat16: done = sum_registers<DType::kFloat16>(contributions, count, sum); break;
  }
  scalar::sum_in_rank_order(contributions, dtype, done, count, sum);
}

#else

void rank_sum_simd(Contributions contributions, DType dtype, std::size_t first, std::size_t count,
                   std::byte* sum) {
  scalar::sum_in_rank_order(contributions, dtype, first, count, sum);
}

#endif

}  // namespace ziggurat::ranks::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::ranks {

HWY_EXPORT(rank_sum_simd);

void rank_sum(std::span<const std::byte* const> contributions, DType dtype, std::size_t count,
              std::byte* sum) {
  internal::select_kernel(scalar::sum_in_rank_order, HWY_DISPATCH_TABLE(rank_sum_simd))(
      contributions, dtype, 0, count, sum);
}

}  // namespace ziggurat::ranks

namespace ziggurat {

void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t count, std::byte* sum) {
  ranks::rank_sum(contributions, dtype, count, sum);
}

}  // namespace ziggurat
#endif
