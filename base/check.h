// SPDX-License-Identifier: Apache-2.0
// base/check.h: ZIGGURAT_CHECK, for conditions that are false only if this program has a bug. It is
// always on, and prints and aborts, because wrong optimizer state would train silently for days. It
// is never used for faults of the environment: those are an Error.
#pragma once

#include <fmt/format.h>

#include <string>

namespace ziggurat::internal {
[[noreturn]] void check_failed(const char* expression, const char* file, int line,
                               const std::string& operands) noexcept;
}  // namespace ziggurat::internal

/// Aborts unless `condition`. The rest formats what is known: ZIGGURAT_CHECK(i < n, "chunk {} of
/// {}", i, n).
#define ZIGGURAT_CHECK(condition, ...)                                   \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::ziggurat::internal::check_failed(#condition, __FILE__, __LINE__, \
                                         fmt::format(__VA_ARGS__));      \
  } while (false)
