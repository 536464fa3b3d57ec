// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_saver.cc: saves a few arrays of a record at a time.
#include "core/checkpoint/state_saver.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/runtime/for_each.h"

namespace ziggurat {

Task<> StateSaver::save(ChunkId id, std::span<const std::byte> record) {
  const std::vector<ChunkRuns::OfTensor> all = runs_.of(id);
  const std::function<Task<>(std::size_t)> save_one = [&](std::size_t i) {
    return save_array(all[i], {table_, id, record});
  };
  co_await for_each_index(reactor_, all.size(), kArraysAtOnce, save_one);
}

Task<> StateSaver::save_array(const ChunkRuns::OfTensor& of, ChunkRecord record) {
  const ArrayAs as{of.array, runs_.tensors()[of.tensor].type};
  if (const std::span<const std::byte> whole = array_in(record, as); !whole.empty()) {
    co_await sink_.write(of.tensor, of.runs, whole);
    co_return;
  }
  std::uint64_t end = 0;
  for (const TensorRun& run : of.runs) end = std::max(end, run.at + run.count);
  const AlignedBytes bytes = memory_.take(end * size_bytes(as.type));
  const std::function<void()> job = [&] { take_array(record, as, 0, bytes.span()); };
  co_await workers_.run(reactor_, {"take state", 2 * bytes.span().size()}, job);
  co_await sink_.write(of.tensor, of.runs, bytes.span());
}

}  // namespace ziggurat
