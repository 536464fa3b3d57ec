// SPDX-License-Identifier: Apache-2.0
// bench/optimizer_bench.cc: what does hashing a record cost inside its update, compared with
// memory? (`ziggurat bench optimizer` measures updates alone.)
//
// The ceiling moves the same 28 bytes per element in the same arrays without computing
// (integrations/measure/optimizer_ceiling.h). Bandwidth drifts over minutes and with other jobs, so
// ceiling and kernel take turns. The limit is the fastest walk of all turns, and `of_ceiling` is
// the kernel's median share of it. Before it is timed, the kernel is verified against the scalar
// specification.
//   optimizer_bench [--benchmark_filter=...]     ZIGGURAT_BENCH_TILES=n: tiles of 16,384 elements
//   (default 1,536)
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/numerics/simd_target.h"
#include "integrations/measure/optimizer_ceiling.h"
#include "optimizer/update.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::measure {
namespace {

constexpr double kBytesPerElement =
    28;  // fp32 read and written three times, bf16 read once and written once

/// Zeroed memory, in huge pages if the system has them.
template <class T>
class Pages {
 public:
  explicit Pages(std::size_t count) : bytes_(count * sizeof(T)) {
    void* memory =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ZIGGURAT_CHECK(memory != MAP_FAILED, "no {} bytes", bytes_);
    ::madvise(memory, bytes_, MADV_HUGEPAGE);  // without huge pages it is slower, but not wrong
    data_ = static_cast<T*>(memory);
  }
  ~Pages() { ::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  T* data() { return data_; }
  std::span<T> span() { return {data_, bytes_ / sizeof(T)}; }

 private:
  std::size_t bytes_;
  T* data_;
};

/// The record, gradient and parameter of one worker.
struct Work {
  std::size_t count;
  Pages<float> record;
  Pages<bf16> grad, param;

  explicit Work(std::size_t tiles)
      : count(tiles * kTileElements), record(3 * count), grad(count), param(count) {
    reset();
  }
  void reset() {
    for (std::size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(i % 251) * 1e-4f;
      record.data()[i] = value - 0.01f;
      record.data()[count + i] = 0.01f - value;
      record.data()[2 * count + i] = value;
      grad.data()[i] = float_to_bf16(value * 0.1f);
      param.data()[i] = 0;
    }
  }
  RecordView view() {
    return {.record = std::as_writable_bytes(record.span()),
            .grad = as_typed(std::span<const bf16>(grad.span())),
            .param = as_typed(param.span())};
  }
  void run_ceiling(const CeilingWalk& walk) {
    CeilingShape shape{.read = {reinterpret_cast<std::byte*>(grad.data()), sizeof(bf16)},
                       .written = {reinterpret_cast<std::byte*>(param.data()), sizeof(bf16)}};
    for (std::size_t i = 0; i < 3; ++i)
      shape.in_place[i] = {reinterpret_cast<std::byte*>(record.data() + i * count), sizeof(float)};
    measure::run_ceiling(shape, walk, count);
  }
};

OptimizerStep step() {
  return OptimizerStep::make({.learning_rate = 1e-3f,
                              .beta1 = 0.9f,
                              .beta2 = 0.95f,
                              .eps = 1e-8f,
                              .weight_decay = 0.1f,
                              .grad_scale = 1.0f,
                              .t = 10});
}

UpdateHashes run_hashed(Work& work) {
  const DecayRun whole{0, work.count, true};
  const UpdateHashing hashing{.verify = true, .seed_before = 1, .seed_after = 2};
  return update_record(step(), work.view(), {&whole, 1}, &hashing);
}

/// Returns whether the kernel to be timed gives the specification's bits and hashes on a few tiles.
bool verified() {
  Work want(3), got(3);
  const std::string target(simd_target());
  force_simd_target("scalar");
  const UpdateHashes want_hashes = run_hashed(want);
  force_simd_target(target);
  const UpdateHashes hashes = run_hashed(got);
  const auto same = [&] {
    return std::ranges::equal(std::as_bytes(want.record.span()),
                              std::as_bytes(got.record.span())) &&
           std::ranges::equal(want.param.span(), got.param.span());
  };
  return same() && hashes.before == want_hashes.before && hashes.after == want_hashes.after;
}

double seconds_of(std::vector<Work*>& works, const std::function<void(Work&)>& action) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < works.size(); ++i) others.emplace_back([&, i] { action(*works[i]); });
  action(*works[0]);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::size_t tiles_in_all() {
  const char* text = std::getenv("ZIGGURAT_BENCH_TILES");
  return text != nullptr ? std::max<std::size_t>(2, std::strtoull(text, nullptr, 10)) : 1536;
}

void against_ceiling(benchmark::State& state, const std::function<void(Work&)>& action) {
  if (!verified()) return state.SkipWithError("the kernel differs from the scalar specification");
  const auto threads = static_cast<std::size_t>(state.range(0));
  const std::size_t tiles = tiles_in_all() / threads;
  std::vector<std::unique_ptr<Work>> owned;
  std::vector<Work*> works;
  for (std::size_t i = 0; i < threads; ++i) {
    works.push_back(owned.emplace_back(std::make_unique<Work>(tiles)).get());
  }
  const double bytes = kBytesPerElement * static_cast<double>(threads * tiles * kTileElements);
  seconds_of(works, action);
  std::vector<double> kernels;
  double ceiling_seconds = std::numeric_limits<double>::max();
  for (auto _ : state) {
    kernels.push_back(seconds_of(works, action));
    state.SetIterationTime(kernels.back());
    for (const CeilingWalk& walk : kCeilingWalks) {
      const auto pass = [&](Work& work) { work.run_ceiling(walk); };
      ceiling_seconds = std::min(ceiling_seconds, seconds_of(works, pass));
    }
  }
  const double kernel_seconds = median(kernels);
  state.counters["GB/s"] = bytes / kernel_seconds / 1e9;
  state.counters["ceiling_GB/s"] = bytes / ceiling_seconds / 1e9;
  state.counters["of_ceiling"] = ceiling_seconds / kernel_seconds;
  state.SetLabel(std::string(simd_target()));
}

void adamw_hashed(benchmark::State& state) {
  against_ceiling(state, [](Work& work) { benchmark::DoNotOptimize(run_hashed(work)); });
}

BENCHMARK(adamw_hashed)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ziggurat::measure

BENCHMARK_MAIN();
