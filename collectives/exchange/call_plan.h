// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/call_plan.h: plans which bytes of a call go where, for every kind of call.
// Only this file of the exchange knows the kinds.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "collectives/call.h"

namespace ziggurat {

/// A sum. The bytes that come in are terms of `sum`, each as long as `sum`; this rank's own term is
/// its `out`.
struct SumPlan {
  DType dtype = DType::kFloat32;
  std::span<std::byte> sum;
  /// For all_reduce: where the sums of all ranks are stored, by place, including this rank's own.
  std::vector<std::span<std::byte>> results;
};

/// What a call sends and receives, by place in the call's members. This rank's own part is copied.
struct ExchangePlan {
  std::vector<std::span<const std::byte>> out;
  std::vector<std::span<std::byte>> in;  ///< where the bytes that come in are stored; empty spans
                                         ///< with `sum`
  std::optional<SumPlan> sum;
  std::function<void()> finish;  ///< called on a worker when all bytes are there; may be empty
};

/// Returns the plan for the rank at `place` of `size` members. A send and its recv have two
/// members: this rank and the other one.
ExchangePlan plan_of(const Call& call, std::size_t place, std::size_t size);

}  // namespace ziggurat
