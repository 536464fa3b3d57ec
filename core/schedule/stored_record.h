// SPDX-License-Identifier: Apache-2.0
// core/schedule/stored_record.h: compares records with their hashes. This is the only place where a
// record is read and verified outside an update. A record has megabytes, so it is hashed on a
// worker and never on the reactor's thread.
#pragma once

#include <cstdint>
#include <span>

#include "core/schedule/context.h"
#include "tiers/store/striped_store.h"

namespace ziggurat {

Task<std::uint64_t> hash_record(Context& context, ChunkId chunk, std::span<const std::byte> record,
                                std::uint64_t seed);

/// Whether `record` has the bytes that were written as `chunk`'s record of `generation`.
/// Generations are counted as the store does.
Task<bool> is_record_of(Context& context, const StripedStore& store, ChunkId chunk,
                        std::uint64_t generation, std::span<const std::byte> record);
/// Throws kDataLoss naming the record if is_record_of() is false.
Task<> require_record_of(Context& context, const StripedStore& store, ChunkId chunk,
                         std::uint64_t generation, std::span<const std::byte> record);
/// Reads the whole record and verifies it; `turn` is that of the job which hashes it. Errors: the
/// drive's; kDataLoss.
Task<> read_record(Context& context, StripedStore& store, ChunkId chunk, std::uint64_t generation,
                   std::span<std::byte> record, Workers::Turn turn = Workers::Turn::kInOrder);

}  // namespace ziggurat
