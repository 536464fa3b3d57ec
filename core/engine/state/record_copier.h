// SPDX-License-Identifier: Apache-2.0
// core/engine/state/record_copier.h: copies the records of one generation while the next ones are
// made.
//
// Each record is copied to one of two buffers from wherever this costs least: from the sweep that
// makes it; from memory, if the record stays there and is still that generation's; else from its
// slot in the store, which the whole next sweep does not touch. The record is saved from the
// buffer, and no step waits for that.
//
// A sweep that would overwrite a record which was not copied yet waits in RecordWatch's calls, and
// that record is copied next: to spare memory, as long as there is some, else to one of the two
// buffers. All waits for a copy together last at most stall_max; then the copy is given up. Even
// then a sweep waits for a record that is just being read. Copying waits for records to be made,
// but never for a lease, a seal or another rank. Private to core/engine. Reactor's thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "aio/aligned_bytes.h"
#include "base/error.h"
#include "core/engine/state/save_pace.h"
#include "core/engine/state/stall_limit.h"
#include "core/schedule/context.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/optimizer/record_home.h"
#include "core/schedule/optimizer/record_watch.h"

namespace ziggurat {

class RecordCopier final : public RecordWatch {
 public:
  static constexpr std::size_t kLanes = 2;

  struct Parts {
    Context& context;
    const RecordHome& records;
    StripedStore* store;  ///< may be null
  };
  explicit RecordCopier(const Parts& parts);
  void set_sweep(OptimizerSweep& sweep) noexcept { sweep_ = &sweep; }

  struct Request {
    std::uint64_t generation = 0;  ///< the newest finished step
    std::uint64_t stored = 0;      ///< the store's number of it, if records are in the store
    std::span<std::byte> buffers;  ///< kLanes of the largest record
    /// Keeps the buffers. Without it they must outlive the sweep, which may be filling one when the
    /// copy ends.
    std::shared_ptr<const void> keeps_buffers = nullptr;
    std::uint64_t spare_bytes = 0;  ///< the most memory that copies take beside the buffers
    double stall_max_s = 0;
    std::uint64_t bandwidth_bytes_per_s = 0;  ///< see SavePace; 0 if there is no limit
  };
  /// Begins a copy, of those chunks for which `has` returns true, when none is under way. From here
  /// on sweeps wait for it.
  void begin(const Request& request, const std::function<bool(ChunkId)>& has);
  /// Saves a record, which it may change. Training does not wait for it.
  using Save = std::function<Task<>(ChunkId chunk, std::span<std::byte> record)>;
  /// Copies all records that were asked for. Returns too when the copy has failed or was given up:
  /// see failure().
  Task<> copy_all(const Save& save);
  /// Ends the copy, if one is under way.
  void end();
  bool under_way() const noexcept { return run_ != nullptr; }

  /// Stops all waits for the copy, except for a record that is just being read.
  void give_up(std::exception_ptr why);
  /// Return false, null, 0 if no copy is under way.
  bool given_up() const noexcept;
  std::exception_ptr failure() const noexcept;
  Nanoseconds stalled() const noexcept;
  /// Whether nothing is saved because bandwidth_bytes_per_s forbids it.
  bool waits_for_time() const noexcept;

  bool watching() const noexcept override { return run_ != nullptr; }
  Task<> made(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record) override;
  Task<> before_change(ChunkId chunk, std::uint64_t generation) override;
  Task<> before_write(ChunkId chunk, std::uint64_t generation, std::uint64_t stored) override;

 private:
  enum class Copy : std::uint8_t {
    kPending,
    kTaken,  ///< being copied
    kDone,   ///< copied or not needed: sweeps may overwrite its memory and slot
  };
  /// A buffer, with the task that fills and empties it.
  struct Lane {
    enum class State : std::uint8_t {
      kBusy,     ///< copies or saves a record, or has ended
      kIdle,     ///< may be offered a record
      kFilling,  ///< its buffer is being filled by a sweep
      kFull,     ///< its buffer holds the record of `chunk`
    };
    std::span<std::byte> buffer{};
    State state = State::kBusy;
    ChunkId chunk = 0;
    /// Set when the bandwidth allows the next record to be saved, or when the copy is over.
    std::shared_ptr<Signal> due{};
  };
  /// A record in spare memory.
  struct SetAside {
    ChunkId chunk;
    AlignedBytes record;
  };
  struct Run;
  using RunPtr = std::shared_ptr<Run>;

  Task<> lane(RunPtr run, const Save& save, std::size_t index);
  Task<> save_next(Run& run, const Save& save, Lane& lane, ChunkId chunk);
  Task<> save_set_aside(Run& run, const Save& save, Lane& lane);
  Task<> fill(Run& run, ChunkId chunk, std::span<std::byte> buffer);
  Task<> bring(Run& run, ChunkId chunk, std::span<std::byte> buffer);
  static std::optional<ChunkId> next_urgent(Run& run);
  std::optional<ChunkId> next(Run& run);
  static void take(Run& run, ChunkId chunk);
  Task<> watch_sweep(RunPtr run);
  Task<> hold(ChunkId chunk);
  Task<> set_aside(RunPtr run, ChunkId chunk);
  Task<> pace(Run& run, Lane& lane, std::uint64_t size_bytes);
  static void copied(Run& run, ChunkId chunk);
  static void give_up(Run& run, std::exception_ptr why);
  static Error stalled_too_long(const Request& request);

  Parts parts_;
  OptimizerSweep* sweep_ = nullptr;
  RunPtr run_;
  int wait_track_ = 0;  // track of the trace, if there is one
};

}  // namespace ziggurat
