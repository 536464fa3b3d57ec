// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rank_address.h: what each rank tells the others when they join.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "collectives/exchange/peer_memory.h"

namespace ziggurat {

/// Where a rank listens, and what it shares a host with.
struct RankAddress {
  /// As rank 0 sees it. Empty where that would be a loopback address, of use on rank 0's host only:
  /// the rank is where each of the others finds rank 0.
  std::string address;
  std::uint16_t port = 0;
  std::string host;
  MemoryProbe memory;  ///< none: ranks of a host use sockets too

  nlohmann::json to_json() const;
  /// Errors: nlohmann's, where `row` is not one.
  static RankAddress from_json(const nlohmann::json& row);
};

}  // namespace ziggurat
