// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rank_address.h: what each rank tells the others when they join.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "collectives/exchange/peer_memory.h"

namespace ziggurat {

/// Where a rank listens, and what ranks of its host need.
struct RankAddress {
  /// The rank's address as rank 0 sees it. Empty if that is a loopback address, which is of use on
  /// rank 0's host only: the rank can then be reached wherever another rank reaches rank 0.
  std::string address;
  std::uint16_t port = 0;
  std::string host;
  MemoryProbe memory;  ///< if none, ranks of this host use sockets too

  nlohmann::json to_json() const;
  /// Reads a row. Errors: nlohmann's, if `row` is not an address.
  static RankAddress from_json(const nlohmann::json& row);
};

}  // namespace ziggurat
