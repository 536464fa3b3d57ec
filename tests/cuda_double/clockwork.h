// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/clockwork.h: moves the double's clock (Pace::kByHand), as a GPU would its own,
// until it is held.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>

#include "tests/cuda_double/cuda_double.h"

namespace ziggurat::cuda_double {

class Clockwork {
 public:
  Clockwork() : thread_([this] { run(); }) {}
  ~Clockwork() {
    stopping_ = true;
    thread_.join();
  }
  Clockwork(const Clockwork&) = delete;
  Clockwork& operator=(const Clockwork&) = delete;

  /// Nothing that the GPU has to do ends any more when it returns.
  void hold() {
    const std::lock_guard lock(moving_);
    held_ = true;
  }
  void go() { held_ = false; }

 private:
  void run() {
    while (!stopping_) {
      {
        const std::lock_guard lock(moving_);
        const auto next = held_ ? std::nullopt : next_completion();
        if (next) advance_to(*next);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  std::mutex moving_;
  std::atomic<bool> held_{false};
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses the others
};

}  // namespace ziggurat::cuda_double
