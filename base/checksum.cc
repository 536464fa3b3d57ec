// SPDX-License-Identifier: Apache-2.0
// base/checksum.cc: XXH3 by the library's own run-time dispatch (its AVX2 and AVX-512 forms halve the cost of SSE2's).
#include "base/checksum.h"

#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#endif

namespace ziggurat {

std::uint64_t hash64(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value) noexcept {
  return hash64(std::as_bytes(std::span(&value, 1)), seed);
}

}  // namespace ziggurat
