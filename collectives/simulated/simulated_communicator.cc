// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_communicator.cc: calls of ranks meet by their number; the last to
// come moves the bytes.
#include "collectives/simulated/simulated_communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <tuple>

#include "base/error.h"
#include "collectives/simulated/simulated_call.h"

namespace ziggurat {

/// The calls under way and the state that all ranks share.
class SimulatedWorld : public std::enable_shared_from_this<SimulatedWorld> {
 public:
  using CallPtr = std::shared_ptr<SimulatedCall>;

  SimulatedWorld(Reactor& reactor, const NetworkShape& shape, const AbsentMemory* absent,
                 AccessLedger* ledger)
      : reactor_(reactor), network_(shape), absent_(absent), ledger_(ledger) {}

  /// Fails calls at a stall: then nothing else can happen, so a missing rank never comes.
  void watch_for_stalls() {
    reactor_.on_stall([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->fail_stalled();
    });
  }

  const Traffic& traffic(int rank) const { return network_.traffic(rank); }

  /// Sets `hear` for sends to rank `to` of a communicator (its place in it). An empty `hear` ends
  /// this.
  void on_send(std::uint64_t communicator, int to, int world_size,
               const std::function<void(int from)>& hear) {
    hear_sends_[{communicator, to}] = hear;
    for (int from = 0; hear && from < world_size; ++from) {
      for (auto waits = waiting_sends(communicator, from, to, world_size); waits > 0; --waits)
        hear(from);
    }
  }
  /// A send() was made.
  void sent(std::uint64_t communicator, int from, int to, int world_size) {
    const auto hears = hear_sends_.find({communicator, to});
    if (hears == hear_sends_.end() || !hears->second) return;
    if (waiting_sends(communicator, from, to, world_size) > 0) hears->second(from);
  }

  /// Adds rank `place`'s part to the call of that number, and returns the call.
  CallPtr join(const wire::CallKey& key, const std::vector<int>& members, std::size_t place,
               const Call& made) {
    CallPtr call = find(key, members);
    SimulatedCall::Part& part = call->parts[place];
    part.here = true;
    part.spec = made.spec;
    part.input = made.input;
    part.output = made.output;
    part.came = reactor_.clock().now();
    if (ledger_ != nullptr) SimulatedCall::watch(part, *ledger_);
    if (++call->here == call->parts.size()) begin(key, call);
    return call;
  }

  void check_alive() const {
    if (fate_) std::rethrow_exception(fate_);
  }
  void fail_all(const Error& error) {
    if (fate_) return;
    fate_ = std::make_exception_ptr(error);
    for (const auto& [key, call] : calls_) call->fail(fate_);
    calls_.clear();
  }

  /// Returns a number for each communicator, equal on all its members.
  std::uint64_t id_of_split(std::uint64_t parent, const std::vector<int>& members,
                            std::uint64_t time) {
    return splits_.try_emplace({parent, members, time}, splits_.size() + 1).first->second;
  }

 private:
  /// Returns how many sends wait for their recv().
  std::size_t waiting_sends(std::uint64_t communicator, int from, int to, int world_size) const {
    return static_cast<std::size_t>(std::ranges::count_if(calls_, [&](const auto& entry) {
      const auto& [key, call] = entry;
      return key.communicator == communicator &&
             key.lane == wire::pair_lane(from, to, world_size) && call->parts[0].here &&
             !call->parts[1].here;
    }));
  }

  CallPtr find(const wire::CallKey& key, const std::vector<int>& members) {
    CallPtr& call = calls_[key];
    if (call == nullptr) call = std::make_shared<SimulatedCall>(reactor_, members);
    return call;
  }

  void begin(const wire::CallKey& key, const CallPtr& call) {
    if (const std::string text = call->mismatch(); !text.empty())
      return fail_all(Error(ErrorCode::kInvalidArgument, text));
    const Nanoseconds now = reactor_.clock().now();
    for (std::size_t i = 0; i < call->parts.size(); ++i) {
      for (std::size_t other = 0; other < call->parts.size(); ++other) {
        const Nanoseconds waited = call->parts[other].came - call->parts[i].came;
        if (waited.count() > 0) network_.count_wait(call->members[i], call->members[other], waited);
      }
    }
    if (absent_ == nullptr || !call->touches(*absent_)) call->move_bytes();
    const std::vector<Nanoseconds> times = call->times(network_, now);
    for (std::size_t i = 0; i < times.size(); ++i) {
      reactor_.clock().after(times[i] - now, [self = shared_from_this(), key, call, i] {
        if (call->error) return;
        for (AccessLedger::Access& access : call->parts[i].accesses) access.end();
        call->parts[i].done.set();
        if (++call->ended == call->parts.size()) self->calls_.erase(key);
      });
    }
  }

  void fail_stalled() {
    for (const auto& [key, call] : calls_) {
      std::vector<int> missing;
      const SimulatedCall::Part* waiting = nullptr;
      for (std::size_t i = 0; i < call->parts.size(); ++i) {
        if (call->parts[i].here)
          waiting = &call->parts[i];
        else
          missing.push_back(call->members[i]);
      }
      if (missing.empty() || waiting == nullptr) continue;
      return fail_all(Error(
          ErrorCode::kDeadlineExceeded,
          fmt::format("{} waits for rank {}, which did not come, and nothing else is under way",
                      describe(waiting->spec), fmt::join(missing, ", "))));
    }
  }

  Reactor& reactor_;
  SimulatedNetwork network_;
  const AbsentMemory* absent_;
  AccessLedger* ledger_;
  std::map<wire::CallKey, CallPtr> calls_;
  std::map<std::pair<std::uint64_t, int>, std::function<void(int from)>> hear_sends_;
  std::exception_ptr fate_;
  std::map<std::tuple<std::uint64_t, std::vector<int>, std::uint64_t>, std::uint64_t> splits_;
};

namespace {

/// Waits for a part; keeps the call, because it has the signal.
Task<> wait_for(std::shared_ptr<SimulatedCall> call, std::size_t place) {
  co_await call->parts[place].done.wait();
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> SimulatedCommunicator::create(Reactor& reactor,
                                                                         const NetworkShape& shape,
                                                                         const AbsentMemory* absent,
                                                                         AccessLedger* ledger) {
  const auto world = std::make_shared<SimulatedWorld>(reactor, shape, absent, ledger);
  world->watch_for_stalls();
  auto everyone = std::make_shared<std::vector<int>>();
  for (int rank = 0; rank < shape.ranks; ++rank) everyone->push_back(rank);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    ranks.push_back(
        std::unique_ptr<Communicator>(new SimulatedCommunicator(world, everyone, rank, /*id=*/0)));
  }
  return ranks;
}

SimulatedCommunicator::SimulatedCommunicator(std::shared_ptr<SimulatedWorld> world, Members members,
                                             int place, std::uint64_t id)
    : world_(std::move(world)), members_(std::move(members)), place_(place), id_(id) {}

Task<> SimulatedCommunicator::refuse(const Error& error) {
  world_->fail_all(Error(error.code(),
                         fmt::format("rank {} made an invalid call: {}",
                                     (*members_)[static_cast<std::size_t>(place_)], error.what())));
  return failing(std::make_exception_ptr(error));
}

Task<> SimulatedCommunicator::begin(const Call& call, std::uint64_t lane,
                                    const std::vector<int>& members, std::size_t place) {
  try {
    world_->check_alive();
  } catch (...) {
    return failing(std::current_exception());
  }
  const wire::CallKey key{.communicator = id_, .sequence = next_sequence_[lane]++, .lane = lane};
  return wait_for(world_->join(key, members, place, call), place);
}

/// Issues a call. A send and its recv are one call of two members, the sender first.
Task<> SimulatedCommunicator::issue(const Call& call) {
  if (call.peer < 0) return begin(call, 0, *members_, static_cast<std::size_t>(place_));
  const bool sends = call.spec.kind == CallKind::kSend;
  const int from = sends ? place_ : call.peer;
  const int to = sends ? call.peer : place_;
  const auto rank_of = [this](int place) { return (*members_)[static_cast<std::size_t>(place)]; };
  Task<> ended = begin(call, wire::pair_lane(from, to, world_size()), {rank_of(from), rank_of(to)},
                       sends ? 0 : 1);
  if (sends) world_->sent(id_, from, to, world_size());
  return ended;
}

void SimulatedCommunicator::on_send(std::function<void(int from)> hear) {
  world_->on_send(id_, place_, world_size(), hear);
}

std::unique_ptr<Communicator> SimulatedCommunicator::split(std::span<const int> members) {
  const int place = place_in(members);
  auto ranks = std::make_shared<std::vector<int>>();
  for (const int member : members) ranks->push_back((*members_)[static_cast<std::size_t>(member)]);
  const std::uint64_t id = world_->id_of_split(id_, *ranks, splits_[*ranks]++);
  return std::unique_ptr<Communicator>(
      new SimulatedCommunicator(world_, std::move(ranks), place, id));
}

Traffic SimulatedCommunicator::traffic() const {
  return world_->traffic((*members_)[static_cast<std::size_t>(place_)]);
}

void SimulatedCommunicator::abort(const std::string& reason) {
  world_->fail_all(
      Error(ErrorCode::kUnavailable, "the calls of all ranks were aborted: " + reason));
}

}  // namespace ziggurat
