// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum.cc: the specification of sums, and the choice of the kernel.
#include "collectives/rank_sum.h"

#include <algorithm>

#include "base/numerics/typed_value.h"
#include "collectives/communicator.h"
#include "collectives/rank_sum_rule.h"

namespace ziggurat {
namespace {

template <class Value>
Value combined(Value a, Value b, Communicator::Op op) {
  switch (op) {
    case Communicator::Op::kSum: return a + b;
    case Communicator::Op::kMin: return std::min(a, b);
    case Communicator::Op::kMax: return std::max(a, b);
  }
  return a;
}

template <class Value>
void combine(std::span<const std::byte* const> contributions, const CallSpec& spec,
             std::byte* result) {
  for (std::size_t i = 0; i < spec.count; ++i) {
    Value total = load_element<Value>(contributions[0], i);
    for (std::size_t r = 1; r < contributions.size(); ++r) {
      total = combined(total, load_element<Value>(contributions[r], i),
                       static_cast<Communicator::Op>(spec.op));
    }
    store_element(result, i, total);
  }
}

}  // namespace

void combine_in_rank_order(std::span<const std::byte* const> contributions, const CallSpec& spec,
                           std::byte* result) {
  if (spec.element == CallElement::kFloat64) return combine<double>(contributions, spec, result);
  combine<std::uint64_t>(contributions, spec, result);
}

void scalar::sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                               std::size_t first, std::size_t count, std::byte* sum) {
  const auto row = [&](std::size_t r) { return contributions[r]; };
  for (std::size_t i = first; i < count; ++i)
    internal::sum_ranks_at(contributions.size(), row, dtype, i, sum);
}

}  // namespace ziggurat
