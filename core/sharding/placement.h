// SPDX-License-Identifier: Apache-2.0
// core/sharding/placement.h: which tier each class of state lives on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ziggurat {

/// A level of the tower; or memory of the trainer's own, which it lends the engine (Engine::open):
/// parameters and gradients alone can be there, both of them, and no setting names it.
enum class Tier : std::uint8_t { kDevice, kHost, kNvme, kTrainer };

std::string_view to_string(Tier tier) noexcept;

/// Which tier each class of state lives on.
struct Placement {
  Tier params = Tier::kHost;
  Tier grads = Tier::kHost;
  Tier optimizer = Tier::kNvme;
};

/// Reads "params=host,grads=host,optimizer=nvme" or "all=host"; classes not named keep their
/// default. Errors: kInvalidArgument naming the word that is wrong.
Placement parse_placement(const std::string& text);
std::string to_string(const Placement& placement);

}  // namespace ziggurat
