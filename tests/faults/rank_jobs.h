// SPDX-License-Identifier: Apache-2.0
// tests/faults/rank_jobs.h: jobs of ranks on real files, each rank a process: they train, save
// checkpoints while they do, and one call of one rank to its files goes wrong.
//
// Calls are counted over all kinds and over all engines of the files that are watched, in the order
// in which the rank makes them. That order is not the same in every run: drives and threads take
// their time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/engine/engine_config.h"

namespace ziggurat::testing {

/// What goes wrong, where.
struct Strike {
  enum class Effect : std::uint8_t {
    kNothing,
    kKill,      ///< SIGKILL of the rank, instead of the call
    kKillAll,   ///< and of all others
    kErrno,     ///< the call fails
    kShutdown,  ///< the filesystem is shut down before the call
  };
  Effect effect = Effect::kNothing;
  int rank = 0;
  std::uint64_t call = 0;            ///< of the watched ones, from 0
  int error_number = 0;              ///< kErrno
  std::string filesystem{};          ///< kShutdown: a directory on it
  std::uint32_t shutdown_flags = 0;  ///< kShutdown: FS_IOC_SHUTDOWN's
};
std::string to_string(const Strike& strike);

struct Job {
  enum class Watched : std::uint8_t { kTarget, kStore };

  int ranks = 1;
  std::string store;
  EngineConfig::Resume resume = EngineConfig::Resume::kAuto;
  /// Where checkpoints go: of every so many steps but the last, while training goes on. When they
  /// have ended nothing is watched any more, and the last step is saved. Empty: nowhere.
  std::string target{};
  std::uint64_t save_every = 2;
  std::uint64_t keep_last = 1;  ///< 0: all
  std::uint64_t last_step = 0;
  /// On files that are not watched: where a checkpoint of the state that the job opened with goes,
  /// and of its last. Empty: nowhere.
  std::string opened_copy{};
  std::string last_copy{};
  Watched watched = Watched::kTarget;
};

/// What a rank said while it could.
struct RankReport {
  std::optional<std::uint64_t> opened;          ///< at which step
  std::uint64_t durable = 0;                    ///< the newest step that the engine said is
  std::set<std::uint64_t> saved;                ///< steps whose checkpoints it said are whole
  std::map<std::uint64_t, std::string> failed;  ///< those that are not, and why
  std::set<std::uint64_t> halves;               ///< failed ones of which a part was left
  std::string error;                            ///< what its job ended with
  bool struck = false;
  bool ended = false;                 ///< all steps were made
  std::uint64_t calls = 0;            ///< that were watched, where it ended
  int status = 0;                     ///< waitpid()'s
  std::vector<std::string> problems;  ///< what should not be
};

/// Runs it; a process for each rank. To be called while this process has one thread.
std::vector<RankReport> run_job(const Job& job, const Strike& strike = {});

/// What all ranks together were promised, and whether one was struck.
std::uint64_t durable(const std::vector<RankReport>& ranks);
std::set<std::uint64_t> saved(const std::vector<RankReport>& ranks);
bool struck(const std::vector<RankReport>& ranks);
/// Everything that went other than in a run in which nothing goes wrong; empty: nothing did.
std::string trouble(const std::vector<RankReport>& ranks);

}  // namespace ziggurat::testing
