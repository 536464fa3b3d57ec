// SPDX-License-Identifier: Apache-2.0
// aio/refusals.h: how patient an engine is with a kernel that is too busy to take an operation.
#pragma once

#include <chrono>

namespace ziggurat {

constexpr int kRefusalsMax = 1000;  ///< in a row; the next one is an error
constexpr std::chrono::milliseconds kRefusalDelay{1};

}  // namespace ziggurat
