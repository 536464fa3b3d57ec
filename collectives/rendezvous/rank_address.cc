// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rank_address.cc: converts an address to a row of JSON and back.
#include "collectives/rendezvous/rank_address.h"

namespace ziggurat {

nlohmann::json RankAddress::to_json() const {
  return {address, port, host, memory.process, memory.address, memory.value};
}

RankAddress RankAddress::from_json(const nlohmann::json& row) {
  return {row.at(0).get<std::string>(),
          row.at(1).get<std::uint16_t>(),
          row.at(2).get<std::string>(),
          {row.at(3).get<std::int64_t>(), row.at(4).get<std::uint64_t>(),
           row.at(5).get<std::uint64_t>()}};
}

}  // namespace ziggurat
