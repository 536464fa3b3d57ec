// SPDX-License-Identifier: Apache-2.0
// tests/faults/campaign.h: at which calls a campaign strikes: all of them until a run ends without
// having been struck (ZIGGURAT_FAULTS=all), or so many of each kind (ZIGGURAT_FAULTS=20), or a few:
// one in each of as many equal parts, by a seed that is drawn anew each time.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <random>
#include <string_view>

namespace ziggurat::testing {

inline bool all_faults_wanted() {
  const char* const wanted = std::getenv("ZIGGURAT_FAULTS");
  return wanted != nullptr && std::string_view(wanted) == "all";
}
/// How many of each kind are, where not all are; `usual` where nobody says.
inline std::uint64_t faults_wanted(std::uint64_t usual) {
  const char* const wanted = std::getenv("ZIGGURAT_FAULTS");
  return wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : usual;
}

/// Calls `strike` with calls of a job that makes about `calls`; it says whether the call was made.
/// A sample has `usual` of them. Ends early when `stop` says so. How many were struck.
inline std::uint64_t for_each_call(std::uint64_t calls, std::uint64_t usual,
                                   const std::function<bool(std::uint64_t call)>& strike,
                                   const std::function<bool()>& stop) {
  std::uint64_t struck = 0;
  if (all_faults_wanted()) {
    for (std::uint64_t call = 0; !stop() && strike(call); ++call) ++struck;
    return struck;
  }
  const std::uint64_t sampled = faults_wanted(usual);
  std::mt19937_64 random(std::random_device{}());
  for (std::uint64_t i = 0; i < sampled && !stop(); ++i) {
    const std::uint64_t begin = i * calls / sampled;
    const std::uint64_t end = (i + 1) * calls / sampled;
    if (end > begin && strike(begin + random() % (end - begin))) ++struck;
  }
  return struck;
}

}  // namespace ziggurat::testing
