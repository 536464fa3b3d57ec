// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_communicator.cc: which bytes of a call go where.
#include "collectives/exchange/exchange_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "collectives/call_shape.h"
#include "collectives/exchange/exchange_call.h"

namespace ziggurat {
namespace {

using wire::CallKind;
using wire::CallSpec;

Task<> rethrow(std::exception_ptr error) {
  std::rethrow_exception(error);
  co_return;
}

template <class Value>
Value combined(Value a, Value b, Communicator::Op op) {
  switch (op) {
    case Communicator::Op::kSum: return a + b;
    case Communicator::Op::kMin: return std::min(a, b);
    case Communicator::Op::kMax: return std::max(a, b);
  }
  return a;
}

/// Slice `place` of `count` elements over `world` ranks: as even as whole elements allow.
std::pair<std::size_t, std::size_t> slice_of(std::size_t count, std::size_t place,
                                             std::size_t world) {
  const std::size_t each = (count + world - 1) / world;
  const std::size_t begin = std::min(count, place * each);
  return {begin, std::min(count, begin + each) - begin};
}

}  // namespace

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

template <class Check>
std::optional<Task<>> ExchangeCommunicator::refused(const Check& check) {
  try {
    check();
  } catch (const Error& error) {
    transport_->fail(error.code(), fmt::format("rank {} made a call that cannot be: {}",
                                               transport_->rank(), error.what()));
    return rethrow(std::current_exception());
  }
  return std::nullopt;
}

Task<> ExchangeCommunicator::issue(const CallSpec& spec, ExchangePlan plan) {
  return transport_->issue(id_, 0, spec, members_, std::move(plan));
}

Task<> ExchangeCommunicator::all_gather(std::span<const std::byte> input,
                                        std::span<std::byte> output) {
  if (auto task = refused([&] { check_all_gather(input.size(), output.size(), world_size()); })) {
    return std::move(*task);
  }
  ExchangePlan plan;
  plan.out.assign(members_->size(), input);
  for (std::size_t p = 0; p < members_->size(); ++p) {
    plan.in.push_back(output.subspan(p * input.size(), input.size()));
  }
  plan.own = {input, plan.in[static_cast<std::size_t>(place_)]};
  return issue({.kind = CallKind::kAllGather, .count = input.size()}, std::move(plan));
}

Task<> ExchangeCommunicator::reduce_scatter(std::span<const std::byte> input,
                                            std::span<std::byte> output, DType dtype) {
  if (auto task = refused(
          [&] { check_reduce_scatter(input.size(), output.size(), dtype, world_size()); })) {
    return std::move(*task);
  }
  ExchangePlan plan;
  for (std::size_t p = 0; p < members_->size(); ++p) {
    plan.out.push_back(input.subspan(p * output.size(), output.size()));
  }
  plan.sums = true;
  plan.dtype = dtype;
  plan.contribution = plan.out[static_cast<std::size_t>(place_)];
  plan.sum = output;
  return issue({.kind = CallKind::kReduceScatter,
                .element = wire::element_of(dtype),
                .count = output.size() / size_bytes(dtype)},
               std::move(plan));
}

Task<> ExchangeCommunicator::all_reduce(std::span<std::byte> values, DType dtype) {
  if (auto task = refused([&] { check_all_reduce(values.size(), dtype); })) {
    return std::move(*task);
  }
  const std::size_t count = values.size() / size_bytes(dtype);
  ExchangePlan plan;
  for (std::size_t p = 0; p < members_->size(); ++p) {
    const auto [begin, length] = slice_of(count, p, members_->size());
    plan.results.push_back(values.subspan(begin * size_bytes(dtype), length * size_bytes(dtype)));
    plan.out.push_back(plan.results.back());
  }
  plan.sums = true;
  plan.dtype = dtype;
  plan.sum = plan.results[static_cast<std::size_t>(place_)];
  plan.contribution = plan.sum;
  return issue({.kind = CallKind::kAllReduce, .element = wire::element_of(dtype), .count = count},
               std::move(plan));
}

/// Everybody gets everybody's values, and sums them alike.
template <class Value>
Task<> ExchangeCommunicator::reduce_values(std::span<Value> values, Op op, wire::Element element) {
  const std::size_t world = members_->size();
  const auto all = std::make_shared<std::vector<Value>>(world * values.size());
  const auto slice = [&](std::size_t p) {
    return std::as_writable_bytes(std::span(*all).subspan(p * values.size(), values.size()));
  };
  ExchangePlan plan;
  for (std::size_t p = 0; p < world; ++p) plan.in.push_back(slice(p));
  plan.out.assign(world, std::as_bytes(values));
  plan.own = {std::as_bytes(values), plan.in[static_cast<std::size_t>(place_)]};
  plan.finish = [all, values, op, world] {
    for (std::size_t i = 0; i < values.size(); ++i) {
      Value total = (*all)[i];
      for (std::size_t p = 1; p < world; ++p) {
        total = combined(total, (*all)[p * values.size() + i], op);
      }
      values[i] = total;
    }
  };
  return issue({.kind = CallKind::kAllReduceValues,
                .element = element,
                .op = static_cast<std::uint8_t>(op),
                .count = values.size()},
               std::move(plan));
}

Task<> ExchangeCommunicator::all_reduce(std::span<double> values, Op op) {
  return reduce_values(values, op, wire::Element::kFloat64);
}

Task<> ExchangeCommunicator::all_reduce(std::span<std::uint64_t> values, Op op) {
  return reduce_values(values, op, wire::Element::kUInt64);
}

Task<> ExchangeCommunicator::all_to_all(std::span<const std::byte> input,
                                        std::span<std::byte> output) {
  if (auto task = refused([&] { check_all_to_all(input.size(), output.size(), world_size()); })) {
    return std::move(*task);
  }
  const std::size_t each = input.size() / members_->size();
  ExchangePlan plan;
  for (std::size_t p = 0; p < members_->size(); ++p) {
    plan.out.push_back(input.subspan(p * each, each));
    plan.in.push_back(output.subspan(p * each, each));
  }
  const auto own = static_cast<std::size_t>(place_);
  plan.own = {plan.out[own], plan.in[own]};
  return issue({.kind = CallKind::kAllToAll, .count = each}, std::move(plan));
}

Task<> ExchangeCommunicator::broadcast(std::span<std::byte> bytes, int root) {
  if (auto task = refused([&] { check_root(root, world_size()); })) return std::move(*task);
  ExchangePlan plan;
  plan.out.resize(members_->size());
  plan.in.resize(members_->size());
  if (root == place_) {
    plan.out.assign(members_->size(), bytes);
  } else {
    plan.in[static_cast<std::size_t>(root)] = bytes;
  }
  return issue({.kind = CallKind::kBroadcast, .root = root, .count = bytes.size()},
               std::move(plan));
}

Task<> ExchangeCommunicator::barrier() { return issue({.kind = CallKind::kBarrier}, {}); }

Task<> ExchangeCommunicator::exchange_with(int peer, const CallSpec& spec, ExchangePlan plan,
                                           bool sends) {
  const std::vector<int> pair{transport_->rank(), (*members_)[static_cast<std::size_t>(peer)]};
  const int from = sends ? place_ : peer;
  const int to = sends ? peer : place_;
  const std::uint64_t lane = wire::pair_lane(from, to, world_size());
  return transport_->issue(id_, lane, spec, std::make_shared<const std::vector<int>>(pair),
                           std::move(plan));
}

Task<> ExchangeCommunicator::send(std::span<const std::byte> bytes, int to) {
  if (auto task = refused([&] { check_peer("send", to, place_, world_size()); })) {
    return std::move(*task);
  }
  ExchangePlan plan;
  plan.out = {{}, bytes};
  return exchange_with(to, {.kind = CallKind::kSend, .count = bytes.size()}, std::move(plan), true);
}

Task<> ExchangeCommunicator::recv(std::span<std::byte> bytes, int from) {
  if (auto task = refused([&] { check_peer("recv", from, place_, world_size()); })) {
    return std::move(*task);
  }
  ExchangePlan plan;
  plan.in = {{}, bytes};
  return exchange_with(from, {.kind = CallKind::kRecv, .count = bytes.size()}, std::move(plan),
                       false);
}

std::unique_ptr<Communicator> ExchangeCommunicator::split(std::span<const int> members) {
  check_members(members, place_, world_size());
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back((*members_)[static_cast<std::size_t>(member)]);
  std::uint64_t id = mix_seed(id_, ++splits_[ranks]);
  for (const int rank : ranks) id = mix_seed(id, static_cast<std::uint64_t>(rank));
  auto shared = std::make_shared<const std::vector<int>>(std::move(ranks));
  return std::unique_ptr<Communicator>(new ExchangeCommunicator(transport_, std::move(shared), id));
}

void ExchangeCommunicator::abort(const std::string& reason) {
  transport_->fail(ErrorCode::kUnavailable, "the ranks were told to stop: " + reason);
}

}  // namespace ziggurat
