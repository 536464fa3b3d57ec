// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_values.h: values of a tensor's type as fp32. Any thread.
#pragma once

#include <cstddef>
#include <span>

#include "core/checkpoint/tensor_type.h"

namespace ziggurat {

/// To fp32, exactly. `type` is no code's; `values` are as many as `bytes` hold.
void widen(TensorType type, std::span<const std::byte> bytes, std::span<float> values);

}  // namespace ziggurat
