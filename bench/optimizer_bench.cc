// SPDX-License-Identifier: Apache-2.0
// bench/optimizer_bench.cc: what does hashing a record cost inside its update, against memory?
// (Updates alone: `ziggurat bench optimizer`.)
//
// Ceiling: a kernel of the same 28 bytes per element (reads four fp32 arrays, writes three in
// place) that computes next to nothing. Bandwidth drifts by minutes and by neighbours, so ceiling
// and kernel take turns and `of_ceiling` is the median of the ratios of adjacent turns. What is
// timed is verified first, against the scalar specification.
//   optimizer_bench [--benchmark_filter=...]     ZIGGURAT_BENCH_TILES=n: tiles of 16,384 elements
//   (default 1,536)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/optimizer_bench.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstddef>

HWY_BEFORE_NAMESPACE();
namespace ziggurat::measure::HWY_NAMESPACE {

/// The shape of Adam without its arithmetic.
void ceiling(float* master, float* exp_avg, float* exp_avg_sq, const float* grad,
             std::size_t count) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> d;
  const auto keep = hn::Set(d, 0.5f);
  for (std::size_t i = 0; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    const auto g = hn::Load(d, grad + i);
    const auto m = hn::Add(hn::Mul(keep, hn::Load(d, exp_avg + i)), g);
    const auto v = hn::Add(hn::Mul(keep, hn::Load(d, exp_avg_sq + i)), g);
    const auto w = hn::Add(hn::Mul(keep, hn::Load(d, master + i)), m);
    hn::Store(m, d, exp_avg + i);
    hn::Store(v, d, exp_avg_sq + i);
    hn::Store(w, d, master + i);
  }
}

}  // namespace ziggurat::measure::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/numerics/simd_target.h"
#include "optimizer/update.h"
#include "tiers/record_hash.h"

namespace ziggurat::measure {
namespace {

HWY_EXPORT(ceiling);

constexpr double kBytesPerElement =
    28;  // fp32 read and written three times, bf16 read once and written once

/// Zeroed memory in huge pages where the system has them.
template <class T>
class Pages {
 public:
  explicit Pages(std::size_t count) : bytes_(count * sizeof(T)) {
    void* memory =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ZIGGURAT_CHECK(memory != MAP_FAILED, "no {} bytes", bytes_);
    ::madvise(memory, bytes_, MADV_HUGEPAGE);  // slower without; not wrong
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

/// One worker's record, and the fp32 gradient that only the ceiling reads.
struct Work {
  std::size_t count;
  Pages<float> record;
  Pages<bf16> grad, param;
  Pages<float> grad_fp32;

  explicit Work(std::size_t tiles)
      : count(tiles * kTileElements),
        record(3 * count),
        grad(count),
        param(count),
        grad_fp32(count) {
    reset();
  }
  void reset() {
    for (std::size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(i % 251) * 1e-4f;
      record.data()[i] = value - 0.01f;
      record.data()[count + i] = 0.01f - value;
      record.data()[2 * count + i] = value;
      grad.data()[i] = float_to_bf16(value * 0.1f);
      grad_fp32.data()[i] = value * 0.1f;
      param.data()[i] = 0;
    }
  }
  RecordView view() {
    return {.record = std::as_writable_bytes(record.span()),
            .grad = as_typed(std::span<const bf16>(grad.span())),
            .param = as_typed(param.span())};
  }
  void run_ceiling() {
    HWY_DYNAMIC_DISPATCH(ceiling)
    (record.data(), record.data() + count, record.data() + 2 * count, grad_fp32.data(), count);
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

/// The specification on a few tiles gives the bits and hashes of what will be timed.
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
  if (!verified()) return state.SkipWithError("differs from the scalar specification");
  const auto threads = static_cast<std::size_t>(state.range(0));
  const std::size_t tiles = tiles_in_all() / threads;
  std::vector<std::unique_ptr<Work>> owned;
  std::vector<Work*> works;
  for (std::size_t i = 0; i < threads; ++i) {
    works.push_back(owned.emplace_back(std::make_unique<Work>(tiles)).get());
  }
  const double bytes = kBytesPerElement * static_cast<double>(threads * tiles * kTileElements);
  const std::function<void(Work&)> ceiling_pass = [](Work& work) { work.run_ceiling(); };
  seconds_of(works, action);
  std::vector<double> ratios, ceilings, kernels;
  double last_ceiling = seconds_of(works, ceiling_pass);
  for (auto _ : state) {
    const double kernel = seconds_of(works, action);
    const double next_ceiling = seconds_of(works, ceiling_pass);
    state.SetIterationTime(kernel);
    const double ceiling_seconds = (last_ceiling + next_ceiling) / 2;
    last_ceiling = next_ceiling;
    ratios.push_back(ceiling_seconds / kernel);
    ceilings.push_back(bytes / ceiling_seconds / 1e9);
    kernels.push_back(bytes / kernel / 1e9);
  }
  state.counters["GB/s"] = median(kernels);
  state.counters["ceiling_GB/s"] = median(ceilings);
  state.counters["of_ceiling"] = median(ratios);
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

#endif  // HWY_ONCE
