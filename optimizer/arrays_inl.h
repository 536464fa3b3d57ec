// SPDX-License-Identifier: Apache-2.0
// optimizer/arrays_inl.h: a slice's arrays as registers, two at a time: it widens gradients, loads
// and stores state in each format, and rounds parameters, with the bits of rounding.h. Included
// once per target.
#if defined(ZIGGURAT_OPTIMIZER_ARRAYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_OPTIMIZER_ARRAYS_INL_H_
#undef ZIGGURAT_OPTIMIZER_ARRAYS_INL_H_
#else
#define ZIGGURAT_OPTIMIZER_ARRAYS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/numerics/registers_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/rules_inl.h"

#if ZIGGURAT_HAVE_VECTORS

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

template <class Order>
HWY_INLINE Pair load_gradient(const Slice& slice, std::size_t i) {
  if (slice.grad_dtype == DType::kBFloat16) return Order::load_bf16(slice.grad, i);
  if (slice.grad_dtype == DType::kFloat32) return load_fp32(slice.grad, i);
  const WordPair halves = load_halves(slice.grad, i);
  return {widen_fp16(halves.low), widen_fp16(halves.high)};
}

/// The bits that are added before the lower half is cut off.
struct Noise {
  WordPair param, moment, second;
};

/// Does noise_bits (rounding.h) for kLanes elements.
HWY_INLINE W noise_bits(std::uint32_t first_key, std::uint32_t second_key, W index) {
  const Words d;
  W x = hn::Mul(index, hn::Set(d, 0x9e3779b9u));
  x = hn::Add(x, hn::Set(d, first_key));
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Mul(x, hn::Set(d, 0x21f0aaadu));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Add(x, hn::Set(d, second_key));
  x = hn::Mul(x, hn::Set(d, 0x735a2d97u));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, hn::Set(d, 0xed5ad4bbu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}
HWY_INLINE WordPair noise_pair(std::uint32_t first_key, std::uint32_t second_key,
                               WordPair indices) {
  return {noise_bits(first_key, second_key, indices.low),
          noise_bits(first_key, second_key, indices.high)};
}

HWY_INLINE WordPair upper_noise(WordPair draw) {
  return {hn::ShiftRight<16>(draw.low), hn::ShiftRight<16>(draw.high)};
}

/// Makes the noise of a pair. kMoments is the number of moments that are rounded; if it is 0,
/// drawn.moments must be false.
template <class Order, std::size_t kMoments>
HWY_INLINE Noise noise_of(Drawn drawn, const Slice& slice, std::size_t i) {
  const W nearest = hn::Set(Words(), kNearestNoise);
  const WordPair none{nearest, nearest};
  if (!drawn.param && !drawn.moments) return {none, none, none};
  const NoiseKey key = slice.noise_key;
  const WordPair index = Order::indices(slice.noise_index + static_cast<std::uint32_t>(i));
  const W mask = hn::Set(Words(), 0xffffu);
  const WordPair draw = noise_pair(key.first, key.second, index);
  const WordPair lower{hn::And(draw.low, mask), hn::And(draw.high, mask)};
  if (!drawn.moments) return {lower, none, none};
  if (!drawn.param) return {none, upper_noise(draw), lower};
  if (kMoments < 2) return {lower, upper_noise(draw), none};
  return {lower, upper_noise(draw),
          upper_noise(noise_pair(key.first, key.second + kSecondDraw, index))};
}

/// Returns whether to store parameters past the cache. That saves reading their lines first, 2 of
/// 30 bytes per element. It is not done for few parameters, which may be wanted soon, for addresses
/// that Stream does not accept, or for parameters that were read before.
HWY_INLINE bool store_params_past_cache(const Slice& slice) {
  constexpr std::size_t kFew = 1024;
  return slice.param != nullptr && slice.count >= kFew &&
         slice.param != reinterpret_cast<const std::byte*>(slice.param_in) &&
         reinterpret_cast<std::uintptr_t>(slice.param) % (kLanes * sizeof(float)) == 0;
}

template <class Order>
HWY_INLINE void store_param(Pair masters, WordPair noise, bool past_cache, const Slice& slice,
                            std::size_t i) {
  if (slice.param_dtype == DType::kFloat32) {
    store_fp32(masters, slice.param, i);
    return;
  }
  const hn::Vec<Halves> halves =
      slice.param_dtype == DType::kBFloat16
          ? Order::rounded_bf16(masters, noise)
          : upper_halves({round_fp16(masters.low), round_fp16(masters.high)});
  if (past_cache) {
    hn::Stream(halves, Halves(), reinterpret_cast<std::uint16_t*>(slice.param) + i);
  } else {
    store_halves(halves, slice.param, i);
  }
}

/// How masters of each kind are loaded and stored. kRounds says whether they are rounded to bf16 at
/// each step.
template <MasterArrays, class Order>
struct Masters;

template <>
struct Masters<MasterArrays::kFp32, InOrder> {
  static constexpr bool kRounds = false;
  static HWY_INLINE Pair load(const Slice& slice, std::size_t i) {
    return load_fp32(slice.master, i);
  }
  static HWY_INLINE void store(Pair masters, WordPair, const Slice& slice, std::size_t i) {
    store_fp32(masters, slice.master, i);
  }
};

template <>
struct Masters<MasterArrays::kSplit, InOrder> {
  static constexpr bool kRounds = false;
  static HWY_INLINE F join(W param, hn::Vec<SignedWords> residual) {
    return hn::BitCast(Floats(), hn::Add(hn::ShiftLeft<16>(param), hn::BitCast(Words(), residual)));
  }
  static HWY_INLINE Pair load(const Slice& slice, std::size_t i) {
    const WordPair params = load_halves(slice.param_in, i);
    const auto* residual = reinterpret_cast<const std::int16_t*>(slice.residual) + i;
    return {join(params.low, hn::PromoteTo(SignedWords(), hn::LoadU(SignedHalf(), residual))),
            join(params.high,
                 hn::PromoteTo(SignedWords(), hn::LoadU(SignedHalf(), residual + kLanes)))};
  }
  static HWY_INLINE void store(Pair masters, WordPair noise, const Slice& slice, std::size_t i) {
    store_halves(InOrder::rounded_bf16(masters, noise), slice.param_record, i);
    const auto low = hn::BitCast(Halves(), masters.low);
    const auto high = hn::BitCast(Halves(), masters.high);
    store_halves(hn::ConcatEven(Halves(), high, low), slice.residual, i);
  }
};

template <class Order>
struct Masters<MasterArrays::kBf16, Order> {
  static constexpr bool kRounds = true;
  static HWY_INLINE Pair load(const Slice& slice, std::size_t i) {
    return Order::load_bf16(slice.param_in, i);
  }
  static HWY_INLINE void store(Pair masters, WordPair noise, const Slice& slice, std::size_t i) {
    store_halves(Order::rounded_bf16(masters, noise), slice.param_record, i);
  }
};

/// How moments of each kind are; codes go through a block of the first kind (eight_bit_simd.cc).
template <MomentArrays, class Order>
struct Moments;

template <>
struct Moments<MomentArrays::kFp32, InOrder> {
  static constexpr bool kRounds = false;
  static HWY_INLINE Pair load(const std::byte* array, std::size_t i) { return load_fp32(array, i); }
  static HWY_INLINE void store(Pair values, WordPair, std::byte* array, std::size_t i) {
    store_fp32(values, array, i);
  }
};

template <class Order>
struct Moments<MomentArrays::kBf16, Order> {
  static constexpr bool kRounds = true;
  static HWY_INLINE Pair load(const std::byte* array, std::size_t i) {
    return Order::load_bf16(array, i);
  }
  static HWY_INLINE void store(Pair values, WordPair noise, std::byte* array, std::size_t i) {
    store_halves(Order::rounded_bf16(values, noise), array, i);
  }
};

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZIGGURAT_HAVE_VECTORS
#endif  // include guard per target
