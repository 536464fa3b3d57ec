// SPDX-License-Identifier: Apache-2.0
// integrations/measure/adam_load.cc: runs one chain of jobs per worker, each chain over records of
// its own.
#include "integrations/measure/adam_load.h"

#include <cstring>
#include <span>

#include "integrations/measure/measurement.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kElements = 256 * 1024;  // 4 MiB per record with its gradient and parameter
constexpr std::size_t kRecordsPerChain = 12;   // more records than the caches hold
constexpr std::size_t kRecordBytes = kElements * (3 * sizeof(float) + 2 * sizeof(bf16));

std::uint32_t bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15U * (index + 1);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93U;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Returns a value in [-0.5, 0.5).
float centred(std::uint32_t random) {
  return static_cast<float>(static_cast<std::int32_t>(random)) * 0x1p-32F;
}

}  // namespace

OptimizerStep bench_step() noexcept {
  return OptimizerStep::make({.learning_rate = 1e-4F,
                              .beta1 = 0.9F,
                              .beta2 = 0.999F,
                              .eps = 1e-8F,
                              .weight_decay = 0.1F,
                              .grad_scale = 1.0F,
                              .t = 1000});
}

void make_record(std::span<std::byte> record, std::uint64_t seed) {
  const std::size_t count = record.size() / (3 * sizeof(float));
  auto* const master = reinterpret_cast<float*>(record.data());
  float* const exp_avg = master + count;
  float* const exp_avg_sq = exp_avg + count;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t random = bits(seed, i);
    master[i] = centred(random) * 0.1F;
    exp_avg[i] = centred(random * 0x9e3779b1U) * 1e-3F;
    exp_avg_sq[i] = centred(random * 0x85ebca6bU) * 1e-7F + 1e-7F;
  }
}

void make_gradients(std::span<bf16> gradients, std::uint64_t seed) {
  for (std::size_t i = 0; i < gradients.size(); ++i)
    gradients[i] = float_to_bf16(centred(bits(seed, i)) * 1e-3F);
}

AdamLoad::AdamLoad(WorkerPool& workers)
    : workers_(workers),
      step_(bench_step()),
      memory_({.owner = "Adam beside the drive",
               .size_bytes = workers.threads() * kRecordsPerChain * kRecordBytes}),
      turn_(workers.threads()) {
  for (std::size_t i = 0; i < workers.threads() * kRecordsPerChain; ++i) {
    const Arrays arrays = arrays_of(i);
    make_record(arrays.record, i);
    make_gradients(arrays.grad, i);
  }
}

AdamLoad::Arrays AdamLoad::arrays_of(std::size_t index) const {
  const std::span<std::byte> bytes = memory_.bytes().subspan(index * kRecordBytes, kRecordBytes);
  const std::span<std::byte> record = bytes.first(3 * kElements * sizeof(float));
  auto* const halves = reinterpret_cast<bf16*>(record.data() + record.size());
  return {record, {halves, kElements}, {halves + kElements, kElements}};
}

void AdamLoad::start() {
  stop();
  stopping_ = false;
  running_ = workers_.threads();
  for (std::size_t chain = 0; chain < workers_.threads(); ++chain)
    workers_.submit("adam", [this, chain] { run_one(chain); });
}

void AdamLoad::stop() {
  stopping_ = true;
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return running_ == 0; });
}

void AdamLoad::run_one(std::size_t chain) {
  if (stopping_) {
    const std::lock_guard lock(mutex_);
    --running_;
    ended_.notify_all();  // under the lock: this object may be gone once stop() returns
    return;
  }
  const Nanoseconds begun = thread_cpu();
  const DecayRun whole{0, kElements, true};
  const std::size_t turn = turn_[chain]++ % kRecordsPerChain;
  const Arrays arrays = arrays_of(chain * kRecordsPerChain + turn);
  const RecordView view{.record = arrays.record,
                        .grad = as_typed(std::span<const bf16>(arrays.grad)),
                        .param = as_typed(arrays.param)};
  update_record(step_, view, {&whole, 1});
  cpu_ns_ += (thread_cpu() - begun).count();
  bytes_ += kElements * kAdamBytes;
  workers_.submit("adam", [this, chain] { run_one(chain); });
}

}  // namespace ziggurat::measure
