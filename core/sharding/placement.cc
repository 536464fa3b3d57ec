// SPDX-License-Identifier: Apache-2.0
// core/sharding/placement.cc: placements as people write them.
#include "core/sharding/placement.h"

#include <fmt/format.h>

#include <sstream>

#include "base/error.h"

namespace ziggurat {
namespace {

Tier parse_tier(const std::string& word) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    if (word == to_string(tier)) return tier;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("'{}' is not a tier; use device, host or nvme", word));
}

}  // namespace

std::string_view to_string(Tier tier) noexcept {
  switch (tier) {
    case Tier::kDevice: return "device";
    case Tier::kHost: return "host";
    case Tier::kNvme: return "nvme";
    case Tier::kTrainer: return "trainer";
  }
  return "?";
}

Placement parse_placement(const std::string& text) {
  Placement placement;
  std::istringstream parts(text);
  std::string part;
  while (std::getline(parts, part, ',')) {
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const Tier tier = parse_tier(equals == std::string::npos ? "" : part.substr(equals + 1));
    if (name == "all") {
      placement = {tier, tier, tier};
    } else if (name == "params") {
      placement.params = tier;
    } else if (name == "grads") {
      placement.grads = tier;
    } else if (name == "optimizer") {
      placement.optimizer = tier;
    } else {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("'{}' is not a class of state; use params, grads, optimizer or all", name));
    }
  }
  return placement;
}

std::string to_string(const Placement& placement) {
  return fmt::format("params={},grads={},optimizer={}", to_string(placement.params),
                     to_string(placement.grads), to_string(placement.optimizer));
}

}  // namespace ziggurat
