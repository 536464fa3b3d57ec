// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/tile_hash.h: hashes a record's pieces (tiers/store/record_hash.h) in device
// memory.
//
// It gives the same numbers as hash64 with seed 0. Kernels are queued on the caller's stream, and
// the functions do not wait. The host makes the record's own hash from the hashes of the pieces, a
// few KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "tiers/store/record_format.h"

namespace ziggurat::cuda {

/// Sets hashes[i] to hash64 of the i-th `piece_bytes` of `bytes`, which are whole pieces. The size
/// of a piece is a multiple of 64 bytes from 256 up to kTileBytes, as in RecordFormat. Reads every
/// byte once. Errors: kInvalidArgument for pieces of another size, or memory that is not aligned to
/// 8 bytes.
void hash_pieces(StreamHandle stream, std::span<const std::byte> bytes, std::size_t piece_bytes,
                 std::span<std::uint64_t> hashes);

/// Hashes all pieces of a record, in the order of RecordHash: every tile of the first segment, then
/// of the next. Queues one kernel per segment.
void hash_record_pieces(StreamHandle stream, std::span<const std::byte> record,
                        const RecordFormat& format, std::span<std::uint64_t> hashes);

}  // namespace ziggurat::cuda
