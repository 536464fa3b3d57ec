// SPDX-License-Identifier: Apache-2.0
// collectives/rank_row.cc: a row as JSON, and this host's name.
#include "collectives/rank_row.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include "base/error.h"

namespace ziggurat {

nlohmann::json RankRow::written() const {
  return {address, port, host, memory.process, memory.address, memory.value};
}

RankRow RankRow::read(const nlohmann::json& row) {
  return {row.at(0).get<std::string>(),
          row.at(1).get<std::uint16_t>(),
          row.at(2).get<std::string>(),
          {row.at(3).get<std::int64_t>(), row.at(4).get<std::uint64_t>(),
           row.at(5).get<std::uint64_t>()}};
}

std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> network{};
  const ssize_t length = ::readlink("/proc/self/ns/net", network.data(), network.size() - 1);
  if (boot.empty() || length <= 0) {
    throw Error(ErrorCode::kUnavailable,
                "/proc/sys/kernel/random/boot_id or /proc/self/ns/net cannot be read: it is not "
                "known which ranks share a host; mount /proc");
  }
  return boot + " " + network.data();
}

}  // namespace ziggurat
