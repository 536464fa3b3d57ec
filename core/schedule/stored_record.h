// SPDX-License-Identifier: Apache-2.0
// core/schedule/stored_record.h: a record against its hash: the one place where a record is read
// and compared outside an update. Megabytes are hashed on a worker, never on the reactor's thread.
#pragma once

#include <cstdint>
#include <span>

#include "core/schedule/context.h"
#include "tiers/striped_store.h"

namespace ziggurat {

Task<std::uint64_t> hash_record(Context& context, std::span<const std::byte> record,
                                std::uint64_t seed);

/// Generations are as the store counts them. `record` is what was written as `chunk`'s.
Task<bool> is_record_of(Context& context, const StripedStore& store, ChunkId chunk,
                        std::uint64_t generation, std::span<const std::byte> record);
/// Errors: kDataLoss naming the record, where it is not.
Task<> require_record_of(Context& context, const StripedStore& store, ChunkId chunk,
                         std::uint64_t generation, std::span<const std::byte> record);
/// Reads it whole, and compares. Errors: the drive's; kDataLoss.
Task<> read_record(Context& context, StripedStore& store, ChunkId chunk, std::uint64_t generation,
                   std::span<std::byte> record);

}  // namespace ziggurat
