// SPDX-License-Identifier: Apache-2.0
// optimizer/record_masters.h: reads the masters of a part of a record. Private to the optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optimizer/state_kind.h"

namespace ziggurat::internal {

/// Reads the masters of elements from `first` on, exactly. A record of `count` elements holds the
/// residuals of kSplit after its parameters.
void read_masters_from(StateFormat format, std::span<const std::byte> record, std::size_t count,
                       std::uint64_t first, std::span<float> masters);

}  // namespace ziggurat::internal
