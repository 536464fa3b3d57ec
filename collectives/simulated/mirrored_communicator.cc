// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/mirrored_communicator.cc: the closed forms of each call's time, and what
// the rank's own bytes become.
#include "collectives/simulated/mirrored_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <list>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "collectives/call.h"
#include "collectives/rank_sum.h"

namespace ziggurat {
namespace {

/// The members of a group, as one of them sees the rest.
struct GroupSeen {
  double ranks;   ///< all members
  double here;    ///< members on this node
  double others;  ///< groups like this one that share the node's port, this one included
};

/// What one phase of a call sends, in bytes.
struct PhaseLoad {
  double near = 0;       ///< by a rank within its node, on the mean of the node's ranks
  double far = 0;        ///< by a rank to other nodes, likewise
  double near_port = 0;  ///< through this rank's port within the node
  double node_port = 0;  ///< by all ranks of this node to other nodes, at the same time
  double slice = 0;      ///< of one message that is passed on
  double near_hops = 0;  ///< how often it is, within nodes
  double far_hops = 0;   ///< and between them
};

/// Every member sends `slice` bytes to every other.
PhaseLoad direct_load(const GroupSeen& group, double slice) {
  const double far = (group.ranks - group.here) * slice;
  const double near = (group.here - 1) * slice;
  return {
      .near = near, .far = far, .near_port = near, .node_port = far * group.here * group.others};
}

/// Every member passes the slices of all others on to the next member; one member of each node has
/// its next on another node.
PhaseLoad ring_load(const GroupSeen& group, double slice) {
  const double passed = (group.ranks - 1) * slice;
  const double nodes = group.ranks / group.here;
  if (nodes <= 1)
    return {.near = passed, .near_port = passed, .slice = slice, .near_hops = group.ranks - 1};
  return {.near = passed * (group.here - 1) / group.here,
          .far = passed / group.here,
          .near_port = group.here > 1 ? passed : 0,
          .node_port = passed * group.others,
          .slice = slice,
          .near_hops = group.ranks - nodes,
          .far_hops = nodes - 1};
}

}  // namespace

class MirroredWorld : public std::enable_shared_from_this<MirroredWorld> {
 public:
  MirroredWorld(Reactor& reactor, const NetworkShape& shape, const AbsentMemory* absent,
                Trace* trace)
      : reactor_(reactor), shape_(shape), absent_(absent), trace_(trace) {
    SimulatedNetwork::require(shape);
    traffic_.waited.resize(static_cast<std::size_t>(shape.ranks));
    if (trace_ == nullptr) return;
    near_.track = trace_->track("network within the node");
    far_.track = trace_->track("network to other nodes");
  }

  const Traffic& traffic() const { return traffic_; }
  const std::exception_ptr& fate() const { return fate_; }
  bool lacks(const Call& call) const {
    if (absent_ == nullptr) return false;
    return (!call.input.empty() && absent_->lacks(call.input.data())) ||
           (!call.output.empty() && absent_->lacks(call.output.data()));
  }

  /// Occupies the ports and returns a Task that ends when this rank's part of the call has.
  Task<> take(const CallSpec& spec, const std::vector<int>& members) {
    const Nanoseconds now = reactor_.clock().now();
    Nanoseconds end = now;
    const GroupSeen group = group_of(members);
    for (const PhaseLoad& load : loads(spec, group)) end = occupy(load, end, spec, group);
    const auto signal = pending_.insert(pending_.end(), std::make_shared<Signal>(reactor_));
    reactor_.clock().after(end - now, [self = shared_from_this(), done = *signal, signal] {
      if (self->fate_) return;
      self->pending_.erase(signal);
      done->set();
    });
    return wait(*signal);
  }

  void fail_all(const Error& error) {
    if (fate_) return;
    fate_ = std::make_exception_ptr(error);
    for (const auto& signal : std::exchange(pending_, {})) signal->fail(fate_);
  }

 private:
  static Task<> wait(std::shared_ptr<Signal> done) { co_await done->wait(); }
  static Nanoseconds time_of(double bytes, const SimulatedLink& link) noexcept {
    return Nanoseconds(static_cast<std::int64_t>(bytes / link.bytes_per_s * 1e9));
  }

  GroupSeen group_of(const std::vector<int>& members) const {
    const int ranks_here = std::min(shape_.ranks, shape_.ranks_per_node);
    const auto here = static_cast<double>(
        std::ranges::count_if(members, [&](int rank) { return rank < shape_.ranks_per_node; }));
    return {.ranks = static_cast<double>(members.size()),
            .here = here,
            .others = std::max(1.0, ranks_here / here)};
  }

  /// The phases of a call, one after the other.
  std::vector<PhaseLoad> loads(const CallSpec& spec, const GroupSeen& group) const {
    const auto element = static_cast<double>(size_bytes(spec.element));
    const double bytes = static_cast<double>(spec.count) * element;
    const bool in_ring = shape_.route == Route::kRing;
    switch (spec.kind) {
      case CallKind::kAllGather:
      case CallKind::kReduceScatter:
        return {in_ring ? ring_load(group, bytes) : direct_load(group, bytes)};
      case CallKind::kAllReduce: {
        const double slice = bytes / group.ranks;
        const PhaseLoad phase = in_ring ? ring_load(group, slice) : direct_load(group, slice);
        return {phase, phase};
      }
      case CallKind::kAllReduceValues:
      case CallKind::kAllToAll:
      case CallKind::kBarrier: return {direct_load(group, bytes)};
      case CallKind::kSend:
      case CallKind::kRecv: break;
    }
    return {};
  }

  struct Port {
    Nanoseconds busy_until{0};
    int track = 0;
  };

  /// Returns when the phase has ended for this rank, if it may begin at `ready`: when the ports
  /// have sent all, and when a message that is passed on has come around.
  Nanoseconds occupy(const PhaseLoad& load, Nanoseconds ready, const CallSpec& spec,
                     const GroupSeen& group) {
    Nanoseconds end = ready;
    const auto pass = [&](Port& port, double bytes, const SimulatedLink& link) {
      const Nanoseconds begin = std::max(port.busy_until, ready);
      port.busy_until = begin + time_of(bytes, link);
      if (trace_ != nullptr)
        trace_->span(port.track, name_of(spec.kind), begin, port.busy_until,
                     static_cast<std::int64_t>(bytes));
      end = std::max(end, port.busy_until + link.latency);
    };
    if (group.here > 1) pass(near_, load.near_port, shape_.within_node);
    if (group.ranks > group.here) pass(far_, load.node_port, shape_.between_nodes);
    const auto around = [&](double hops, const SimulatedLink& link) {
      const Nanoseconds once = time_of(load.slice, link) + link.latency;
      return Nanoseconds(static_cast<std::int64_t>(hops * static_cast<double>(once.count())));
    };
    end = std::max(end, ready + around(load.near_hops, shape_.within_node) +
                            around(load.far_hops, shape_.between_nodes));
    traffic_.same_host.payload_bytes += static_cast<std::uint64_t>(load.near);
    traffic_.other_hosts.payload_bytes += static_cast<std::uint64_t>(load.far);
    return end;
  }

  Reactor& reactor_;
  NetworkShape shape_;
  const AbsentMemory* absent_;
  Trace* trace_;
  Port near_;
  Port far_;
  Traffic traffic_;
  std::list<std::shared_ptr<Signal>> pending_;
  std::exception_ptr fate_;
};

std::unique_ptr<Communicator> MirroredCommunicator::create(Reactor& reactor,
                                                           const NetworkShape& shape,
                                                           const AbsentMemory* absent,
                                                           Trace* trace) {
  std::vector<int> everyone;
  for (int rank = 0; rank < shape.ranks; ++rank) everyone.push_back(rank);
  return std::unique_ptr<Communicator>(new MirroredCommunicator(
      std::make_shared<MirroredWorld>(reactor, shape, absent, trace), std::move(everyone)));
}

MirroredCommunicator::MirroredCommunicator(std::shared_ptr<MirroredWorld> world,
                                           std::vector<int> members)
    : world_(std::move(world)),
      members_(std::move(members)),
      place_(static_cast<int>(std::ranges::find(members_, 0) - members_.begin())) {}

/// Gives the output what it would have if every other rank had given this rank's input.
void MirroredCommunicator::mirror_bytes(const Call& call) const {
  const std::size_t ranks = members_.size();
  const auto mine = static_cast<std::size_t>(place_);
  switch (call.spec.kind) {
    case CallKind::kAllGather: {
      const std::size_t slice = call.input.size();
      for (std::size_t r = 0; r < ranks; ++r)
        copy_bytes(call.input, call.output.subspan(r * slice, slice));
      return;
    }
    case CallKind::kAllToAll: {
      const std::size_t slice = call.output.size() / ranks;
      for (std::size_t r = 0; r < ranks; ++r)
        copy_bytes(call.input.subspan(mine * slice, slice), call.output.subspan(r * slice, slice));
      return;
    }
    case CallKind::kReduceScatter:
    case CallKind::kAllReduce: {
      const bool scatters = call.spec.kind == CallKind::kReduceScatter;
      const std::size_t bytes = call.output.size();
      const std::byte* const own = scatters ? call.input.data() + mine * bytes : call.output.data();
      const DType dtype = dtype_of(call.spec.element);
      const std::vector<const std::byte*> same(ranks, own);
      sum_in_rank_order(same, dtype, bytes / size_bytes(dtype), call.output.data());
      return;
    }
    case CallKind::kAllReduceValues: {
      const std::vector<const std::byte*> same(ranks, call.output.data());
      combine_in_rank_order(same, call.spec, call.output.data());
      return;
    }
    case CallKind::kBarrier:
    case CallKind::kSend:
    case CallKind::kRecv: return;
  }
}

Task<> MirroredCommunicator::issue(const Call& call) {
  if (world_->fate()) return failing(world_->fate());
  if (call.peer >= 0) {
    return refuse(Error(ErrorCode::kInvalidArgument,
                        "a mirrored rank cannot exchange bytes with a single rank, because the "
                        "other ranks only repeat what it does; play every rank"));
  }
  if (!world_->lacks(call)) mirror_bytes(call);
  return world_->take(call.spec, members_);
}

Task<> MirroredCommunicator::refuse(const Error& error) {
  world_->fail_all(error);
  return failing(std::make_exception_ptr(error));
}

std::unique_ptr<Communicator> MirroredCommunicator::split(std::span<const int> members) {
  place_in(members);
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(members_[static_cast<std::size_t>(member)]);
  return std::unique_ptr<Communicator>(new MirroredCommunicator(world_, std::move(ranks)));
}

std::string MirroredCommunicator::description() const {
  return fmt::format("rank {} of {} that do the same, in virtual time", place_, members_.size());
}

Traffic MirroredCommunicator::traffic() const { return world_->traffic(); }

void MirroredCommunicator::abort(const std::string& reason) {
  world_->fail_all(
      Error(ErrorCode::kUnavailable, "the calls of all ranks were aborted: " + reason));
}

}  // namespace ziggurat
