// SPDX-License-Identifier: Apache-2.0
// tests/support/pipe_text.h: what a child says until it ends.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>

namespace ziggurat::testing {

/// Adds to `text` everything that comes until the other end is closed; false: the time was over
/// before.
inline bool read_all(int pipe, std::chrono::steady_clock::time_point limit, std::string& text) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        limit - std::chrono::steady_clock::now());
    pollfd ready{pipe, POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(std::max<std::int64_t>(0, left.count()))) != 1)
      return false;
    std::array<char, 4096> buffer{};
    const auto length = ::read(pipe, buffer.data(), buffer.size());
    if (length <= 0) return true;
    text.append(buffer.data(), static_cast<std::size_t>(length));
  }
}

}  // namespace ziggurat::testing
