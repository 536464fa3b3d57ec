// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw_hashed_simd.cc: AdamW over a tile, which hashes what it loads and what it stores.
//
// To hash the tile with the library before and after the update takes 1.7 times the time of this
// one pass, even from L2, because memory is idle meanwhile. Used with registers of 256 bits or more
// only: narrower ones cannot hold so many hashes at once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/adamw_hashed_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include "base/numerics/simd_target.h"
#include "optimizer/arrays_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/rules_inl.h"
#include "optimizer/xxh3.h"
#include "tiers/store/record_hash.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS && HWY_TARGET <= HWY_AVX2

using Longs = hn::Repartition<std::uint64_t, Floats>;
using Bytes = hn::Repartition<std::uint8_t, Floats>;
using L = hn::Vec<Longs>;
constexpr std::size_t kRegisterBytes = kLanes * sizeof(float);
constexpr bool kStripeIsOneRegister = kRegisterBytes == xxh3::kStripeBytes;
static_assert(kStripeIsOneRegister || 2 * kRegisterBytes == xxh3::kStripeBytes);

HWY_INLINE W secret(std::size_t offset) {
  return hn::BitCast(Words(), hn::LoadU(Bytes(), xxh3::secret(offset)));
}

HWY_INLINE void accumulate(L& lanes, F values, W key) {
  const W data = hn::BitCast(Words(), values);
  const W keyed = hn::Xor(data, key);
  const L product = hn::MulEven(keyed, hn::Shuffle2301(keyed));
  lanes = hn::Add(product, hn::Add(lanes, hn::BitCast(Longs(), hn::Shuffle1032(data))));
}

HWY_INLINE void scramble(L& lanes, W key) {
  const L mixed = hn::Xor(lanes, hn::ShiftRight<47>(lanes));
  const W keyed = hn::Xor(hn::BitCast(Words(), mixed), key);
  const W prime = hn::Set(Words(), xxh3::kPrime32_1);
  const L upper = hn::MulEven(hn::Shuffle2301(keyed), prime);
  lanes = hn::Add(hn::MulEven(keyed, prime), hn::ShiftLeft<32>(upper));
}

/// The eight lanes of one array's hash: one register, or two of which `second` is the upper half.
struct ArrayHash {
  L first, second;

  // Written out, because GCC does not compile an implicit constructor for this target.
  HWY_INLINE ArrayHash()
      : first(hn::Load(Longs(), xxh3::kConstants.first_lanes)),
        second(hn::Load(Longs(), xxh3::kConstants.first_lanes + (kStripeIsOneRegister ? 0 : 4))) {}

  /// Adds two registers in a row: two stripes, or the halves of one.
  HWY_INLINE void add(F low, F high, W low_key, W high_key) {
    accumulate(first, low, low_key);
    accumulate(kStripeIsOneRegister ? first : second, high, high_key);
  }
  HWY_INLINE void end_block() {
    scramble(first, secret(xxh3::kScrambleSecret));
    if (!kStripeIsOneRegister) scramble(second, secret(xxh3::kScrambleSecret + kRegisterBytes));
  }
  HWY_INLINE std::uint64_t finish() const {
    alignas(64) std::uint64_t lanes[8];
    hn::Store(first, Longs(), lanes);
    if (!kStripeIsOneRegister) hn::Store(second, Longs(), lanes + 4);
    return xxh3::fold(lanes, kTileBytes);
  }
};

struct ThreeHashes {
  ArrayHash master, exp_avg, exp_avg_sq;

  HWY_INLINE ThreeHashes() {}
  HWY_INLINE void add(Pair masters, Pair exp_avgs, Pair exp_avg_sqs, W low_key, W high_key) {
    master.add(masters.low, masters.high, low_key, high_key);
    exp_avg.add(exp_avgs.low, exp_avgs.high, low_key, high_key);
    exp_avg_sq.add(exp_avg_sqs.low, exp_avg_sqs.high, low_key, high_key);
  }
  HWY_INLINE void add(const Slice& tile, std::size_t i, W low_key, W high_key) {
    add(load_fp32(tile.master, i), load_fp32(tile.moments[0], i), load_fp32(tile.moments[1], i),
        low_key, high_key);
  }
  HWY_INLINE void end_block() {
    master.end_block();
    exp_avg.end_block();
    exp_avg_sq.end_block();
  }
  HWY_INLINE void finish(std::uint64_t (&hashes)[3]) const {
    hashes[0] = master.finish();
    hashes[1] = exp_avg.finish();
    hashes[2] = exp_avg_sq.finish();
  }
};

constexpr std::size_t kBlock = xxh3::kStripesPerBlock * xxh3::kStripeBytes / sizeof(float);
// How far the secret moves from the first register of a pair to the second, and from pair to pair.
constexpr std::size_t kSecond = kStripeIsOneRegister ? xxh3::kSecretStep : kRegisterBytes;
constexpr std::size_t kNext = kStripeIsOneRegister ? 2 * xxh3::kSecretStep : xxh3::kSecretStep;

template <bool kVerify, bool kPastCache>
HWY_INLINE void update_pair(const OptimizerStep& step, const Slice& tile, std::size_t i, W low_key,
                            W high_key, ThreeHashes& before) {
  const Pair old = load_fp32(tile.master, i);
  const Pair exp_avg = load_fp32(tile.moments[0], i);
  const Pair exp_avg_sq = load_fp32(tile.moments[1], i);
  if (kVerify) before.add(old, exp_avg, exp_avg_sq, low_key, high_key);
  const Pair gradient = InOrder::load_bf16(tile.grad, i);
  const Elements low =
      AdamWRule::updated(step, tile.decay, {old.low, exp_avg.low, exp_avg_sq.low}, gradient.low);
  const Elements high = AdamWRule::updated(
      step, tile.decay, {old.high, exp_avg.high, exp_avg_sq.high}, gradient.high);
  const Pair master{low.master, high.master};
  store_fp32(master, tile.master, i);
  store_fp32({low.moment, high.moment}, tile.moments[0], i);
  store_fp32({low.second, high.second}, tile.moments[1], i);
  const W nearest = hn::Set(Words(), kNearestNoise);
  const hn::Vec<Halves> param = InOrder::rounded_bf16(master, {nearest, nearest});
  if (kPastCache) {
    hn::Stream(param, Halves(), reinterpret_cast<std::uint16_t*>(tile.param) + i);
  } else {
    store_halves(param, tile.param, i);
  }
}

/// Updates one block and its hashes. The new state is hashed in a second loop, from L1: in the
/// first loop its hashing would wait for root and division, and fill the scheduler meanwhile (0.43
/// against 0.36 ns per element with the tile in L2).
template <bool kVerify, bool kPastCache>
HWY_INLINE void update_block(const OptimizerStep& step, const Slice& tile, std::size_t begin,
                             bool is_last, ThreeHashes& before, ThreeHashes& after) {
  const std::size_t end = begin + kBlock - (is_last ? kPair : 0);
  std::size_t i = begin;
  std::size_t key = 0;
  for (; i < end; i += kPair, key += kNext) {
    update_pair<kVerify, kPastCache>(step, tile, i, secret(key), secret(key + kSecond), before);
  }
  // The last stripe of the tile has a key of its own, and no scramble after it.
  const W low_key = secret(kStripeIsOneRegister ? key : xxh3::kLastStripeSecret);
  const W high_key = secret(xxh3::kLastStripeSecret + (kStripeIsOneRegister ? 0 : kRegisterBytes));
  if (is_last) update_pair<kVerify, kPastCache>(step, tile, i, low_key, high_key, before);

  for (i = begin, key = 0; i < end; i += kPair, key += kNext) {
    after.add(tile, i, secret(key), secret(key + kSecond));
  }
  if (is_last) {
    after.add(tile, i, low_key, high_key);
    return;
  }
  if (kVerify) before.end_block();
  after.end_block();
}

template <bool kVerify, bool kPastCache>
void hashed_tile(const OptimizerStep& step_in, const Slice& tile_in, TileHashes& hashes) {
  const OptimizerStep step = step_in;  // copies: see update_inl.h
  const Slice tile = tile_in;
  ThreeHashes before, after;
  constexpr std::size_t kLast = kTileElements - kBlock;
  for (std::size_t i = 0; i < kLast; i += kBlock) {
    update_block<kVerify, kPastCache>(step, tile, i, false, before, after);
  }
  update_block<kVerify, kPastCache>(step, tile, kLast, true, before, after);
  if (kVerify) before.finish(hashes.before);
  after.finish(hashes.after);
}

void adamw_hashed_simd(const OptimizerStep& step, const Slice& tile, bool verify,
                       TileHashes& hashes) {
  if (store_params_past_cache(tile)) {
    verify ? hashed_tile<true, true>(step, tile, hashes)
           : hashed_tile<false, true>(step, tile, hashes);
  } else {
    verify ? hashed_tile<true, false>(step, tile, hashes)
           : hashed_tile<false, false>(step, tile, hashes);
  }
}
bool wide_registers() { return true; }

#else
void adamw_hashed_simd(const OptimizerStep&, const Slice&, bool, TileHashes&) {}
bool wide_registers() { return false; }
#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(adamw_hashed_simd);
HWY_EXPORT(wide_registers);

bool no_registers() { return false; }
void hash_nothing(const OptimizerStep&, const Slice&, bool, TileHashes&) {}

bool can_hash_adamw(const OptimizerStep& step, const Slice& tile) {
  return step.kind == OptimizerKind::kAdamW && step.rounding.params == Rounding::kNearest &&
         tile.format == StateFormat::kFp32 && tile.grad_dtype == DType::kBFloat16 &&
         tile.param_dtype == DType::kBFloat16 &&
         reinterpret_cast<std::uintptr_t>(tile.param) % kStreamAlignment == 0 &&
         select_kernel(no_registers, HWY_DISPATCH_TABLE(wide_registers))();
}

void adamw_hashed(const OptimizerStep& step, const Slice& tile, bool verify, TileHashes& hashes) {
  select_kernel(hash_nothing, HWY_DISPATCH_TABLE(adamw_hashed_simd))(step, tile, verify, hashes);
}

}  // namespace ziggurat::internal
#endif
