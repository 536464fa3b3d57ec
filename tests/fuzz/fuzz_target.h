// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/fuzz_target.h: what a fuzz target is: bytes that nobody vouches for are taken, or
// refused with an Error. Any other exception ends the process, and that is a finding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"

/// libFuzzer's entry point.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace ziggurat::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Whether `parse` took it.
template <class Parse>
bool taken(const Parse& parse) {
  try {
    parse();
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// A property that holds of everything that is taken.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace ziggurat::fuzz
