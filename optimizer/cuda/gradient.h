// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/gradient.h: optimizer/gradient.h on a GPU: what happens to a gradient between
// backward and the host.
//
// The same bits as the functions of the same names there. Every span is memory of the device,
// aligned to its elements. Kernels are queued, in order, on the caller's stream and nothing waits;
// memory must stay until they have run. Errors: kInvalidArgument for an address that is not aligned
// and for arrays that overlap otherwise than is said, kResourceExhausted and kUnavailable from the
// launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "base/typed_span.h"

namespace ziggurat::cuda {

/// Zeros. 1 byte a byte.
void clear(StreamHandle stream, std::span<std::byte> bytes);

/// sums[i] += value i * scale. 10 bytes an element from 16 bits, 12 from fp32.
void accumulate_gradient(StreamHandle stream, TypedSpan<const std::byte> values, float scale,
                         std::span<float> sums);

/// Rounds `accumulator` into `out`, and writes for each tile (kTileElements; the last may be short)
/// the sum that round_gradient returns for it. 6 bytes an element to 16 bits, 8 to fp32.
///
/// `out` may begin where `accumulator` does. Element i then lies over element i / 2, which another
/// block may not have read yet; so tiles go by doubling: what one launch writes, an earlier one has
/// read. That is 1 + log2(tiles) launches, a microsecond or a few each, in place of one.
void round_gradient(StreamHandle stream, std::span<const float> accumulator,
                    TypedSpan<std::byte> out, std::span<double> tile_sums);

/// out[i] = value i, exactly. 6 bytes an element from 16 bits. They do not overlap.
void widen(StreamHandle stream, TypedSpan<const std::byte> values, std::span<float> out);

/// values[i] *= factor; for each tile, not 0 where one of what was written is not finite: the sum
/// over tiles of zero is scale_gradient's `true`. 4 bytes an element of 16 bits, 8 of fp32.
void scale_gradient(StreamHandle stream, TypedSpan<std::byte> values, float factor,
                    std::span<std::uint32_t> tile_not_finite);

}  // namespace ziggurat::cuda
