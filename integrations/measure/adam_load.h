// SPDX-License-Identifier: Apache-2.0
// integrations/measure/adam_load.h: runs AdamW over records in memory, on every worker, until it is
// stopped. It is the load beside which transfers run in training, and its own speed is measured
// too.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/runtime/clock.h"
#include "base/runtime/worker_pool.h"
#include "optimizer/update.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat::measure {

/// The bytes of host memory that AdamW moves per parameter: it reads 4 + 4 + 4 + 2 and writes as
/// many.
inline constexpr std::uint64_t kAdamBytes = 28;

/// Returns the step that every update of this load makes: ordinary settings, past the first steps
/// of bias correction.
OptimizerStep bench_step() noexcept;

/// Fills a record with values as in training. There is no NaN and no denormal, because these are
/// not updated at full speed.
void make_record(std::span<std::byte> record, std::uint64_t seed);
void make_gradients(std::span<bf16> gradients, std::uint64_t seed);

class AdamLoad {
 public:
  explicit AdamLoad(WorkerPool& workers);
  ~AdamLoad() { stop(); }
  AdamLoad(const AdamLoad&) = delete;

  void start();
  void stop();  ///< returns once no job runs

  std::uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }
  Nanoseconds cpu() const noexcept { return Nanoseconds(cpu_ns_.load(std::memory_order_relaxed)); }

 private:
  void run_one(std::size_t chain);
  struct Arrays {
    std::span<std::byte> record;
    std::span<bf16> grad, param;
  };
  Arrays arrays_of(std::size_t index) const;

  WorkerPool& workers_;
  const OptimizerStep step_;
  HostMapping memory_;
  std::vector<std::size_t> turn_;  // by chain; the jobs of a chain follow each other
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::int64_t> cpu_ns_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
  std::size_t running_ = 0;
};

}  // namespace ziggurat::measure
