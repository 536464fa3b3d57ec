// SPDX-License-Identifier: Apache-2.0
// base/runtime/workers.h: whoever does the engine's jobs: threads (worker_pool.h), or in virtual
// time a twin that lets the time of a job pass (costed_workers.h).
//
// A job is a piece of work on memory: a chunk of Adam, a rounding, a hash. It states how many bytes
// it reads and writes, because that is what it costs. A twin does not do it, because the bytes do
// not exist there. So code that reads what a job found out gives it a value before the job runs:
// what the job finds if all is well. A job that must run everywhere says that it decides something.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// What a job is to whoever does it.
struct Work {
  const char* name;     ///< a literal, which outlives the workers
  std::uint64_t bytes;  ///< host memory that it reads and writes
  /// Something is decided by what it finds out, so a twin runs it too. All that it touches exists.
  bool decides = false;
  /// Which bytes these are, for a twin that looks for conflicts (base/access_ledger.h). Empty where
  /// nobody says.
  std::span<const std::byte> read{};
  std::span<const std::byte> written{};
  std::span<const std::byte> also_written{};
};

class Workers {
 public:
  virtual ~Workers() = default;

  virtual std::size_t threads() const noexcept = 0;

  /// When a queued job is begun.
  enum class Turn : std::uint8_t {
    kInOrder,  ///< after all jobs in order that were queued before it
    /// Before the jobs in order, which are begun in turns with these: for jobs that others wait
    /// for.
    kSoon,
  };

  /// Runs `job` on a worker, resumes on the reactor, and rethrows what it threw. Workers of
  /// `numa_node` take it first; with -1, or a node without workers, any worker does. `job` must
  /// outlive the await: name it.
  Task<> run(Reactor& reactor, Work work, const std::function<void()>& job, int numa_node = -1,
             Turn turn = Turn::kInOrder) {
    return begin(reactor, work, job, numa_node, turn);
  }

 private:
  virtual Task<> begin(Reactor& reactor, Work work, const std::function<void()>& job, int numa_node,
                       Turn turn) = 0;
};

}  // namespace ziggurat
