// SPDX-License-Identifier: Apache-2.0
// integrations/measure/sweep.cc: each lane owns every n-th record, so that no record is used twice
// at once.
#include "integrations/measure/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/runtime/async.h"
#include "tiers/pool/host_mapping.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kLanes = 12;  // records in flight at once, as many as the engine plans for
constexpr std::uint64_t kTilesMax = 32;
// Records that have gradients of their own: more than the caches hold.
constexpr std::size_t kGradients = 32;
constexpr std::size_t kVerified = 8;  // records read back after a sweep without compute

std::uint64_t record_count(const Target& target) {
  return target.size_bytes() / (2 * sweep_record_bytes(target.size_bytes()));
}

std::uint64_t offset_of(const Target& target, std::size_t index, std::uint32_t slot) {
  return (2 * index + slot) * sweep_record_bytes(target.size_bytes());
}

std::size_t lanes_for(const Target& target) {
  return std::min<std::size_t>(kLanes, record_count(target));
}

class Sweep {
 public:
  Sweep(const Bench& bench, Targets targets, const SweepPlan& plan)
      : bench_(bench),
        targets_(targets),
        plan_(plan),
        step_(bench_step()),
        elements_(kTilesMax * kTileElements),
        halves_({.owner = "gradients and parameters of the sweep",
                 .size_bytes = 2 * kGradients * elements_ * sizeof(bf16)}),
        recorder_(plan.name, plan.seconds, bench.progress) {
    make_gradients({reinterpret_cast<bf16*>(halves_.bytes().data()), kGradients * elements_}, 1);
  }

  Task<Measurement> run() {
    std::vector<Lease> buffers;
    for (Target* const target : targets_) {
      for (std::size_t lane = 0; lane < lanes_for(*target); ++lane)
        buffers.push_back(take_buffer(bench_.pool, sweep_record_bytes(target->size_bytes())));
    }
    WorkGroup lanes(bench_.reactor);
    recorder_.begin();
    std::size_t next = 0;
    for (Target* const target : targets_) {
      for (std::size_t lane = 0; lane < lanes_for(*target); ++lane)
        lanes.spawn(run_lane(*target, lane, buffers[next++]));
    }
    co_await lanes.wait_idle();
    Measurement measured = recorder_.finish(Nanoseconds(compute_ns_.load()));
    for (Target* const target : targets_) {
      co_await target->file().sync();
      if (!plan_.compute) co_await verify_some(*target, buffers.front());
    }
    measured.sample = sample_;
    co_return measured;
  }

 private:
  Task<> run_lane(Target& target, std::size_t lane, const Lease& buffer) {
    const std::size_t count = record_count(target);
    for (std::size_t i = lane; recorder_.running(); i = i + kLanes < count ? i + kLanes : lane) {
      Target::Record& record = target.records[i];
      const std::span<std::byte> bytes = buffer.bytes();
      const Nanoseconds read_begun = monotonic_now();
      co_await target.file().read(offset_of(target, i, record.slot), bytes);
      recorder_.add(IoKind::kRead, bytes.size(), read_begun);
      if (plan_.compute) co_await update(record, i, bytes);
      const Nanoseconds write_begun = monotonic_now();
      co_await target.file().write(offset_of(target, i, 1 - record.slot), bytes);
      recorder_.add(IoKind::kWrite, bytes.size(), write_begun);
      record.slot = 1 - record.slot;
      target.written_bytes += bytes.size();
    }
  }

  Task<> update(Target::Record& record, std::size_t index, std::span<std::byte> bytes) {
    const std::size_t count = bytes.size() / (3 * sizeof(float));
    auto* const gradients = reinterpret_cast<bf16*>(halves_.bytes().data());
    const std::size_t place = index % kGradients * elements_;
    const std::span<const bf16> grad(gradients + place, count);
    const std::span<bf16> param(gradients + kGradients * elements_ + place, count);
    const RecordView view{.record = bytes, .grad = as_typed(grad), .param = as_typed(param)};
    const UpdateHashing hashing{
        .verify = true, .seed_before = record.seed, .seed_after = mix_seed(record.seed, index)};
    UpdateHashes hashes;
    const std::function<void()> job = [&] {
      const Nanoseconds begun = thread_cpu();
      const DecayRun whole{0, count, true};
      hashes = update_record(step_, view, {&whole, 1}, &hashing);
      compute_ns_ += (thread_cpu() - begun).count();
    };
    co_await bench_.workers.run(bench_.reactor, {"adamw", 2 * bytes.size()}, job);
    note_checked(bytes.size(), hashes.before == record.hash);
    record.hash = hashes.after;
    record.seed = hashing.seed_after;
  }

  void note_checked(std::size_t size_bytes, bool right) {
    sample_.verified = true;
    sample_.pages += size_bytes / kPageBytes;
    if (!right) sample_.wrong_pages += size_bytes / kPageBytes;
  }

  Task<> verify_some(Target& target, const Lease& buffer) {
    const std::size_t count = target.records.size();
    for (std::size_t i = 0; i < std::min(kVerified, count); ++i) {
      const std::size_t index = i * count / std::min(kVerified, count);
      const Target::Record& record = target.records[index];
      co_await target.file().read(offset_of(target, index, record.slot), buffer.bytes());
      const bool right = record_hash(buffer.bytes(), record.seed) == record.hash;
      note_checked(buffer.bytes().size(), right);
    }
  }

  const Bench& bench_;
  Targets targets_;
  const SweepPlan& plan_;
  const OptimizerStep step_;
  const std::size_t elements_;
  HostMapping halves_;
  Recorder recorder_;
  std::atomic<std::int64_t> compute_ns_{0};
  SampleFacts sample_;
};

Task<> make_some(const Bench& bench, Target& target, std::size_t lane, Lease buffer) {
  for (std::size_t i = lane; i < record_count(target); i += kLanes) {
    const std::span<std::byte> bytes = buffer.bytes();
    Target::Record& record = target.records[i];
    record = {.slot = 0, .hash = 0, .seed = mix_seed(target.pass.file_seed, i)};
    const std::function<void()> job = [&] {
      make_record(bytes, record.seed);
      record.hash = record_hash(bytes, record.seed);
    };
    co_await bench.workers.run(bench.reactor, {"make record", bytes.size()}, job);
    co_await target.file().write(offset_of(target, i, 0), bytes);
    target.written_bytes += bytes.size();
  }
}

Task<> make_all(const Bench& bench, Target& target) {
  target.records.assign(record_count(target), {});
  WorkGroup lanes(bench.reactor);
  for (std::size_t lane = 0; lane < lanes_for(target); ++lane) {
    Lease buffer = take_buffer(bench.pool, sweep_record_bytes(target.size_bytes()));
    Task<> task = make_some(bench, target, lane, std::move(buffer));
    lanes.spawn(std::move(task));
  }
  co_await lanes.wait_idle();
  target.content = Target::Content::kRecords;
}

}  // namespace

std::uint64_t sweep_record_bytes(std::uint64_t file_bytes) noexcept {
  const std::uint64_t tile = 3 * kTileBytes;
  return std::clamp<std::uint64_t>(file_bytes / (4 * kLanes) / tile, 1, kTilesMax) * tile;
}

void make_records(const Bench& bench, Target& target) {
  bench.progress.live(fmt::format("making optimizer records in {}", target.label()));
  bench.reactor.block_on(make_all(bench, target));
}

Measurement run_sweep(const Bench& bench, Targets targets, const SweepPlan& plan) {
  Sweep sweep(bench, targets, plan);
  return bench.reactor.block_on(sweep.run());
}

}  // namespace ziggurat::measure
