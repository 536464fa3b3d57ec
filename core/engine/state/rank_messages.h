// SPDX-License-Identifier: Apache-2.0
// core/engine/state/rank_messages.h: what services that ranks do each other have in common.
// Private to the engine.
#pragma once

#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "collectives/communicator.h"

namespace ziggurat {

/// Returns all ranks of a communicator, for a split() of its own.
inline std::vector<int> everyone(const Communicator& ranks) {
  std::vector<int> all(static_cast<std::size_t>(ranks.world_size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// Returns the bytes of a message of a fixed size.
template <class Message>
std::span<std::byte> bytes_of_message(Message& message) {
  return std::as_writable_bytes(std::span(&message, 1));
}

}  // namespace ziggurat
