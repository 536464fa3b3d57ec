// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_ranks.h: what the ranks that divide every layer tell each other between
// its phases. Called from the trainer's thread by every rank alike; blocks.
//
// Sums are in rank order in fp32, rounded once to the type of the values. Over T ranks a rank sends
// of V bytes 2 V (T-1)/T to sum them everywhere, and half of that to sum them to each rank's own
// rows, or to gather those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "collectives/communicator.h"
#include "collectives/mesh.h"
#include "core/engine/runtime.h"
#include "core/sharding/tensor_part.h"
#include "integrations/gpt/array.h"
#include "integrations/gpt/row_share.h"

namespace ziggurat::gpt {

class TensorRanks {
 public:
  /// Those of `place` among runtime.ranks, which are connected.
  TensorRanks(Runtime& runtime, const Place& place);
  ~TensorRanks();
  TensorRanks(const TensorRanks&) = delete;
  TensorRanks& operator=(const TensorRanks&) = delete;

  TensorPart part() const noexcept { return part_; }

  /// Sums rows.all rows of `width` over ranks; each rank gets its own rows. The bits do
  /// not depend on which rows those are.
  void sum_rows(Array values, const RowShare& rows, std::int64_t width);
  /// Every rank's own rows, to all; nothing where those are all.
  void gather_rows(Array values, const RowShare& rows, std::int64_t width);
  /// The same from another place.
  void gather_rows(ConstArray own, Array values, const RowShare& rows, std::int64_t width);
  /// Each rank's slice of `bytes`, in their order, to all.
  void gather(std::span<std::byte> bytes);
  /// fp32, over ranks.
  void sum(std::span<float> values);

 private:
  template <class Call>
  void wait_for(const Call& call);

  Runtime& runtime_;
  TensorPart part_;
  std::unique_ptr<Communicator> group_;
};

}  // namespace ziggurat::gpt
