// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize_simd.cc: the blocks of quantize.cc, for every target for which
// Highway compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "collectives/quantize/quantize_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/numerics/block_scale.h"
#include "base/numerics/registers_inl.h"
#include "base/numerics/simd_target.h"
#include "collectives/quantize/quantize_blocks.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS

using ByteCodes = hn::Rebind<std::uint8_t, Floats>;  // as many 8-bit lanes
using SignedCodes = hn::Rebind<std::int8_t, Floats>;
using SignedWord = hn::Vec<SignedWords>;

constexpr std::size_t kHalfBlock = kQuantizedBlock / 2;
static_assert(kHalfBlock % kPair == 0);

template <DType kType>
HWY_INLINE Pair load_values(const std::byte* values, std::size_t i) {
  if constexpr (kType == DType::kFloat32) return load_fp32(values, i);
  if constexpr (kType == DType::kBFloat16) return InOrder::load_bf16(values, i);
  const WordPair halves = load_halves(values, i);
  return {widen_fp16(halves.low), widen_fp16(halves.high)};
}

/// No NaN comes here.
template <DType kType>
HWY_INLINE void store_values(Pair pair, std::byte* values, std::size_t i) {
  if constexpr (kType == DType::kFloat32) {
    store_fp32(pair, values, i);
  } else if constexpr (kType == DType::kBFloat16) {
    const W nearest = hn::Set(Words(), kNearestNoise);
    store_halves(InOrder::rounded_bf16(pair, {nearest, nearest}), values, i);
  } else {
    store_halves(upper_halves({round_fp16(pair.low), round_fp16(pair.high)}), values, i);
  }
}

template <DType kType>
HWY_INLINE std::uint32_t largest_bits(const std::byte* values) {
  const Words d;
  const W magnitude = hn::Set(d, 0x7fffffffu);
  W low = hn::Zero(d);
  W high = hn::Zero(d);
  for (std::size_t i = 0; i < kQuantizedBlock; i += kPair) {
    const Pair pair = load_values<kType>(values, i);
    low = hn::Max(low, hn::And(hn::BitCast(d, pair.low), magnitude));
    high = hn::Max(high, hn::And(hn::BitCast(d, pair.high), magnitude));
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(low, high)));
}

/// Returns the codes: `value` * `inverse` * `most`, rounded to nearest (x / L * q in quantize.h).
HWY_INLINE SignedWord code_of(F value, F inverse, F most) {
  const SignedWords d;
  const F scaled = hn::Mul(hn::Mul(value, inverse), most);
  const F shifted = hn::Add(scaled, hn::Set(Floats(), kIntegerShift));
  return hn::Sub(hn::BitCast(d, shifted), hn::Set(d, kIntegerShiftBits));
}

HWY_INLINE void store_bytes(SignedWord codes, std::byte* to) {
  hn::StoreU(hn::DemoteTo(SignedCodes(), codes), SignedCodes(), reinterpret_cast<std::int8_t*>(to));
}

template <DType kType>
HWY_INLINE void encode_8(const std::byte* values, F inverse, std::byte* codes) {
  const F most = hn::Set(Floats(), quantized_most(QuantizedBits::k8));
  for (std::size_t i = 0; i < kQuantizedBlock; i += kPair) {
    const Pair pair = load_values<kType>(values, i);
    store_bytes(code_of(pair.low, inverse, most), codes + i);
    store_bytes(code_of(pair.high, inverse, most), codes + i + kLanes);
  }
}

/// Stores bytes whose lower halves are `lower` and whose upper halves are `upper`.
HWY_INLINE void store_nibbles(SignedWord lower, SignedWord upper, std::byte* to) {
  const SignedWords d;
  const SignedWord bias = hn::Set(d, 8);
  const auto both = hn::Or(hn::Add(lower, bias), hn::ShiftLeft<4>(hn::Add(upper, bias)));
  hn::StoreU(hn::DemoteTo(ByteCodes(), both), ByteCodes(), reinterpret_cast<std::uint8_t*>(to));
}

template <DType kType>
HWY_INLINE void encode_4(const std::byte* values, F inverse, std::byte* codes) {
  const F most = hn::Set(Floats(), quantized_most(QuantizedBits::k4));
  for (std::size_t i = 0; i < kHalfBlock; i += kPair) {
    const Pair lower = load_values<kType>(values, i);
    const Pair upper = load_values<kType>(values, kHalfBlock + i);
    store_nibbles(code_of(lower.low, inverse, most), code_of(upper.low, inverse, most), codes + i);
    store_nibbles(code_of(lower.high, inverse, most), code_of(upper.high, inverse, most),
                  codes + i + kLanes);
  }
}

template <DType kType>
HWY_INLINE void quantize_typed(QuantizedBits bits, const std::byte* values, std::size_t count,
                               std::byte* blocks) {
  const std::size_t block_bytes = quantized_bytes(bits, kQuantizedBlock);
  for (std::size_t b = 0; b < count; ++b) {
    const std::byte* from = values + b * kQuantizedBlock * size_bytes(kType);
    std::byte* block = blocks + b * block_bytes;
    const BlockScale scale = block_scale(largest_bits<kType>(from));
    if (scale.inverse == 0.0f) {
      scalar::quantize_block(bits, kType, from, kQuantizedBlock, block);
      continue;
    }
    store_scale(block, scale.scale);
    const F inverse = hn::Set(Floats(), scale.inverse);
    if (bits == QuantizedBits::k8)
      encode_8<kType>(from, inverse, block + sizeof(float));
    else
      encode_4<kType>(from, inverse, block + sizeof(float));
  }
}

/// The factors that turn a code into a value.
struct Scale {
  F part, scale;
};
HWY_INLINE F decoded(SignedWord code, Scale scale) {
  return hn::Mul(hn::Mul(hn::ConvertTo(Floats(), code), scale.part), scale.scale);
}
HWY_INLINE F decoded_byte(const std::byte* codes, Scale scale) {
  const auto bytes = hn::LoadU(SignedCodes(), reinterpret_cast<const std::int8_t*>(codes));
  return decoded(hn::PromoteTo(SignedWords(), bytes), scale);
}
HWY_INLINE SignedWord nibbles_at(const std::byte* codes) {
  const auto bytes = hn::LoadU(ByteCodes(), reinterpret_cast<const std::uint8_t*>(codes));
  return hn::PromoteTo(SignedWords(), bytes);
}
HWY_INLINE F decoded_nibble(SignedWord nibble, Scale scale) {
  return decoded(hn::Sub(nibble, hn::Set(SignedWords(), 8)), scale);
}

/// Calls `take(i, pair)` with elements i .. i + kPair - 1 of a block.
template <class Take>
HWY_INLINE void decode_pairs(QuantizedBits bits, const std::byte* block, const Take& take) {
  const Scale scale{hn::Set(Floats(), quantized_part(bits)), hn::Set(Floats(), load_scale(block))};
  const std::byte* codes = block + sizeof(float);
  if (bits == QuantizedBits::k8) {
    for (std::size_t i = 0; i < kQuantizedBlock; i += kPair)
      take(i, Pair{decoded_byte(codes + i, scale), decoded_byte(codes + i + kLanes, scale)});
    return;
  }
  const SignedWord mask = hn::Set(SignedWords(), 15);
  for (std::size_t i = 0; i < kHalfBlock; i += kPair) {
    const SignedWord first = nibbles_at(codes + i);
    const SignedWord second = nibbles_at(codes + i + kLanes);
    take(i, Pair{decoded_nibble(hn::And(first, mask), scale),
                 decoded_nibble(hn::And(second, mask), scale)});
    take(kHalfBlock + i, Pair{decoded_nibble(hn::ShiftRight<4>(first), scale),
                              decoded_nibble(hn::ShiftRight<4>(second), scale)});
  }
}

template <DType kType>
HWY_INLINE void dequantize_typed(QuantizedBits bits, const std::byte* blocks, std::size_t count,
                                 std::byte* values) {
  const std::size_t block_bytes = quantized_bytes(bits, kQuantizedBlock);
  for (std::size_t b = 0; b < count; ++b) {
    std::byte* to = values + b * kQuantizedBlock * size_bytes(kType);
    const std::byte* block = blocks + b * block_bytes;
    const float scale = load_scale(block);
    if (!(scale - scale == 0.0f)) {  // a finite scale makes no NaN
      scalar::dequantize_block(bits, block, kQuantizedBlock, kType, to);
      continue;
    }
    decode_pairs(bits, block, [to](std::size_t i, Pair pair) { store_values<kType>(pair, to, i); });
  }
}

void quantize_simd(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                   std::byte* blocks) {
  switch (dtype) {
    case DType::kBFloat16: return quantize_typed<DType::kBFloat16>(bits, values, count, blocks);
    case DType::kFloat16: return quantize_typed<DType::kFloat16>(bits, values, count, blocks);
    case DType::kFloat32: return quantize_typed<DType::kFloat32>(bits, values, count, blocks);
  }
}

void dequantize_simd(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                     std::byte* values) {
  switch (dtype) {
    case DType::kBFloat16: return dequantize_typed<DType::kBFloat16>(bits, blocks, count, values);
    case DType::kFloat16: return dequantize_typed<DType::kFloat16>(bits, blocks, count, values);
    case DType::kFloat32: return dequantize_typed<DType::kFloat32>(bits, blocks, count, values);
  }
}

HWY_INLINE F quiet_sum(F sum, F value) {
  const F added = hn::Add(sum, value);
  const F nan = hn::BitCast(Floats(), hn::Set(Words(), kNaNBits));
  return hn::IfThenElse(hn::IsNaN(added), nan, added);
}

void add_simd(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums) {
  const std::size_t block_bytes = quantized_bytes(bits, kQuantizedBlock);
  for (std::size_t b = 0; b < count; ++b) {
    float* to = sums + b * kQuantizedBlock;
    decode_pairs(bits, blocks + b * block_bytes, [to](std::size_t i, Pair pair) {
      const Pair sum = load_fp32(to, i);
      store_fp32({quiet_sum(sum.low, pair.low), quiet_sum(sum.high, pair.high)}, to, i);
    });
  }
}

#else

void quantize_simd(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                   std::byte* blocks) {
  scalar::quantize_blocks(bits, dtype, values, count, blocks);
}
void dequantize_simd(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                     std::byte* values) {
  scalar::dequantize_blocks(bits, blocks, count, dtype, values);
}
void add_simd(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums) {
  scalar::add_blocks(bits, blocks, count, sums);
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(quantize_simd);
HWY_EXPORT(dequantize_simd);
HWY_EXPORT(add_simd);

void quantize_blocks(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                     std::byte* blocks) {
  select_kernel(scalar::quantize_blocks, HWY_DISPATCH_TABLE(quantize_simd))(bits, dtype, values,
                                                                            count, blocks);
}

void dequantize_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                       std::byte* values) {
  select_kernel(scalar::dequantize_blocks, HWY_DISPATCH_TABLE(dequantize_simd))(bits, blocks, count,
                                                                                dtype, values);
}

void add_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums) {
  select_kernel(scalar::add_blocks, HWY_DISPATCH_TABLE(add_simd))(bits, blocks, count, sums);
}

}  // namespace ziggurat::internal
#endif
