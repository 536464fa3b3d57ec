// SPDX-License-Identifier: Apache-2.0
// base/checksum.cc: XXH3 with the library's own run-time dispatch: it takes 0.013 CPU seconds per
// GB from L2, and plain SSE2 takes 0.059 (0.033 and 0.060 from DRAM; AVX-512, xxHash 0.8.1).
#include "base/checksum.h"

#define XXH_DISPATCH_DISABLE_REPLACE
#include <xxhash.h>
#if defined(__x86_64__)
#include <immintrin.h>
#include <xxh_x86dispatch.h>

#include "base/log.h"

// Declared weak, because distributions build the dispatching forms into the shared library only
// (Debian's libxxhash.a lacks them).
extern "C" XXH64_hash_t XXH3_64bits_withSeed_dispatch(const void* input, std::size_t length,
                                                      XXH64_hash_t seed) __attribute__((weak));
#endif

namespace ziggurat {
namespace {

using Hash = XXH64_hash_t (*)(const void*, std::size_t, XXH64_hash_t);

#if defined(__x86_64__)

/// Clears the upper halves of the registers, which the library's AVX-512 loop (0.8.1) leaves in
/// use. Until they are cleared, every SSE instruction of this thread merges into them: scalar AdamW
/// ran 4.6 times slower after a hash.
__attribute__((target("avx"))) XXH64_hash_t dispatched(const void* input, std::size_t length,
                                                       XXH64_hash_t seed) {
  const XXH64_hash_t hash = XXH3_64bits_withSeed_dispatch(input, length, seed);
  _mm256_zeroupper();
  return hash;
}

Hash choose() {
  if (&XXH3_64bits_withSeed_dispatch == nullptr) {
    note_degraded(
        "xxh3",
        "this xxHash library has no run-time dispatch, so checksums run on SSE2 at a quarter "
        "of the speed; link the shared libxxhash");
    return XXH3_64bits_withSeed;
  }
  return __builtin_cpu_supports("avx") ? dispatched : XXH3_64bits_withSeed_dispatch;
}

#else

Hash choose() { return XXH3_64bits_withSeed; }

#endif

}  // namespace

std::uint64_t hash64(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  static const Hash hash = choose();
  return hash(bytes.data(), bytes.size(), seed);
}

std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value) noexcept {
  return hash64(std::as_bytes(std::span(&value, 1)), seed);
}

}  // namespace ziggurat
