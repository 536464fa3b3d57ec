// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/call_plan.cc: makes the plan of each kind of call with a function of its
// own.
#include "collectives/exchange/call_plan.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "collectives/rank_sum.h"

namespace ziggurat {
namespace {

/// Returns begin and size of slice `place` of `count` elements over `size` ranks. Slices are as
/// even as whole elements allow.
std::pair<std::size_t, std::size_t> slice_of(std::size_t count, std::size_t place,
                                             std::size_t size) {
  const std::size_t each = (count + size - 1) / size;
  const std::size_t begin = std::min(count, place * each);
  return {begin, std::min(count, begin + each) - begin};
}

ExchangePlan all_gather(const Call& call, std::size_t size) {
  const std::size_t each = call.input.size();
  ExchangePlan plan;
  plan.out.assign(size, call.input);
  for (std::size_t p = 0; p < size; ++p) plan.in.push_back(call.output.subspan(p * each, each));
  return plan;
}

ExchangePlan all_to_all(const Call& call, std::size_t size) {
  const std::size_t each = call.input.size() / size;
  ExchangePlan plan;
  for (std::size_t p = 0; p < size; ++p) {
    plan.out.push_back(call.input.subspan(p * each, each));
    plan.in.push_back(call.output.subspan(p * each, each));
  }
  return plan;
}

ExchangePlan reduce_scatter(const Call& call, std::size_t size) {
  const std::size_t each = call.output.size();
  ExchangePlan plan;
  for (std::size_t p = 0; p < size; ++p) plan.out.push_back(call.input.subspan(p * each, each));
  plan.sum = {.dtype = dtype_of(call.spec.element), .sum = call.output, .results = {}};
  return plan;
}

ExchangePlan all_reduce(const Call& call, std::size_t place, std::size_t size) {
  const std::size_t element = size_bytes(call.spec.element);
  ExchangePlan plan;
  plan.sum.emplace().dtype = dtype_of(call.spec.element);
  for (std::size_t p = 0; p < size; ++p) {
    const auto [begin, count] = slice_of(call.spec.count, p, size);
    const auto slice = call.output.subspan(begin * element, count * element);
    plan.sum->results.push_back(slice);
    plan.out.push_back(slice);
  }
  plan.sum->sum = plan.sum->results[place];
  return plan;
}

/// Plans an all_reduce of values: every rank gets all values, and all ranks sum them in the same
/// order.
ExchangePlan all_reduce_values(const Call& call, std::size_t size) {
  const std::size_t each = call.input.size();
  const auto all = std::make_shared<std::vector<std::byte>>(size * each);
  ExchangePlan plan;
  plan.out.assign(size, call.input);
  for (std::size_t p = 0; p < size; ++p) plan.in.push_back(std::span(*all).subspan(p * each, each));
  plan.finish = [all, call, size, each] {
    std::vector<const std::byte*> values(size);
    for (std::size_t p = 0; p < size; ++p) values[p] = all->data() + p * each;
    combine_in_rank_order(values, call.spec, call.output.data());
  };
  return plan;
}

}  // namespace

ExchangePlan plan_of(const Call& call, std::size_t place, std::size_t size) {
  switch (call.spec.kind) {
    case CallKind::kAllGather: return all_gather(call, size);
    case CallKind::kReduceScatter: return reduce_scatter(call, size);
    case CallKind::kAllReduce: return all_reduce(call, place, size);
    case CallKind::kAllReduceValues: return all_reduce_values(call, size);
    case CallKind::kAllToAll: return all_to_all(call, size);
    case CallKind::kSend: return {.out = {{}, call.input}, .in = {{}, {}}, .sum = {}, .finish = {}};
    case CallKind::kRecv:
      return {.out = {{}, {}}, .in = {{}, call.output}, .sum = {}, .finish = {}};
    case CallKind::kBarrier: break;
  }
  ExchangePlan nothing;
  nothing.out.resize(size);
  nothing.in.resize(size);
  return nothing;
}

}  // namespace ziggurat
