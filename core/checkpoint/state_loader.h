// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_loader.h: fills a rank's records from any source. It does not matter how
// the source divides the state, and other formats are converted.
//
// These cases keep every bit: the same format; fp32 and split; bf16 to fp32; 8 bits if units have
// the same parameters in the same order. Anything else rounds, and notes() names it. Reactor's
// thread.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aio/aligned_bytes.h"
#include "base/runtime/worker_pool.h"
#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/load_options.h"
#include "core/checkpoint/state_source.h"

namespace ziggurat {

class StateLoader {
 public:
  /// Matches the source's tensors with those of `table`. All references must outlive this. Errors:
  /// kInvalidArgument, naming the source and all parameters concerned, if parameters have another
  /// shape in the source or, unless LoadOptions::initialize is given, if the source or the model
  /// lacks some; for the state of another optimizer; for weights without an optimizer's state,
  /// unless only weights are wanted.
  StateLoader(Reactor& reactor, Workers& workers, const ChunkTable& table, StateSource& source,
              LoadOptions options, float initial_accumulator);

  /// Fills the chunk's record. Errors: those of the source.
  Task<> load(ChunkId chunk, std::span<std::byte> record);

  /// Step at which the loaded state stands.
  std::uint64_t step() const noexcept;
  /// What is lost or left out, one line for each.
  std::vector<std::string> notes() const;

 private:
  /// Says how an array of this table comes from the source.
  enum class Way : std::uint8_t { kFresh, kSame, kConverted };
  struct Array {
    Way way = Way::kFresh;
    std::string note{};
  };
  /// The source's tensors, by array and by the name that this table's model has for their owner.
  using ByName = std::map<std::pair<std::string, std::string>, int>;
  ByName source_tensors() const;
  /// Says where the scales of 8-bit codes are. scales_ maps the number of the codes' tensor to it.
  struct Scales {
    std::size_t tensor;          // of the source
    std::uint64_t unit_element;  // index of the first code in the unit of the scales
  };
  void find_scales();
  void match();
  void match_tensors();
  void match_array(std::size_t array);
  void note_fresh_arrays();
  void require_optimizer() const;
  bool units_alike() const;
  bool fills(ChunkId chunk, std::span<const ChunkRuns::OfTensor> all,
             std::span<const std::byte> record) const;
  void begin_record(ChunkId chunk, std::span<std::byte> record) const;
  Task<> copy(const ChunkRuns::OfTensor& of, ChunkId chunk, std::span<std::byte> record);
  Task<> convert(std::size_t array, std::span<const ChunkRuns::OfTensor> all, ChunkId chunk,
                 std::span<std::byte> record);
  std::vector<TensorRun> parts_of(ChunkId chunk) const;
  Task<> read_values(const ChunkRuns::OfTensor& of, std::span<float> values);
  Task<> decode(std::size_t codes, const ChunkRuns::OfTensor& of, std::span<const std::byte> bytes,
                std::span<float> values);

  Reactor& reactor_;
  Workers& workers_;
  const ChunkTable& table_;
  StateSource& source_;
  LoadOptions options_;
  float initial_accumulator_;
  ChunkRuns runs_;
  std::vector<int> sources_;   // per tensor of runs_: the source's tensor; -1 if there is none
  std::vector<Array> arrays_;  // per array of runs_
  std::unordered_map<std::size_t, Scales> scales_;  // by the number of the codes' tensor
  std::set<std::string> missing_;                   // parameters that the source lacks
  std::vector<std::string> notes_;
  AlignedPool memory_;
};

}  // namespace ziggurat
