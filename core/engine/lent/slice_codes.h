// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/slice_codes.h: turns slices of parameters into int8 codes and back, on the
// workers (qwZ of ZeRO++, Wang et al. 2023, section 4.1). Private to the engine. Reactor's thread.
//
// Blocks begin where a slice begins, and jobs and messages end where blocks do. So neither the
// number of workers nor the size of a message changes a bit; how parameters are cut does.
#pragma once

#include <cstddef>
#include <span>

#include "base/typed_span.h"
#include "collectives/quantize/quantized_block.h"
#include "core/schedule/context.h"

namespace ziggurat {

/// The bits of a code.
inline constexpr auto kSliceBits = QuantizedBits::k8;

/// Encodes `values` as `codes`, which are quantized_bytes() long.
Task<> encode_slice(Context& context, TypedSpan<const std::byte> values,
                    std::span<std::byte> codes);
/// Decodes them, rounded to the type of `values`.
Task<> decode_slice(Context& context, std::span<const std::byte> codes,
                    TypedSpan<std::byte> values);
/// Makes of `values` what decode_slice() makes of their codes on other ranks.
Task<> round_slice(Context& context, TypedSpan<const std::byte> values,
                   TypedSpan<std::byte> rounded);

}  // namespace ziggurat
