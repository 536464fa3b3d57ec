// SPDX-License-Identifier: Apache-2.0
// base/check.cc: prints what is known of a broken invariant and aborts.
#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace ziggurat::internal {

void check_failed(const char* expression, const char* file, int line,
                  const std::string& operands) noexcept {
  std::fprintf(stderr, "ziggurat: broken invariant: %s: %s (%s:%d)\n", expression, operands.c_str(),
               file, line);
  std::fflush(stderr);
  std::abort();
}

}  // namespace ziggurat::internal
