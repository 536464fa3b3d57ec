// SPDX-License-Identifier: Apache-2.0
// base/checksum.h: the one checksum (XXH3, 64 bits). Seeds carry identity, so that a right hash at
// the wrong place fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat {

/// XXH3-64 of `bytes` under `seed`. The same value on every ISA; runs at the widest one of this
/// CPU.
std::uint64_t hash64(std::span<const std::byte> bytes, std::uint64_t seed) noexcept;

/// Folds `value` into `seed`, order-sensitive.
std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value) noexcept;

}  // namespace ziggurat
