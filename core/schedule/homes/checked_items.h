// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/checked_items.h: reads and writes items of a file on NVMe with their hashes,
// which workers compute. Reactor's thread only.
#pragma once

#include <cstddef>
#include <span>

#include "core/schedule/context.h"
#include "tiers/store/swap_file.h"

namespace ziggurat {

/// Writes an item. `node` is the NUMA node of its bytes, or -1.
Task<> write_hashed(Context& context, SwapFile& file, std::size_t item,
                    std::span<const std::byte> bytes, IoPriority priority, int node = -1);
/// Reads an item that was written so. Errors: those of the file; kDataLoss if the bytes are others.
Task<> read_verified(Context& context, SwapFile& file, std::size_t item, std::span<std::byte> bytes,
                     IoPriority priority, int node = -1);

}  // namespace ziggurat
