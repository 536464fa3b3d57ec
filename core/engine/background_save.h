// SPDX-License-Identifier: Apache-2.0
// core/engine/background_save.h: a checkpoint of one generation, written while the next ones are
// made.
//
// Each record comes into one of the two buffers set aside, from wherever costs least: offered by
// the sweep that makes it; from memory where it stays and is that generation's; else from its slot,
// which survives the whole next sweep. From the buffer it is written to the target, and nobody
// waits for that. A sweep that would destroy what was not copied yet waits, in RecordWatch's calls,
// and its chunk is copied next; all of a save's waits together last no longer than stall_max: then
// it is given up. What is just being read from its own memory or slot is waited for even then.
// Copying waits for records to be made, never for a lease, a seal or another rank. Whoever waits
// for its end waits as long as its target answers: one that has not for stall_max (and no less than
// kSilence) hangs, and what was asked of it may never return. Private to core/engine. Reactor's
// thread.
#pragma once

#include <chrono>
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
#include "core/plan/host_plan.h"
#include "core/schedule/context.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/optimizer/record_home.h"
#include "core/schedule/optimizer/record_watch.h"

namespace ziggurat {

class BackgroundSave final : public RecordWatch {
 public:
  static constexpr std::size_t kLanes = 2;
  /// What is allowed between two answers of a target, where training waits no longer for it.
  static constexpr Nanoseconds kSilence = std::chrono::seconds(10);
  /// What is allowed to one sync, one removal, or other ranks, at a save's begin and end.
  static constexpr Nanoseconds kLongSilence = std::chrono::minutes(10);
  /// Host memory for records that wait, and for the copies of them that are written.
  static std::uint64_t memory_bytes(const ChunkTable& table) {
    static_assert(2 * kLanes == kSaveRecords);
    return kSaveRecords * table.largest_record_bytes();
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
  /// The save under way is of no use any more, and no sweep waits for it: here, or on another rank.
  bool given_up() const noexcept;
  void give_up_with_others();
  /// Returns when it has ended, or its target hangs: then it is given up.
  Task<> ended();
  /// What was asked of its target may never return, and uses what this has until then.
  bool hangs() const noexcept { return run_ && hangs_; }
  /// Those that ended since this was asked last.
  std::vector<SaveOutcome> take_outcomes() { return std::exchange(outcomes_, {}); }

  Task<> made(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record) override;
  Task<> before_change(ChunkId chunk, std::uint64_t generation) override;
  Task<> before_write(ChunkId chunk, std::uint64_t generation, std::uint64_t stored) override;

 private:
  enum class Copy : std::uint8_t {
    kPending,
    kTaken,  ///< on its way into a buffer
    kDone,   ///< in a buffer, or in none any more: its memory and slot are the sweeps' again
  };
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
    std::shared_ptr<Signal> due{};  ///< checkpoint_bandwidth allows the next write, or none is made
  };
  struct Run;
  using RunPtr = std::shared_ptr<Run>;

  Task<> save(RunPtr run, Request request);
  Task<> copy_all(RunPtr run, CheckpointSave& save);
  Task<> lane(RunPtr run, StateSaver& saver, std::size_t index);
  Task<> copy(Run& run, StateSaver& saver, ChunkId chunk, Lane& lane);
  Task<> fill(Run& run, ChunkId chunk, std::span<std::byte> buffer);
  Task<> bring(Run& run, ChunkId chunk, std::span<std::byte> buffer);
  std::optional<ChunkId> next(Run& run);
  static void take(Run& run, ChunkId chunk, Lane& lane, Lane::State state);
  Task<> watch_sweep(RunPtr run);
  Task<> hold(ChunkId chunk);
  Error stalled_too_long() const;
  Error not_answered(double seconds) const;
  Task<> ended_or(Nanoseconds longest);
  std::uint64_t answers(const Run& run) const;
  void report(Run& run, SaveOutcome outcome);
  Task<> pace(Run& run, Lane& lane, std::uint64_t size_bytes);
  static void copied(Run& run, ChunkId chunk);
  static void give_up(Run& run, std::exception_ptr why);
  Task<> open_folder(std::string folder);

  Parts parts_;
  OptimizerSweep* sweep_ = nullptr;
  AlignedMemory memory_;
  WorkerPool caller_{{.threads = 1, .cpus = {}}};  // a target that hangs stops it, and no step
  std::map<std::string, std::unique_ptr<IoEngine>> engines_;  // by folder
  RunPtr run_;
  bool hangs_ = false;             // run_'s target
  std::shared_ptr<Signal> ended_;  // of who waits for run_'s end
  Metrics moved_;                  // to targets
  std::vector<SaveOutcome> outcomes_;
  int save_track_ = 0;  // of the trace, where there is one
  int wait_track_ = 0;
};

}  // namespace ziggurat
