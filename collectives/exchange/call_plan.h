// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/call_plan.h: which bytes of a call go where, for every kind of call. The
// rest of the exchange knows no kinds.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "collectives/call.h"

namespace ziggurat {

/// What comes in are terms of `sum`, each as long as it is; this rank's own is its `out`.
struct SumPlan {
  DType dtype = DType::kFloat32;
  std::span<std::byte> sum;
  /// all_reduce: where the other ranks' sums belong, by place, and this rank's own.
  std::vector<std::span<std::byte>> results;
};

/// Spans by place in the call's members, this rank's own part included: it is copied.
struct ExchangePlan {
  std::vector<std::span<const std::byte>> out;
  std::vector<std::span<std::byte>> in;  ///< where what comes in belongs; with `sum`, nowhere
  std::optional<SumPlan> sum;
  std::function<void()> finish;  ///< on a worker, when all is there; may be empty
};

/// For the rank at `place` of `size` members. The members of a send and its recv are this rank and
/// the other one.
ExchangePlan plan_of(const Call& call, std::size_t place, std::size_t size);

}  // namespace ziggurat
