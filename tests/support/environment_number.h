// SPDX-License-Identifier: Apache-2.0
// tests/support/environment_number.h: how often a campaign tries, if somebody wants more than the
// suite has time for.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ziggurat::testing {

/// Returns the number in an environment variable, or `otherwise` if it is not set.
inline std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace ziggurat::testing
