// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/tile_hash.h: the hashes of a record's pieces (tiers/record_hash.h) where the
// record is in device memory.
//
// The same numbers as hash64 with seed 0. Kernels are queued on the caller's stream and nothing
// waits. The record's own hash is the host's to make, from the pieces': a few KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "tiers/record_format.h"

namespace ziggurat::cuda {

/// hashes[i] = hash64 of the i-th `piece_bytes` of `bytes`, which are whole pieces. Pieces:
/// multiples of 64 bytes from 256 up to kTileBytes, as RecordFormat's are. Reads every byte once.
/// Errors: kInvalidArgument for pieces of another size, or memory that is not aligned to 8 bytes.
void hash_pieces(StreamHandle stream, std::span<const std::byte> bytes, std::size_t piece_bytes,
                 std::span<std::uint64_t> hashes);

/// All of a record's, in the order of RecordHash: every tile's of the first segment, then of the
/// next. A kernel a segment.
void hash_record_pieces(StreamHandle stream, std::span<const std::byte> record,
                        const RecordFormat& format, std::span<std::uint64_t> hashes);

}  // namespace ziggurat::cuda
