// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_loader.h: a rank's records from any source: how the state was cut there
// does not matter, and where its formats are others it is converted.
//
// What keeps every bit: the same format; fp32 and split; bf16 to fp32; 8 bits where units have the
// same parameters in the same order. Anything else rounds, and notes() names it. Reactor's thread.
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
  /// All references must outlive this. Errors: kInvalidArgument naming the source and every
  /// parameter that it has in another shape and, unless LoadOptions::initialize is given, that it
  /// lacks or the model lacks; for another optimizer's state, and for weights without one unless
  /// those are all that is wanted.
  StateLoader(Reactor& reactor, WorkerPool& workers, const ChunkTable& table, StateSource& source,
              LoadOptions options, float initial_accumulator);

  /// Makes the chunk's record. Errors: the source's.
  Task<> load(ChunkId chunk, std::span<std::byte> record);

  /// The step that the state stands at.
  std::uint64_t step() const noexcept;
  /// What is lost or left out, a line each.
  std::vector<std::string> notes() const;

 private:
  /// How an array of this table comes from the source.
  enum class Way : std::uint8_t { kFresh, kSame, kConverted };
  struct Array {
    Way way = Way::kFresh;
    std::string note{};
  };
  /// The source's tensors by array and by what this table's model calls their owner.
  using ByName = std::map<std::pair<std::string, std::string>, int>;
  ByName source_tensors() const;
  /// Where codes of 8 bits have their scales: by the place of the codes' tensor in the source.
  struct Scales {
    std::size_t tensor;          // of the source
    std::uint64_t unit_element;  // the codes' first, in the unit whose blocks the scales are of
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
  Task<> read_values(const ChunkRuns::OfTensor& of, std::span<float> values);
  Task<> decode(std::size_t codes, const ChunkRuns::OfTensor& of, std::span<const std::byte> bytes,
                std::span<float> values);

  Reactor& reactor_;
  WorkerPool& workers_;
  const ChunkTable& table_;
  StateSource& source_;
  LoadOptions options_;
  float initial_accumulator_;
  ChunkRuns runs_;
  std::vector<int> sources_;   // per tensor of runs_: of the source's; -1: none
  std::vector<Array> arrays_;  // per array of runs_
  std::unordered_map<std::size_t, Scales> scales_;  // of the source's codes
  std::set<std::string> missing_;                   // parameters that the source lacks
  std::vector<std::string> notes_;
  AlignedPool memory_;
};

}  // namespace ziggurat
