// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_saver.cc: an array of a record at a time.
#include "core/checkpoint/state_saver.h"

#include <cstring>
#include <vector>

#include "optimizer/state_values.h"

namespace ziggurat {

Task<> StateSaver::save(ChunkId id, std::span<const std::byte> record) {
  const bool constant = table_.chunk(id).constant;
  for (const ChunkRuns::OfTensor& of : runs_.of(id)) {
    const StateArray& array = runs_.arrays()[of.array];
    const std::uint64_t size = size_bytes(runs_.tensors()[of.tensor].type);
    std::uint64_t first = of.runs.front().at;
    std::uint64_t end = first;
    for (const TensorRun& run : of.runs) end = std::max(end, run.at + run.count);
    std::vector<std::byte> bytes((end - first) * size);
    const std::function<void()> job = [&] {
      if (constant) {
        std::memcpy(bytes.data(), record.data() + first * size, bytes.size());
      } else if (size == array.element_bytes()) {
        read_state_array(table_.state(), of.array, record, first, bytes);
      } else {
        // A constant parameter is fp32 wherever it lies, and this record holds bf16.
        std::vector<float> values(end);
        read_state_values(table_.state(), of.array, record, values);
        std::memcpy(bytes.data(), values.data() + first, bytes.size());
      }
    };
    co_await workers_.run(reactor_, "take state", job);
    std::vector<TensorRun> runs = of.runs;
    for (TensorRun& run : runs) run.at -= first;
    co_await sink_.write(of.tensor, runs, bytes);
  }
}

}  // namespace ziggurat
