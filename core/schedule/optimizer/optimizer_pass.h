// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_pass.h: one optimizer sweep from its first gradient to its
// seal. Private to OptimizerSweep's sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/schedule/optimizer/optimizer_sweep.h"

namespace ziggurat {

struct OptimizerSweep::Pass : std::enable_shared_from_this<Pass> {
  /// What has become of the step. Until it is earned, whatever was updated for it is a guess, which
  /// can be taken back.
  enum class State : std::uint8_t {
    kOpen,       ///< gradients arrive; the ranks have not yet judged the step
    kEarned,     ///< judged good; what was guessed stands
    kCorrected,  ///< judged good with other scalars: what was guessed is made again
    kUndone,     ///< judged bad: what was guessed is taken back, nothing is made
  };

  /// How far a chunk has come.
  enum class Stage : std::uint8_t {
    kWaiting,   ///< nothing was begun
    kUnderWay,  ///< a coroutine works on it
    kGuessed,   ///< updated and written while the pass was open; nobody works on it
    kEnded,
  };
  /// Chunks [next, end).
  struct ChunkRange {
    ChunkId next;
    ChunkId end;
  };

  Pass(CancelScope& cancel, std::uint64_t made, const ChunkTable& table)
      : generation(made),
        scalars(cancel),
        updated(cancel),
        ended(cancel),
        blob_given(cancel),
        idle(cancel),
        done(cancel),
        chunks_left(table.updated_count()),
        records_left(table.updated_count()),
        stages(table.chunks().size(), Stage::kWaiting) {
    for (UnitId u = 0; u < table.unit_count(); ++u)
      unit_chunks_left.push_back(table.unit(u).updated_count);
    for (ChunkId id = 0; id < stages.size(); ++id)
      if (table.chunk(id).constant) stages[id] = Stage::kEnded;
    idle.set();
  }

  /// What was made before the verdict counts for nothing.
  bool refuted() const noexcept { return state == State::kCorrected || state == State::kUndone; }

  std::uint64_t generation;  // the one being made
  // Given as soon as something may be written:
  std::uint64_t stored = 0;  // what the store calls the generation that records go into
  bool seals = false;        // it becomes durable as that
  State state = State::kOpen;
  /// While open: the guess, if there is one. Shared with jobs that a refuted guess does not stop.
  std::shared_ptr<const StepScalars> step;
  bool guesses = false;       // updates start while it is open
  Nanoseconds guessed_at{0};  // for the trace

  Signal scalars;  // step is given, or the pass is undone
  Signal updated;  // every chunk was updated with the right step
  Signal ended;    // the verdict is known
  Signal blob_given;
  Signal idle;  // no chunk is being worked on
  Signal done;  // all chunks updated; on NVMe: the generation is durable
  std::vector<std::byte> blob;
  std::size_t chunks_left;    // not yet updated with the right step
  std::size_t records_left;   // not yet written
  std::size_t under_way = 0;  // coroutines
  std::size_t begun = 0;      // those of them that stand in the way of others
  std::vector<std::uint32_t> unit_chunks_left;
  std::vector<Stage> stages;     // per chunk
  std::vector<ChunkId> guessed;  // updated while the pass was open
  std::deque<ChunkRange> due;    // while it is open: whose update may begin
  ChunkId next = 0;              // after the verdict: chunks that need not be looked at again
  ChunkId ahead = 0;             // chunks that read_ahead() need not look at again
  PassPtr previous;              // until it is done
};

/// Records come after every gradient of their step: a gradient that waits for memory is what the
/// record waits for.
inline constexpr std::uint64_t kFirstRecordPosition = std::uint64_t{1} << 32;

}  // namespace ziggurat
