// SPDX-License-Identifier: Apache-2.0
// core/engine/background_save.h: a checkpoint of one generation, written while the next ones are
// made.
//
// Each record is copied once, from wherever costs least: offered by the sweep that makes it, if one
// of the two buffers set aside is free; where it stays in memory, from there; else read from its
// slot, which survives the whole next sweep. A sweep that would destroy what was not copied yet
// waits, in RecordWatch's calls, and its chunk is copied next; longer than stall_max it does not
// wait: the save is given up, and training goes on. Copying waits for records to be made, never for
// a lease, a seal or another rank. Private to core/engine. Reactor's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/state_saver.h"
#include "core/engine/engine.h"
#include "core/engine/storage.h"
#include "core/schedule/context.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/optimizer/record_home.h"
#include "core/schedule/optimizer/record_watch.h"

namespace ziggurat {

class BackgroundSave final : public RecordWatch {
 public:
  static constexpr std::size_t kLanes = 2;
  /// Host memory for records that wait, and for the copies of them that are written.
  static std::uint64_t memory_bytes(const ChunkTable& table) {
    return 2 * kLanes * table.largest_record_bytes();
  }

  struct Parts {
    Context& context;
    Runtime& runtime;
    const RecordHome& records;
    StripedStore* store;  ///< may be null
    Communicator& ranks;  ///< its own
    EngineConfig::Checkpoint settings;
  };
  explicit BackgroundSave(const Parts& parts);
  ~BackgroundSave() override;
  void set_sweep(OptimizerSweep& sweep) noexcept { sweep_ = &sweep; }

  struct Request {
    std::uint64_t generation = 0;  ///< a finished step; the newest
    std::uint64_t stored = 0;      ///< what the store calls it, where records are in the store
    SavingRank rank{};
    CheckpointSave::Request checkpoint{};
  };
  /// Every rank, in the same order; none is under way. It goes on as a task of the context, and
  /// what goes wrong ends the save alone.
  void begin(Request request);
  bool under_way() const noexcept { return run_ != nullptr; }
  Task<> ended();
  /// Those that ended since this was asked last.
  std::vector<SaveOutcome> take_outcomes() { return std::exchange(outcomes_, {}); }

  Task<> made(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record) override;
  Task<> before_change(ChunkId chunk, std::uint64_t generation) override;
  Task<> before_write(ChunkId chunk, std::uint64_t generation, std::uint64_t stored) override;

 private:
  enum class Copy : std::uint8_t { kPending, kTaken, kDone };
  /// A buffer and who fills and empties it.
  struct Lane {
    enum class State : std::uint8_t {
      kBusy,     ///< copies, or has ended
      kIdle,     ///< may be offered a record
      kFilling,  ///< its buffer is being filled with one
      kFull,     ///< the buffer holds `chunk`'s
    };
    std::span<std::byte> buffer{};
    State state = State::kBusy;
    ChunkId chunk = 0;
  };
  struct Run;
  using RunPtr = std::shared_ptr<Run>;

  Task<> save(RunPtr run, Request request);
  Task<> copy_all(RunPtr run, CheckpointSave& save);
  Task<> lane(RunPtr run, StateSaver& saver, std::size_t index);
  Task<> copy(RunPtr run, StateSaver& saver, ChunkId chunk, Lane& lane);
  Task<std::span<const std::byte>> record_of(RunPtr run, ChunkId chunk, Lane& lane);
  std::optional<ChunkId> next(Run& run);
  static void take(Run& run, ChunkId chunk, Lane& lane, Lane::State state);
  bool is_at_hand(ChunkId chunk) const;
  Task<> watch_sweep(RunPtr run);
  Task<> hold(ChunkId chunk);
  Task<> pace(RunPtr run, std::uint64_t size_bytes);
  void done(Run& run, ChunkId chunk);
  static void give_up(Run& run, std::exception_ptr why);
  Task<> open_folder(std::string folder);

  Parts parts_;
  OptimizerSweep* sweep_ = nullptr;
  AlignedMemory memory_;
  WorkerPool caller_{{.threads = 1, .cpus = {}}};  // a target that hangs stops it, and no step
  std::map<std::string, std::unique_ptr<IoEngine>> engines_;  // by folder
  RunPtr run_;
  Signal idle_;
  std::vector<SaveOutcome> outcomes_;
  int save_track_ = 0;  // of the trace, where there is one
  int wait_track_ = 0;
};

}  // namespace ziggurat
