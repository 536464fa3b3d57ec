// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_ranks.h: the exchanges, between phases, of the ranks that divide every
// layer. Every rank makes the same calls, from the trainer's thread; they block.
//
// Sums are computed in rank order in fp32, and rounded once to the type of the values. Over T
// ranks, to sum V bytes everywhere a rank sends 2 V (T-1)/T bytes. To sum them to each rank's own
// rows, or to gather those rows, it sends half of that.
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
  /// Groups the tensor-parallel ranks of `place` out of runtime.ranks, which are connected.
  TensorRanks(Runtime& runtime, const Place& place);
  ~TensorRanks();
  TensorRanks(const TensorRanks&) = delete;
  TensorRanks& operator=(const TensorRanks&) = delete;

  TensorPart part() const noexcept { return part_; }

  /// Sums rows.all rows of `width` over ranks; each rank gets its own rows. The bits do not depend
  /// on which rows those are.
  void sum_rows(Array values, const RowShare& rows, std::int64_t width);
  /// Gives every rank's own rows to all ranks; does nothing if each rank has all rows.
  void gather_rows(Array values, const RowShare& rows, std::int64_t width);
  /// Gathers rows into `values` from `own`, which lies elsewhere.
  void gather_rows(ConstArray own, Array values, const RowShare& rows, std::int64_t width);
  /// Gives each rank's slice of `bytes`, which are in the ranks' order, to all ranks.
  void gather(std::span<std::byte> bytes);
  /// Sums fp32 values over the ranks.
  void sum(std::span<float> values);

 private:
  template <class Call>
  void wait_for(const Call& call);

  Runtime& runtime_;
  TensorPart part_;
  std::unique_ptr<Communicator> group_;
};

}  // namespace ziggurat::gpt
