// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_call.h: one call of simulated ranks: which ranks have come with
// which buffers, and what happens to the bytes, and when. Private to simulated_communicator.cc.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/absent_memory.h"
#include "base/access_ledger.h"
#include "base/runtime/async.h"
#include "collectives/call.h"
#include "collectives/simulated/simulated_network.h"

namespace ziggurat {

struct SimulatedCall {
  struct Part {
    explicit Part(Reactor& reactor) : done(reactor) {}
    bool here = false;
    CallSpec spec{};
    std::span<const std::byte> input{};
    std::span<std::byte> output{};
    Nanoseconds came{0};
    std::array<AccessLedger::Access, 2> accesses{};  ///< to its buffers, until it is done
    Signal done;
  };

  SimulatedCall(Reactor& reactor, std::vector<int> its_members);

  /// Returns an error text with two calls that differ; empty if every part has the same call, or a
  /// send and its recv meet.
  std::string mismatch() const;
  /// Notes that a part's buffers are in use from now on.
  static void watch(Part& part, AccessLedger& ledger);
  /// Whether the bytes of the call are among those without memory: then those of all parts are.
  bool touches(const AbsentMemory& absent) const;
  /// Moves and adds the bytes of all parts, in rank order.
  void move_bytes();
  /// Returns when each part is done if all come at `now`.
  std::vector<Nanoseconds> times(SimulatedNetwork& network, Nanoseconds now) const;
  /// Fails every part that has come, and every part that will.
  void fail(const std::exception_ptr& error);

  std::vector<int> members;  ///< ranks of the network
  std::vector<Part> parts;   ///< by place in members
  std::size_t here = 0;
  std::size_t ended = 0;
  std::exception_ptr error;

 private:
  void reduce_values();
  void reduce_elements();
};

}  // namespace ziggurat
