// SPDX-License-Identifier: Apache-2.0
// core/sharding/placement.cc: reads and writes placements as people write them.
#include "core/sharding/placement.h"

#include <fmt/format.h>

#include <sstream>
#include <vector>

#include "base/bytes.h"
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

/// One tier and its size, if it has one: "device:2GiB", or "nvme" alone.
struct Share {
  Tier tier;
  std::optional<std::uint64_t> size_bytes;
};

Share parse_share(const std::string& word) {
  const std::size_t colon = word.find(':');
  Share share{.tier = parse_tier(word.substr(0, colon)), .size_bytes = {}};
  if (colon != std::string::npos) share.size_bytes = parse_size(word.substr(colon + 1), word);
  return share;
}

/// Divides optimizer records from the top of the tower down; the last tier takes what is left.
void divide_optimizer(Placement& placement, const std::vector<Share>& shares) {
  const auto refuse = [](const std::string& why) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "the placement of optimizer is wrong: {}; write it like device:2GiB,host:8GiB,nvme",
            why));
  };
  placement.device_record_bytes = 0;
  placement.host_record_bytes.reset();
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const Share& share = shares[i];
    const bool last = i + 1 == shares.size();
    if (i > 0 && share.tier <= shares[i - 1].tier) {
      refuse(fmt::format("'{}' cannot come after '{}'", to_string(share.tier),
                         to_string(shares[i - 1].tier)));
    }
    if (last && share.size_bytes)
      refuse(
          fmt::format("'{}' has a size, but no tier after it takes what is left, so add a tier "
                      "without a size, such as nvme",
                      to_string(share.tier)));
    if (!last && !share.size_bytes)
      refuse(
          fmt::format("'{}' has no size, so it takes everything and no tier can follow it: give it "
                      "a size, or make it the last tier",
                      to_string(share.tier)));
    if (last) placement.optimizer = share.tier;
    if (!last && share.tier == Tier::kDevice) placement.device_record_bytes = *share.size_bytes;
    if (!last && share.tier == Tier::kHost) placement.host_record_bytes = share.size_bytes;
  }
}

/// Places one class of state on the tiers that were given for it.
void place(Placement& placement, const std::string& name, const std::vector<Share>& shares) {
  if (name == "optimizer") return divide_optimizer(placement, shares);
  if (name != "all" && name != "params" && name != "grads") {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("'{}' is not a class of state; use params, grads, optimizer or all", name));
  }
  if (shares.size() > 1 || shares.front().size_bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} must be placed on one tier, without a size: only optimizer can be "
                            "divided among tiers",
                            name));
  }
  const Tier tier = shares.front().tier;
  if (name == "all") placement = {.params = tier, .grads = tier, .optimizer = tier};
  if (name == "params") placement.params = tier;
  if (name == "grads") placement.grads = tier;
}

}  // namespace

std::string_view to_string(Tier tier) noexcept {
  switch (tier) {
    case Tier::kDevice: return "device";
    case Tier::kHost: return "host";
    case Tier::kNvme: return "nvme";
  }
  return "?";
}

Placement parse_placement(const std::string& text) {
  Placement placement;
  placement.automatic = text == "auto";
  if (placement.automatic) return placement;
  std::istringstream parts(text);
  std::string name;
  std::vector<Share> shares;
  // A part without a class belongs to the class before it.
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t equals = part.find('=');
    if (equals != std::string::npos) {
      if (!shares.empty()) place(placement, name, shares);
      shares.clear();
      name = part.substr(0, equals);
    }
    const bool named = equals != std::string::npos || !shares.empty();
    shares.push_back(parse_share(named ? part.substr(equals + 1) : ""));
  }
  if (!shares.empty()) place(placement, name, shares);
  return placement;
}

std::string to_string(const Placement& placement) {
  if (placement.automatic) return "auto";
  std::string records;
  if (placement.device_record_bytes > 0)
    records += fmt::format("device:{},", exact_bytes(placement.device_record_bytes));
  if (placement.host_record_bytes)
    records += fmt::format("host:{},", exact_bytes(*placement.host_record_bytes));
  return fmt::format("params={},grads={},optimizer={}{}", to_string(placement.params),
                     to_string(placement.grads), records, to_string(placement.optimizer));
}

}  // namespace ziggurat
