// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/gradient.h: optimizer/gradient.h on a GPU: the functions that work on a gradient
// between backward and the host.
//
// They give the same bits as the functions of the same names there. Every span is memory of the
// device, aligned to its elements. Kernels are queued, in order, on the caller's stream, and the
// functions do not wait; memory must stay until the kernels have run. Errors: kInvalidArgument for
// an address that is not aligned and for arrays that overlap in a way that is not allowed,
// kResourceExhausted and kUnavailable from the launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "base/typed_span.h"

namespace ziggurat::cuda {

/// Sets `bytes` to zero. Moves 1 byte per byte.
void clear(StreamHandle stream, std::span<std::byte> bytes);

/// Adds value i * scale to sums[i]. Moves 10 bytes per element from 16 bits, 12 from fp32.
void accumulate_gradient(StreamHandle stream, TypedSpan<const std::byte> values, float scale,
                         std::span<float> sums);

/// Rounds `accumulator` into `out`, and writes for each tile (kTileElements; the last may be short)
/// the sum that round_gradient returns for it. Moves 6 bytes per element to 16 bits, 8 to fp32.
///
/// `out` may begin where `accumulator` does. Element i then lies over element i / 2, which another
/// block may not have read yet. So the launches double the number of tiles: each overwrites only
/// tiles that an earlier one has read. That is 1 + log2(tiles) launches, a microsecond or a few
/// each, instead of one.
void round_gradient(StreamHandle stream, std::span<const float> accumulator,
                    TypedSpan<std::byte> out, std::span<double> tile_sums);

/// Copies value i to out[i], exactly. Moves 6 bytes per element from 16 bits. They do not overlap.
void widen(StreamHandle stream, TypedSpan<const std::byte> values, std::span<float> out);

/// Multiplies values[i] by factor. The number of a tile is not 0 if one of its new values is not
/// finite, so scale_gradient's result is `true` if the numbers of all tiles are 0. Moves 4 bytes
/// per element of 16 bits, 8 of fp32.
void scale_gradient(StreamHandle stream, TypedSpan<std::byte> values, float factor,
                    std::span<std::uint32_t> tile_not_finite);

}  // namespace ziggurat::cuda
