// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw_hashed_simd.cc: AdamW over a tile, hashing what it loads and what it stores.
//
// Hashing the tile with the library before and after the update leaves memory idle meanwhile, even
// from L2: 1.7 times the time of this one pass. Registers of 256 bits or more only: narrower ones
// cannot hold so many hashes at once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/adamw_hashed_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include "optimizer/adamw_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/simd_target.h"
#include "optimizer/xxh3.h"
#include "tiers/record_hash.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS && HWY_TARGET <= HWY_AVX2

using Longs = hn::Repartition<std::uint64_t, Floats>;
using Bytes = hn::Repartition<std::uint8_t, Floats>;
using W = hn::Vec<Words>;
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

  // Spelt out: GCC does not compile an implicit constructor for the target at hand.
  HWY_INLINE ArrayHash()
      : first(hn::Load(Longs(), xxh3::kFirstLanes)),
        second(hn::Load(Longs(), xxh3::kFirstLanes + (kStripeIsOneRegister ? 0 : 4))) {}

  /// Two registers in a row: two stripes, or the halves of one.
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
  HWY_INLINE void add(const Elements& low, const Elements& high, W low_key, W high_key) {
    master.add(low.master, high.master, low_key, high_key);
    exp_avg.add(low.exp_avg, high.exp_avg, low_key, high_key);
    exp_avg_sq.add(low.exp_avg_sq, high.exp_avg_sq, low_key, high_key);
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

constexpr std::size_t kPair = 2 * kLanes;
constexpr std::size_t kBlock = xxh3::kStripesPerBlock * xxh3::kStripeBytes / sizeof(float);
// How far the secret slides from the first register of a pair to the second, and from pair to pair.
constexpr std::size_t kSecond = kStripeIsOneRegister ? xxh3::kSecretStep : kRegisterBytes;
constexpr std::size_t kNext = kStripeIsOneRegister ? 2 * xxh3::kSecretStep : xxh3::kSecretStep;

template <bool kVerify, bool kPastCache>
HWY_INLINE void update_pair(const AdamWStep& step, const AdamWSlice& tile, std::size_t i, W low_key,
                            W high_key, ThreeHashes& before) {
  const Elements low_old = load(tile, i);
  const Elements high_old = load(tile, i + kLanes);
  if (kVerify) before.add(low_old, high_old, low_key, high_key);
  const Elements low = updated(step, tile.decay_factor, low_old, load_gradient(tile, i));
  const Elements high = updated(step, tile.decay_factor, high_old, load_gradient(tile, i + kLanes));
  store(low, tile, i);
  store(high, tile, i + kLanes);
  store_params<kPastCache>(low.master, high.master, tile, i);
}

/// One block of the hashes. The new state is hashed in a loop of its own, from L1: in the first one
/// it would wait behind root and division, and fill the scheduler while it does (0.43 against 0.36
/// ns an element with the tile in L2).
template <bool kVerify, bool kPastCache>
HWY_INLINE void update_block(const AdamWStep& step, const AdamWSlice& tile, std::size_t begin,
                             bool is_last, ThreeHashes& before, ThreeHashes& after) {
  const std::size_t end = begin + kBlock - (is_last ? kPair : 0);
  std::size_t i = begin;
  std::size_t key = 0;
  for (; i < end; i += kPair, key += kNext) {
    update_pair<kVerify, kPastCache>(step, tile, i, secret(key), secret(key + kSecond), before);
  }
  // The last stripe of all has a key of its own, and no scramble after it.
  const W low_key = secret(kStripeIsOneRegister ? key : xxh3::kLastStripeSecret);
  const W high_key = secret(xxh3::kLastStripeSecret + (kStripeIsOneRegister ? 0 : kRegisterBytes));
  if (is_last) update_pair<kVerify, kPastCache>(step, tile, i, low_key, high_key, before);

  for (i = begin, key = 0; i < end; i += kPair, key += kNext) {
    after.add(load(tile, i), load(tile, i + kLanes), secret(key), secret(key + kSecond));
  }
  if (is_last) {
    after.add(load(tile, i), load(tile, i + kLanes), low_key, high_key);
    return;
  }
  if (kVerify) before.end_block();
  after.end_block();
}

template <bool kVerify, bool kPastCache>
void hashed_tile(const AdamWStep& step_in, const AdamWSlice& tile_in, TileHashes& hashes) {
  const AdamWStep step = step_in;  // copies: see adamw_simd.cc
  const AdamWSlice tile = tile_in;
  ThreeHashes before, after;
  constexpr std::size_t kLast = kTileElements - kBlock;
  for (std::size_t i = 0; i < kLast; i += kBlock) {
    update_block<kVerify, kPastCache>(step, tile, i, false, before, after);
  }
  update_block<kVerify, kPastCache>(step, tile, kLast, true, before, after);
  if (kVerify) before.finish(hashes.before);
  after.finish(hashes.after);
}

void adamw_hashed_simd(const AdamWStep& step, const AdamWSlice& tile, bool verify,
                       TileHashes& hashes) {
  if (store_params_past_cache(tile)) {
    verify ? hashed_tile<true, true>(step, tile, hashes)
           : hashed_tile<false, true>(step, tile, hashes);
    hwy::FlushStream();
  } else {
    verify ? hashed_tile<true, false>(step, tile, hashes)
           : hashed_tile<false, false>(step, tile, hashes);
  }
}

#else
void adamw_hashed_simd(const AdamWStep& step, const AdamWSlice& tile, bool verify,
                       TileHashes& hashes) {
  hash_around(tile, verify, hashes, [&] { adamw(step, tile); });
}
#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(adamw_hashed_simd);

void adamw_hashed_in_passes(const AdamWStep& step, const AdamWSlice& tile, bool verify,
                            TileHashes& hashes) {
  hash_around(tile, verify, hashes, [&] { adamw(step, tile); });
}

void adamw_hashed(const AdamWStep& step, const AdamWSlice& tile, bool verify, TileHashes& hashes) {
  select_kernel(adamw_hashed_in_passes, HWY_DISPATCH_TABLE(adamw_hashed_simd))(step, tile, verify,
                                                                               hashes);
}

}  // namespace ziggurat::internal
#endif
