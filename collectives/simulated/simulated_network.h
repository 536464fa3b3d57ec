// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_network.h: computes when messages between ranks arrive, from a
// model of nodes of ranks and links with bandwidth and latency, in the reactor's (virtual) time.
//
// Each rank has a port within its node. Each node has a port to the other nodes, which its ranks
// share. A port sends one message and receives one at a time. A message occupies both its ports for
// bytes / bandwidth, as soon as both are free, and arrives a latency later. In a phase each rank
// sends first to the next rank, then to the one after, and so on, so that no rank gets all first
// messages. Work grows with the messages, N^2 per collective. Reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/runtime/reactor.h"
#include "collectives/communicator.h"

namespace ziggurat {

struct SimulatedLink {
  double bytes_per_s = 1e9;
  Nanoseconds latency{0};
};

/// How the bytes of an all_gather, a reduce_scatter and an all_reduce go. All else goes directly.
enum class Route : std::uint8_t {
  kDirect,  ///< from each rank to every other, as over TCP
  kRing,    ///< from each rank to the next, which passes them on, as NCCL does with large messages
};

struct NetworkShape {
  int ranks = 1;
  int ranks_per_node = 1;
  SimulatedLink within_node{};    ///< a link of each rank
  SimulatedLink between_nodes{};  ///< a link of each node
  Route route = Route::kDirect;
  /// For tests: returns how much later than it should the n-th message (from 0) of a rank arrives.
  /// May be empty.
  std::function<Nanoseconds(int from, std::uint64_t n)> late{};
};

class SimulatedNetwork {
 public:
  /// Errors: require()'s.
  explicit SimulatedNetwork(const NetworkShape& shape);

  /// Errors: kInvalidArgument for less than one rank, or a bandwidth that is not above 0.
  static void require(const NetworkShape& shape);

  int ranks() const noexcept { return shape_.ranks; }
  Route route() const noexcept { return shape_.route; }

  /// Returns the bytes from one member to another, by their places in `members`. 0 is a message
  /// too; a negative number means that there is none.
  using Message = std::function<std::int64_t(std::size_t from, std::size_t to)>;
  /// Sends every message of a phase; member i begins at ready[i]. Returns when each member has
  /// received and sent all of its messages.
  std::vector<Nanoseconds> exchange(std::span<const int> members, const Message& bytes,
                                    std::span<const Nanoseconds> ready);

  /// Passes a slice of each member around the ring of `members`. Slice i has bytes(i).
  std::vector<Nanoseconds> pass_around(std::span<const int> members,
                                       const std::function<std::uint64_t(std::size_t)>& bytes,
                                       std::span<const Nanoseconds> ready);

  void count_wait(int rank, int waited_for, Nanoseconds time);
  const Traffic& traffic(int rank) const { return traffic_[static_cast<std::size_t>(rank)]; }

 private:
  struct Port {
    Nanoseconds sends_until{0};
    Nanoseconds receives_until{0};
  };
  int node(int rank) const noexcept { return rank / shape_.ranks_per_node; }
  Nanoseconds send(int from, int to, std::uint64_t size_bytes, Nanoseconds ready,
                   Nanoseconds& sent);

  NetworkShape shape_;
  std::vector<Port> rank_ports_;
  std::vector<Port> node_ports_;
  std::vector<Traffic> traffic_;         // by rank
  std::vector<std::uint64_t> messages_;  // sent, by rank
};

}  // namespace ziggurat
