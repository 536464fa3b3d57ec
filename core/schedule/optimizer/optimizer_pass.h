// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_pass.h: the state of one optimizer sweep, from its first
// gradient to its seal. Only the sources of OptimizerSweep use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/schedule/optimizer/optimizer_sweep.h"

namespace ziggurat {

struct OptimizerSweep::Pass : std::enable_shared_from_this<Pass> {
  /// What has been decided about the step. Until the step is earned, every update made for it is a
  /// guess, which can be taken back.
  enum class State : std::uint8_t {
    kOpen,       ///< gradients arrive; the ranks have not judged the step yet
    kEarned,     ///< judged good; guesses remain valid
    kCorrected,  ///< judged good with other scalars: guessed updates are made again
    kUndone,     ///< judged bad: guessed updates are taken back, and no others are made
  };

  /// How far the work on a chunk has come.
  enum class Stage : std::uint8_t {
    kWaiting,   ///< nothing was begun
    kUnderWay,  ///< a coroutine works on it
    kGuessed,   ///< updated and written while the pass was open; no coroutine works on it
    kEnded,
  };
  /// The chunks from `next` up to, but not including, `end`.
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

  /// Whether updates that were made before the verdict are invalid.
  bool refuted() const noexcept { return state == State::kCorrected || state == State::kUndone; }

  std::uint64_t generation;  // the generation being made
  // Set by give_place() before anything is written:
  std::uint64_t stored = 0;  // number of the store's generation into which records are written
  bool seals = false;        // that generation becomes durable at the end of the pass
  State state = State::kOpen;
  /// While the pass is open: the guess, if there is one. Shared with jobs, which go on when a guess
  /// is refuted.
  std::shared_ptr<const StepScalars> step;
  bool guesses = false;       // updates start while the pass is open
  Nanoseconds guessed_at{0};  // for the trace

  Signal scalars;  // set when `step` is known or the pass is undone
  Signal updated;  // set when every chunk was updated with the right step
  Signal ended;    // set when the verdict is known
  Signal blob_given;
  Signal idle;  // set while no chunk is being worked on
  Signal done;  // set when all chunks are updated and, on NVMe, the generation is durable
  std::vector<std::byte> blob;
  std::size_t chunks_left;    // not yet updated with the right step
  std::size_t records_left;   // not yet written
  std::size_t under_way = 0;  // coroutines
  std::size_t begun = 0;      // coroutines whose chunks take work items from others
  std::vector<std::uint32_t> unit_chunks_left;
  std::vector<Stage> stages;     // per chunk
  std::vector<ChunkId> guessed;  // updated while the pass was open
  std::deque<ChunkRange> due;    // while the pass is open: chunks whose update may begin
  std::size_t next = 0;          // after the verdict: places before this need no other look
  std::size_t ahead = 0;         // number of chunks that read_ahead() need not look at again
  PassPtr previous;              // the pass before, until that is done
};

/// Positions of records in the order of need. They come after every gradient of their step, because
/// a gradient that waits for memory delays the records that need it.
inline constexpr std::uint64_t kFirstRecordPosition = std::uint64_t{1} << 32;

}  // namespace ziggurat
