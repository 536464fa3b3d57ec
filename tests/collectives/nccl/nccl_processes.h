// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/nccl_processes.h: ranks in processes of their own, over the doubles of
// NCCL and CUDA.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/rendezvous/rendezvous.h"
#include "tests/collectives/nccl/double/nccl_double.h"

namespace ziggurat {

/// A rank, in its process.
class NcclRank {
 public:
  NcclRank(Reactor& its_reactor, std::unique_ptr<Communicator> ranks, int pipe)
      : reactor(its_reactor), all(std::move(ranks)), pipe_(pipe) {}

  /// Runs `body` on the reactor, and says how it failed, if it did.
  void run(const std::function<Task<>()>& body);
  /// A line to the test.
  void say(const std::string& line) const;
  std::unique_ptr<Communicator> split_of_all();

  Reactor& reactor;
  std::unique_ptr<Communicator> all;

 private:
  int pipe_;
};

struct NcclJob {
  int world = 2;
  std::function<void(NcclRank&)> body;
  std::vector<std::string> faults{};  ///< by rank: ZIGGURAT_NCCL_DOUBLE_FAULT
  std::vector<std::string> gpus{};    ///< by rank: which it sees; none: all see all
  std::vector<std::string> reduce{};  ///< by rank: ZIGGURAT_REDUCE
  Nanoseconds timeout = std::chrono::seconds(60);
};

/// How a rank went.
struct NcclOutcome {
  std::vector<std::string> lines;     ///< what it said, with what failed
  nccl_double::Report report;         ///< as it was when the communicators were gone
  std::vector<std::string> findings;  ///< of the double of CUDA, leaks among them
  int contexts = 0;                   ///< on how many GPUs it had one
  int status = 0;                     ///< as of waitpid
  std::string text() const;
};

/// Runs the job. Each rank has a minute; what is left then is killed. Findings fail the test.
std::vector<NcclOutcome> run_nccl_job(const NcclJob& job);

}  // namespace ziggurat
