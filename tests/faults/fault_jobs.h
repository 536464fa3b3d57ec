// SPDX-License-Identifier: Apache-2.0
// tests/faults/fault_jobs.h: small jobs that use every way we have to a drive, and say what became
// of them: done, an error, or wrong without a word.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "aio/faulty_engine.h"
#include "base/error.h"
#include "base/runtime/reactor.h"

namespace ziggurat::faults {

/// Where a job runs. Nothing of an earlier job is left in `directory`.
struct Bench {
  Reactor& reactor;
  FaultyEngine& drive;
  std::string directory;
};

struct Verdict {
  std::optional<Error> error;  ///< what the job ended with
  /// Bytes or a promise that were wrong though nobody said so; "" if none.
  std::string silent;
  /// The newest generation that is there is older than the one promised, and whole.
  bool rolled_back = false;
  /// What is left, looked at on a sound drive, is damaged: a generation that was promised is gone.
  std::optional<Error> damage;
};

struct Job {
  std::string name;
  /// Clears the drive's plan when its work is over, and looks at what is left on a sound drive.
  std::function<Verdict(const Bench&)> run;
  /// Bytes written elsewhere than asked are noticed here (by whoever has their hash).
  bool knows_its_bytes = true;
};

/// One file: made, written, synced, read, renamed, removed.
Job file_job();
/// A swap file's items, out and back.
Job swap_job();
/// A store of two slots: made, `steps` steps, opened again, a step more; then opened on a sound
/// drive, where what was promised must still be.
Job store_job(std::uint64_t steps);

}  // namespace ziggurat::faults
