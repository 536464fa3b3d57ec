// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_values.h: values of a tensor's type as fp32. Any thread.
#pragma once

#include <cstddef>
#include <span>

#include "core/checkpoint/tensor_type.h"

namespace ziggurat {

/// Widens values to fp32, exactly. `type` must not be that of codes, and `values` must have room
/// for all values in `bytes`.
void widen(TensorType type, std::span<const std::byte> bytes, std::span<float> values);

}  // namespace ziggurat
