// SPDX-License-Identifier: Apache-2.0
// tests/faults/crash_world.h: a job of a few ranks that trains on simulated disks, dies at a chosen
// event and is started again; and the judge of what it finds then.
//
// Every record and blob says which launch wrote it and in which generation, in every byte. The
// world knows which launches may have written which generation, so it notices a lost generation, a
// torn record and two histories mixed, without asking the store. And it looks into every slot of
// the disks before a launch (store_oracle.h): what the store opens is the newest generation that is
// whole there, it names a newer one that it gives up, and where none is whole, it refuses and
// leaves every byte as it was.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "aio/simulated_engine.h"
#include "base/error.h"
#include "tests/faults/store_oracle.h"
#include "tiers/store/meeting.h"
#include "tiers/store/striped_store.h"

namespace ziggurat::faults {

inline const std::string kDirectory = "/store";

/// Records of 1, 2 and 1 tiles of arrays of uneven size, as 8-bit moments have them.
inline RecordFormat uneven_format() {
  return RecordFormat(
      {{"master", 64 * 1024}, {"codes", 16 * 1024}, {"more codes", 16 * 1024}, {"scales", 256}});
}
inline std::vector<std::uint64_t> uneven_records() {
  const RecordFormat format = uneven_format();
  return {format.record_bytes(1), format.record_bytes(2), format.record_bytes(1)};
}

struct WorldOptions {
  int ranks = 1;
  int stripes = 1;  ///< of each rank, each with an engine of its own
  std::vector<std::uint64_t> record_bytes{64 * 1024, 128 * 1024, 64 * 1024};
  RecordFormat record_format{};
  std::uint32_t slots = 2;
  std::uint64_t capacity_bytes = std::uint64_t{1} << 40;
  /// The drives may lose what they promised: only what is left of it is asked for.
  bool lying_drives = false;
};

struct Launch {
  enum class Start {
    kCreate,
    kResume,
    kAuto
  } start = Start::kAuto;  ///< kAuto: resume if any rank has a store
  int steps = 2;
  std::uint64_t seed = 1;                              ///< of completion times
  std::optional<std::uint64_t> power_cut_after{};      ///< events
  std::function<bool(std::uint64_t)> sync_is_a_lie{};  ///< SimulatedEngineOptions, of every rank
  std::function<bool(std::uint64_t)> sync_fails{};     ///< likewise
  std::function<WriteFate(std::uint64_t drive, std::uint64_t index)> write_fate{};
  /// Steps write some records on a guess, discard them in the midst of that, and write all anew.
  bool speculates = false;
};

struct LaunchResult {
  bool finished = false;                   ///< every rank got to its end
  std::exception_ptr error;                ///< the first one otherwise
  std::vector<std::exception_ptr> errors;  ///< by rank
  bool started = false;                    ///< every rank had its store and had verified it
  std::uint64_t resumed_at = 0;
  std::uint64_t events = 0;
  std::vector<std::vector<std::string>> notes;  ///< by rank
};

/// An ErrorCode and message, or "finished".
std::string describe(const LaunchResult& result);
ErrorCode code_of(const std::exception_ptr& error);

class CrashWorld {
 public:
  explicit CrashWorld(WorldOptions options);
  CrashWorld(const CrashWorld& other);  ///< between launches: the same disks and the same past
  ~CrashWorld();

  /// Runs one job to its end or to the power cut. What it finds at its start is judged; a wrong
  /// byte or a mixed history is a fault().
  LaunchResult launch(const Launch& launch);

  /// What the judge found wrong first, or "". A launch that fails with the power on counts too.
  const std::string& fault() const noexcept { return fault_; }
  SimulatedDisk& disk() noexcept { return disk_; }
  std::string path(int rank, std::uint32_t stripe = 0) const {
    return kDirectory + "/" + StateStore::file_name(rank, stripe);
  }
  std::string temporary_path(int rank, std::uint32_t stripe = 0) const {
    return kDirectory + "/" + StateStore::temporary_name(rank, stripe);
  }
  StoreSpec spec() const;
  /// What was on the disks before the last launch.
  const OracleFinding& provable() const noexcept { return provable_; }
  /// Newest generation that every rank has reported durable.
  std::optional<std::uint64_t> promised() const;

 private:
  struct Rank;
  Task<> run_rank(Rank& rank, const Launch& launch);
  Task<> start(Rank& rank, const Launch& launch);
  Task<> settle(Rank& rank);
  Task<> look_at_records(Rank& rank, std::vector<RecordDamage>& damaged);
  Task<> step(Rank& rank, std::uint64_t generation, const Launch& launch);
  Task<> write(Rank& rank, std::uint64_t generation, ChunkId chunk, Signal* discarded);
  std::span<std::byte> fill_record(Rank& rank, ChunkId chunk, std::uint64_t tagged_generation);
  void judge();
  void judge_notes(const std::string& wanted);
  void judge_refusal(const LaunchResult& result, const SimulatedDisk& before);
  void blame(const std::string& fault);

  WorldOptions options_;
  SimulatedDisk disk_;
  std::string fault_;
  std::uint64_t launches_ = 0;
  OracleFinding provable_;                    ///< before the last launch
  std::vector<std::unique_ptr<Rank>> ranks_;  ///< of the launch under way
  std::set<std::pair<std::uint64_t, std::uint64_t>>
      written_;  ///< (launch, generation) that a recovery may find
  /// Launches that may or may not have given a new store its name
  std::set<std::uint64_t> creations_;
  /// By rank: newest generation its commit() reported
  std::vector<std::optional<std::uint64_t>> durable_;
};

}  // namespace ziggurat::faults
