// SPDX-License-Identifier: Apache-2.0
// collectives/rank_row.h: what each rank tells the others when they meet.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "collectives/peer_memory.h"

namespace ziggurat {

/// Where a rank listens, and what it shares a host with.
struct RankRow {
  std::string address;  ///< as rank 0 sees it; empty: rank 0's own
  std::uint16_t port = 0;
  std::string host;
  MemoryProbe memory;  ///< none: ranks of a host use sockets too

  nlohmann::json written() const;
  /// Errors: nlohmann's, where `row` is not one.
  static RankRow read(const nlohmann::json& row);
};

/// Alike for processes that can share memory: containers with a network of their own count as
/// hosts. Errors: kUnavailable where /proc cannot be read.
std::string this_host();

}  // namespace ziggurat
