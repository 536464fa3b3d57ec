// SPDX-License-Identifier: Apache-2.0
// tiers/fill.h: what new files are filled with, so that no drive stores less than it was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat {

/// Bytes that no drive compresses and no thin volume leaves out: xorshift64*.
void fill_incompressibly(std::span<std::byte> memory);

/// Makes every 4 KiB block differ from the same block of other pieces, so that nothing below us
/// stores it once.
void stamp_blocks(std::span<std::byte> memory, std::uint64_t offset_bytes);

}  // namespace ziggurat
