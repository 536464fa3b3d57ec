// SPDX-License-Identifier: Apache-2.0
// base/checksum.h: the one checksum (XXH3, 64 bits). A seed says what the bytes are, so that the
// right hash at the wrong place fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat {

/// Returns the XXH3-64 of `bytes` under `seed`. The value is the same on every ISA; the widest
/// instructions of this CPU are used.
std::uint64_t hash64(std::span<const std::byte> bytes, std::uint64_t seed) noexcept;

/// Folds `value` into `seed`. The order of several calls matters.
std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value) noexcept;

}  // namespace ziggurat
