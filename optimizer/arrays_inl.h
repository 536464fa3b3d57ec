// SPDX-License-Identifier: Apache-2.0
// optimizer/arrays_inl.h: a slice's arrays as registers, two at a time: gradients widened, state
// in each format, parameters rounded. Bits are those of rounding.h. Included once per target.
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

#include "base/float16_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/rules_inl.h"

#if ZIGGURAT_HAVE_VECTORS

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

using Halves = hn::Repartition<std::uint16_t, Floats>;   // twice as many 16-bit lanes
using HalfRegister = hn::Rebind<std::uint16_t, Floats>;  // as many 16-bit lanes
using SignedHalf = hn::Rebind<std::int16_t, Floats>;
using SignedWords = hn::RebindToSigned<Floats>;
constexpr std::size_t kPair = 2 * kLanes;

/// 2 * kLanes values.
struct Pair {
  F low, high;
};
struct WordPair {
  W low, high;
};

HWY_INLINE Pair load_fp32(const void* array, std::size_t i) {
  const auto* from = static_cast<const float*>(array) + i;
  return {hn::LoadU(Floats(), from), hn::LoadU(Floats(), from + kLanes)};
}
HWY_INLINE void store_fp32(Pair values, void* array, std::size_t i) {
  auto* to = static_cast<float*>(array) + i;
  hn::StoreU(values.low, Floats(), to);
  hn::StoreU(values.high, Floats(), to + kLanes);
}

HWY_INLINE WordPair load_halves(const void* array, std::size_t i) {
  const auto* from = static_cast<const std::uint16_t*>(array) + i;
  return {hn::PromoteTo(Words(), hn::LoadU(HalfRegister(), from)),
          hn::PromoteTo(Words(), hn::LoadU(HalfRegister(), from + kLanes))};
}
/// The upper halves of the words.
HWY_INLINE hn::Vec<Halves> upper_halves(WordPair words) {
  // Odd 16-bit lanes are the upper halves of 32-bit lanes; taking them so keeps their order on
  // every target.
  return hn::ConcatOdd(Halves(), hn::BitCast(Halves(), words.high),
                       hn::BitCast(Halves(), words.low));
}

HWY_INLINE F widen_bf16(W half) { return hn::BitCast(Floats(), hn::ShiftLeft<16>(half)); }
/// Adds noise; the lower halves are to be cut off. The only NaN that comes here (kNaNBits) survives
/// the addition.
HWY_INLINE WordPair with_noise(Pair values, WordPair noise) {
  return {hn::Add(hn::BitCast(Words(), values.low), noise.low),
          hn::Add(hn::BitCast(Words(), values.high), noise.high)};
}

/// Which elements of memory are in which register of a pair.
struct InOrder {
  static HWY_INLINE Pair load_bf16(const void* array, std::size_t i) {
    const WordPair halves = load_halves(array, i);
    return {widen_bf16(halves.low), widen_bf16(halves.high)};
  }
  static HWY_INLINE hn::Vec<Halves> rounded_bf16(Pair values, WordPair noise) {
    return upper_halves(with_noise(values, noise));
  }
  /// Of the elements from `first` on.
  static HWY_INLINE WordPair indices(std::uint32_t first) {
    const Words d;
    return {hn::Iota(d, first), hn::Iota(d, first + static_cast<std::uint32_t>(kLanes))};
  }
};

/// The even ones in one register, the odd ones in the other: where all arrays are bf16, nothing
/// then has to move from lane to lane, neither on the way in nor on the way out.
struct EvenOdd {
  static HWY_INLINE Pair load_bf16(const void* array, std::size_t i) {
    const W both =
        hn::BitCast(Words(), hn::LoadU(Halves(), static_cast<const std::uint16_t*>(array) + i));
    return {widen_bf16(both), hn::BitCast(Floats(), hn::And(both, hn::Set(Words(), 0xffff0000u)))};
  }
  static HWY_INLINE hn::Vec<Halves> rounded_bf16(Pair values, WordPair noise) {
    const WordPair sums = with_noise(values, noise);
    return hn::OddEven(hn::BitCast(Halves(), sums.high),
                       hn::BitCast(Halves(), hn::ShiftRight<16>(sums.low)));
  }
  static HWY_INLINE WordPair indices(std::uint32_t first) {
    const Words d;
    const W even = hn::Add(hn::ShiftLeft<1>(hn::Iota(d, 0u)), hn::Set(d, first));
    return {even, hn::Add(even, hn::Set(d, 1u))};
  }
};

HWY_INLINE void store_halves(hn::Vec<Halves> halves, void* array, std::size_t i) {
  hn::StoreU(halves, Halves(), static_cast<std::uint16_t*>(array) + i);
}

HWY_INLINE F widen_fp16(W half) { return float16::HWY_NAMESPACE::widen(Floats(), half); }
/// float_to_fp16, in the upper halves.
HWY_INLINE W round_fp16(F value) {
  return hn::ShiftLeft<16>(float16::HWY_NAMESPACE::round(Floats(), value));
}

template <class Order>
HWY_INLINE Pair load_gradient(const Slice& slice, std::size_t i) {
  if (slice.grad_dtype == DType::kBFloat16) return Order::load_bf16(slice.grad, i);
  if (slice.grad_dtype == DType::kFloat32) return load_fp32(slice.grad, i);
  const WordPair halves = load_halves(slice.grad, i);
  return {widen_fp16(halves.low), widen_fp16(halves.high)};
}

/// What is added before the lower half is cut off.
struct Noise {
  WordPair param, moment, second;
};

/// noise_bits (rounding.h) of kLanes elements.
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

template <class Order, bool kSecond>
HWY_INLINE Noise noise_of(bool stochastic, const Slice& slice, std::size_t i) {
  const W nearest = hn::Set(Words(), kNearestNoise);
  const WordPair none{nearest, nearest};
  if (!stochastic) return {none, none, none};
  const NoiseKey key = slice.noise_key;
  const WordPair index = Order::indices(slice.in_tile + static_cast<std::uint32_t>(i));
  const W lower = hn::Set(Words(), 0xffffu);
  const WordPair draw = noise_pair(key.first, key.second, index);
  const WordPair second = kSecond ? noise_pair(key.first, key.second + kSecondDraw, index) : none;
  return {{hn::And(draw.low, lower), hn::And(draw.high, lower)},
          {hn::ShiftRight<16>(draw.low), hn::ShiftRight<16>(draw.high)},
          {hn::ShiftRight<16>(second.low), hn::ShiftRight<16>(second.high)}};
}

/// Parameters that are only written are stored past the cache, which saves reading their lines
/// first: 2 of 30 bytes an element. Not for few of them, which somebody may want soon, nor for
/// addresses that Stream cannot take, nor where they were read.
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

/// Masters as a format keeps them, then moments.
struct Fp32Masters {
  static HWY_INLINE Pair load(const Slice& slice, std::size_t i) {
    return load_fp32(slice.master, i);
  }
  static HWY_INLINE void store(Pair masters, WordPair, const Slice& slice, std::size_t i) {
    store_fp32(masters, slice.master, i);
  }
};

struct SplitMasters {
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
struct Bf16Masters {
  static HWY_INLINE Pair load(const Slice& slice, std::size_t i) {
    return Order::load_bf16(slice.param_in, i);
  }
  static HWY_INLINE void store(Pair masters, WordPair noise, const Slice& slice, std::size_t i) {
    store_halves(Order::rounded_bf16(masters, noise), slice.param_record, i);
  }
};

struct Fp32Moments {
  static constexpr bool kRounds = false;
  static HWY_INLINE Pair load(const std::byte* array, std::size_t i) { return load_fp32(array, i); }
  static HWY_INLINE void store(Pair values, WordPair, std::byte* array, std::size_t i) {
    store_fp32(values, array, i);
  }
};

template <class Order>
struct Bf16Moments {
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
