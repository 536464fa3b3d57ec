// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_network.cc: the ports, and when they are in use.
#include "collectives/simulated/simulated_network.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {

void SimulatedNetwork::require(const NetworkShape& shape) {
  if (shape.ranks < 1 || shape.ranks_per_node < 1 || !(shape.within_node.bytes_per_s > 0) ||
      !(shape.between_nodes.bytes_per_s > 0)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("a network cannot have {} ranks, {} ranks per node, and links of {:g} and "
                    "{:g} bytes/s; each number must be above 0",
                    shape.ranks, shape.ranks_per_node, shape.within_node.bytes_per_s,
                    shape.between_nodes.bytes_per_s));
  }
}

SimulatedNetwork::SimulatedNetwork(const NetworkShape& shape) : shape_(shape) {
  require(shape);
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  rank_ports_.resize(ranks);
  node_ports_.resize(static_cast<std::size_t>(node(shape.ranks - 1)) + 1);
  traffic_.resize(ranks);
  messages_.resize(ranks);
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
  const std::uint64_t number = messages_[static_cast<std::size_t>(from)]++;
  return end + link.latency + (shape_.late ? shape_.late(from, number) : Nanoseconds(0));
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

/// In each of n - 1 rounds a member sends the slice that came in the round before to the next
/// member. A round's messages wait for one another, so a rank that is slow slows all.
std::vector<Nanoseconds> SimulatedNetwork::pass_around(
    std::span<const int> members, const std::function<std::uint64_t(std::size_t)>& bytes,
    std::span<const Nanoseconds> ready) {
  const std::size_t n = members.size();
  std::vector<Nanoseconds> has(ready.begin(), ready.end());  // the slice that it passes on next
  std::vector<Nanoseconds> done = has;
  for (std::size_t round = 0; round + 1 < n; ++round) {
    std::vector<Nanoseconds> came(n);
    for (std::size_t from = 0; from < n; ++from) {
      const std::size_t to = (from + 1) % n;
      const std::size_t slice = (from + n - round) % n;
      came[to] = std::max(ready[to],
                          send(members[from], members[to], bytes(slice), has[from], done[from]));
    }
    for (std::size_t i = 0; i < n; ++i) done[i] = std::max(done[i], came[i]);
    has = std::move(came);
  }
  return done;
}

void SimulatedNetwork::count_wait(int rank, int waited_for, Nanoseconds time) {
  traffic_[static_cast<std::size_t>(rank)].waited[static_cast<std::size_t>(waited_for)] += time;
}

}  // namespace ziggurat
