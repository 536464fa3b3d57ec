// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_communicator.cc: passes calls and their members to the transport.
#include "collectives/exchange/exchange_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "collectives/exchange/call_plan.h"

namespace ziggurat {

ExchangeCommunicator::ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport,
                                           Members members, std::uint64_t id)
    : transport_(std::move(transport)), members_(std::move(members)), id_(id) {
  const auto own = std::find(members_->begin(), members_->end(), transport_->rank());
  place_ = static_cast<int>(own - members_->begin());
}

ExchangeCommunicator::ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport)
    : transport_(std::move(transport)) {
  std::vector<int> all(static_cast<std::size_t>(transport_->world_size()));
  std::iota(all.begin(), all.end(), 0);
  members_ = std::make_shared<const std::vector<int>>(std::move(all));
  place_ = transport_->rank();
}

Task<> ExchangeCommunicator::issue(const Call& call) {
  if (call.peer < 0) {
    return transport_->issue(id_, 0, call.spec, members_,
                             plan_of(call, static_cast<std::size_t>(place_), members_->size()));
  }
  const bool sends = call.spec.kind == CallKind::kSend;
  const int from = sends ? place_ : call.peer;
  const int to = sends ? call.peer : place_;
  const std::vector<int> pair{transport_->rank(), (*members_)[static_cast<std::size_t>(call.peer)]};
  return transport_->issue(id_, wire::pair_lane(from, to, world_size()), call.spec,
                           std::make_shared<const std::vector<int>>(pair),
                           plan_of(call, 0, pair.size()));
}

Task<> ExchangeCommunicator::refuse(const Error& error) {
  transport_->fail(error.code(), fmt::format("rank {} made an invalid call: {}", transport_->rank(),
                                             error.what()));
  return failing(std::make_exception_ptr(error));
}

void ExchangeCommunicator::on_send(std::function<void(int from)> hear) {
  if (!hear) return transport_->on_send(id_, {});
  transport_->on_send(id_, [hear = std::move(hear), world = world_size()](std::uint64_t lane) {
    hear(wire::sender_of(lane, world));
  });
}

std::unique_ptr<ExchangeCommunicator> ExchangeCommunicator::part(std::span<const int> members) {
  place_in(members);
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back((*members_)[static_cast<std::size_t>(member)]);
  std::uint64_t id = mix_seed(id_, ++splits_[ranks]);
  for (const int rank : ranks) id = mix_seed(id, static_cast<std::uint64_t>(rank));
  auto shared = std::make_shared<const std::vector<int>>(std::move(ranks));
  return std::unique_ptr<ExchangeCommunicator>(
      new ExchangeCommunicator(transport_, std::move(shared), id));
}

void ExchangeCommunicator::abort(const std::string& reason) {
  transport_->fail(ErrorCode::kUnavailable, "the calls of all ranks were aborted: " + reason);
}

}  // namespace ziggurat
