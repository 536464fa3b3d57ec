// SPDX-License-Identifier: Apache-2.0
// tiers/store/quorum.cc: agrees on whether work that every rank did has succeeded.
#include "tiers/store/quorum.h"

#include <fmt/format.h>

#include <utility>

namespace ziggurat {

Task<> together(Quorum& ranks, Task<> mine, const char* what) {
  std::exception_ptr error;
  try {
    co_await std::move(mine);
  } catch (...) {
    error = std::current_exception();
  }
  const std::uint64_t failures = co_await ranks.max(error ? 1 : 0);
  if (error) std::rethrow_exception(error);
  if (failures != 0)
    throw PeerFailed(
        ErrorCode::kUnavailable,
        fmt::format(
            "another rank could not {}, so rank {} stops too; the other rank's message says why",
            what, ranks.rank()));
}

}  // namespace ziggurat
