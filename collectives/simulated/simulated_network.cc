// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_network.cc: the ports, and when they are in use.
#include "collectives/simulated/simulated_network.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {

SimulatedNetwork::SimulatedNetwork(const NetworkShape& shape) : shape_(shape) {
  if (shape.ranks < 1 || shape.ranks_per_node < 1 || !(shape.within_node.bytes_per_s > 0) ||
      !(shape.between_nodes.bytes_per_s > 0)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("a network cannot have {} ranks, {} ranks per node, and links of {:g} and "
                    "{:g} bytes/s; each number must be above 0",
                    shape.ranks, shape.ranks_per_node, shape.within_node.bytes_per_s,
                    shape.between_nodes.bytes_per_s));
  }
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  rank_ports_.resize(ranks);
  node_ports_.resize(static_cast<std::size_t>(node(shape.ranks - 1)) + 1);
  traffic_.resize(ranks);
  for (Traffic& traffic : traffic_) traffic.waited.resize(ranks);
}

Nanoseconds SimulatedNetwork::send(int from, int to, std::uint64_t size_bytes, Nanoseconds ready,
                                   Nanoseconds& sent) {
  const bool near = node(from) == node(to);
  std::vector<Port>& ports = near ? rank_ports_ : node_ports_;
  Port& out = ports[static_cast<std::size_t>(near ? from : node(from))];
  Port& in = ports[static_cast<std::size_t>(near ? to : node(to))];
  const SimulatedLink& link = near ? shape_.within_node : shape_.between_nodes;
  const double ns = static_cast<double>(size_bytes) / link.bytes_per_s * 1e9;
  const Nanoseconds begin = std::max({ready, out.sends_until, in.receives_until});
  const Nanoseconds end = begin + Nanoseconds(static_cast<std::int64_t>(ns));
  out.sends_until = end;
  in.receives_until = end;
  sent = std::max(sent, end);
  Traffic& traffic = traffic_[static_cast<std::size_t>(from)];
  (near ? traffic.same_host : traffic.other_hosts).payload_bytes += size_bytes;
  return end + link.latency;
}

std::vector<Nanoseconds> SimulatedNetwork::exchange(std::span<const int> members,
                                                    const Message& bytes,
                                                    std::span<const Nanoseconds> ready) {
  const std::size_t n = members.size();
  std::vector<Nanoseconds> done(ready.begin(), ready.end());
  for (std::size_t turn = 1; turn < n; ++turn) {
    for (std::size_t from = 0; from < n; ++from) {
      const std::size_t to = (from + turn) % n;
      const std::int64_t size_bytes = bytes(from, to);
      if (size_bytes < 0) continue;
      const Nanoseconds arrival =
          send(members[from], members[to], static_cast<std::uint64_t>(size_bytes), ready[from],
               done[from]);
      done[to] = std::max(done[to], arrival);
    }
  }
  return done;
}

void SimulatedNetwork::count_wait(int rank, int waited_for, Nanoseconds time) {
  traffic_[static_cast<std::size_t>(rank)].waited[static_cast<std::size_t>(waited_for)] += time;
}

}  // namespace ziggurat
