// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/regions.h: runs the trainer's compute on the workers, and measures its time.
#pragma once

#include <chrono>
#include <functional>

#include "base/runtime/worker_pool.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::gpt {

class Regions {
 public:
  explicit Regions(WorkerPool& workers) : workers_(workers) {}

  /// Runs `region` on the workers, and adds its wall time to `direction`.
  void run(const char* name, double ComputeSeconds::*direction,
           const std::function<void(Team&)>& region) {
    const auto start = std::chrono::steady_clock::now();
    workers_.run_team(region, name);
    seconds_.*direction +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  ComputeSeconds seconds() const noexcept { return seconds_; }

 private:
  WorkerPool& workers_;
  ComputeSeconds seconds_;
};

}  // namespace ziggurat::gpt
