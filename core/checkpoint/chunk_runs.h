// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/chunk_runs.h: a rank's chunks as runs of the model's tensors. Arithmetic only;
// any thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/state_source.h"
#include "core/sharding/chunk_table.h"
#include "optimizer/state_arrays.h"

namespace ziggurat {

class ChunkRuns {
 public:
  /// `table` must outlive this.
  explicit ChunkRuns(const ChunkTable& table);

  /// All tensors of the model, whatever part of it this rank has. A constant parameter has only a
  /// master.
  const std::vector<StateTensor>& tensors() const noexcept { return tensors_; }
  /// The units of which scales are: those of the model, and parameters that have blocks of codes of
  /// their own.
  std::vector<StateUnit> units() const;
  const std::vector<StateArray>& arrays() const noexcept { return arrays_; }

  struct OfTensor {
    std::size_t tensor;  ///< of tensors()
    std::size_t array;   ///< index in arrays(); TensorRun::at counts values of state_array_in()
    std::vector<TensorRun> runs;
  };
  /// Returns what the chunk's record has, without padding, tensor by tensor.
  std::vector<OfTensor> of(ChunkId chunk) const;

  /// Returns the tensor of array `array` over parameter `param` of `unit`, or over the unit itself
  /// if the array holds scales of it; -1 if there is none.
  int tensor(std::size_t array, UnitId unit, std::size_t param) const;

 private:
  void add_unit(UnitId unit, const UnitSpec& whole);
  int add_scale(const StateArray& array, const std::string& owner, std::uint64_t count);
  void add_params(ChunkId chunk, std::vector<OfTensor>& all) const;
  void add_scales(ChunkId chunk, std::vector<OfTensor>& all) const;

  const ChunkTable& table_;
  std::vector<StateArray> arrays_;
  std::vector<StateTensor> tensors_;
  std::vector<std::vector<std::vector<int>>> params_;  // [unit][param][array]: number of the tensor
  std::vector<std::vector<int>> scales_;               // [unit][array]
};

/// A chunk's record.
struct ChunkRecord {
  const ChunkTable& table;
  ChunkId chunk;
  std::span<const std::byte> bytes;
};
/// An array of a record, and the type of the tensor to which its values belong.
struct ArrayAs {
  std::size_t array;  ///< of ChunkRuns::arrays()
  TensorType type;
};
/// Copies values of the array from its `first` on, bit for bit.
void take_array(const ChunkRecord& record, ArrayAs as, std::uint64_t first,
                std::span<std::byte> out);
/// Returns the whole array if the record has its values one after the other in that type; empty
/// otherwise.
std::span<const std::byte> array_in(const ChunkRecord& record, ArrayAs as);

}  // namespace ziggurat
