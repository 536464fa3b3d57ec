// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_pass.h: one optimizer sweep from its first gradient to its
// seal. Private to OptimizerSweep's sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/schedule/optimizer/optimizer_sweep.h"

namespace ziggurat {

struct OptimizerSweep::Pass {
  Pass(Reactor& reactor, std::uint64_t made, const ChunkTable& table)
      : generation(made),
        scalars(reactor),
        updated(reactor),
        ended(reactor),
        idle(reactor),
        done(reactor),
        chunks_left(table.chunks().size()),
        records_left(table.chunks().size()),
        started(table.chunks().size(), false) {
    for (UnitId u = 0; u < table.unit_count(); ++u)
      unit_chunks_left.push_back(table.unit(u).chunk_count);
    idle.set();
  }

  std::uint64_t generation;  // the one being made
  StepScalars step;
  bool early = false;         // step was given before the norm was known
  bool certain = false;       // and nothing can change it any more
  bool skipped = false;       // the generation will not be made
  std::uint32_t attempt = 0;  // 1 once a guess at step was wrong: what was made with it is nothing
  Nanoseconds guessed_at{0};  // for the trace

  Signal scalars;  // step is given
  Signal updated;  // every chunk was updated with the right step
  Signal ended;    // the norm and the blob are known, or the step is skipped
  Signal idle;     // no chunk is being worked on
  Signal done;     // all chunks updated; on NVMe: the generation is durable
  std::vector<std::byte> blob;
  std::size_t chunks_left;   // not yet updated with the right step
  std::size_t records_left;  // not yet written
  std::size_t under_way = 0;
  std::vector<std::uint32_t> unit_chunks_left;
  std::vector<bool> started;
  std::vector<ChunkId> guessed;  // updated with a step that may yet turn out wrong
  ChunkId ahead = 0;             // chunks that read_ahead() need not look at again
  PassPtr previous;              // until it is done
};

/// Records come after every gradient of their step: a gradient that waits for memory is what the
/// record waits for.
inline constexpr std::uint64_t kFirstRecordPosition = std::uint64_t{1} << 32;

}  // namespace ziggurat
