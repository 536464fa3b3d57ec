// SPDX-License-Identifier: Apache-2.0
// bench/pool_bench.cc: what does the pinned pool cost a chunk of a step, and does that depend on
// how many chunks there are?
//
// A step is made as in the engine. In backward each chunk's gradient takes host memory, the last
// chunk's first. Then a sweep in forward order takes a work item for each chunk, of which twelve
// fit, and gives back the gradient and the item. `sweep` begins a few chunks at a time, as the
// engine does; `crowd` lets all of them wait at once. The ceiling is the same coroutines over plain
// counters in place of the pool, and `of_ceiling` is the share of the time that these take. It
// verifies that each chunk got its memory, in order, and that all memory came back.
//   pool_bench [--benchmark_filter=...]      ZIGGURAT_BENCH_CHUNKS=n: at most so many (150000)
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "base/runtime/for_each.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat::measure {
namespace {

constexpr std::uint64_t kAlignmentBytes = 512;
constexpr std::uint64_t kGradientBytes = 512;
constexpr std::uint64_t kItemBytes = 3 * 512;
constexpr std::size_t kItems = 12;
constexpr std::size_t kBegunAhead = 4;

double cpu_seconds() {
  std::timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// One step of `chunks` chunks over a pool that holds all gradients and twelve items.
class Step {
 public:
  explicit Step(std::size_t chunks) : chunks_(chunks), gradients_(chunks) {
    PinnedPoolOptions options;
    options.alignment_bytes = kAlignmentBytes;
    options.budget_bytes = chunks * kGradientBytes + kItems * kItemBytes;
    options.reserves = {{Purpose::kOptimizer, kItemBytes}};
    options.use_huge_pages = false;
    pool_ = PinnedPool::create(reactor_, options);
  }

  double run(std::size_t at_once) {
    const double begin = cpu_seconds();
    const auto backward = [this](std::size_t i) { return accept(chunks_ - 1 - i); };
    const auto sweep = [this](std::size_t i) { return update(i); };
    reactor_.block_on(for_each_index(reactor_, chunks_, 2 * kItems, backward));
    reactor_.block_on(for_each_index(reactor_, chunks_, at_once, sweep));
    return cpu_seconds() - begin;
  }
  double run_without_pool() {
    const double begin = cpu_seconds();
    const auto nothing = [this](std::size_t) { return yield(); };
    reactor_.block_on(for_each_index(reactor_, 2 * chunks_, kItems, nothing));
    return cpu_seconds() - begin;
  }

  bool good() const { return updated_ == chunks_ && pool_->account().used_bytes() == 0; }
  std::size_t waiting_max() const { return waiting_max_; }
  std::uint64_t looked_at() const { return pool_->looked_at(); }
  void begin_again() { updated_ = 0; }

 private:
  Task<> accept(std::size_t chunk) {
    const LeaseRequest request{.purpose = Purpose::kGradients,
                               .size_bytes = kGradientBytes,
                               .need = {.generation = 1, .position = chunks_ - chunk}};
    gradients_[chunk] = co_await pool_->acquire(request);
  }
  Task<> update(std::size_t chunk) {
    const LeaseRequest request{.purpose = Purpose::kOptimizer,
                               .size_bytes = kItemBytes,
                               .need = {.generation = 1, .position = chunks_ + chunk}};
    waiting_max_ = std::max(waiting_max_, pool_->waiting() + 1);
    const Lease item = co_await pool_->acquire(request);
    co_await yield();  // stands for the read, the update and the write
    if (gradients_[chunk] && item) ++updated_;
    gradients_[chunk].reset();
  }
  Task<> yield() {
    Signal signal(reactor_);
    reactor_.post([&] { signal.set(); });
    co_await signal.wait();
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  std::size_t chunks_;
  std::unique_ptr<PinnedPool> pool_;
  std::vector<Lease> gradients_;
  std::size_t updated_ = 0;
  std::size_t waiting_max_ = 0;
};

void measure(benchmark::State& state, bool all_at_once) {
  const auto chunks = static_cast<std::size_t>(state.range(0));
  Step step(chunks);
  step.run(kItems);  // warm, verified below
  const std::uint64_t looked_at_before = step.looked_at();
  double with = 0;
  double without = 0;
  for (auto _ : state) {
    step.begin_again();
    const double seconds = step.run(all_at_once ? chunks : kItems + kBegunAhead);
    if (!step.good())
      return state.SkipWithError("a chunk got no memory, or did not give its memory back");
    without += step.run_without_pool();
    with += seconds;
    state.SetIterationTime(seconds);
  }
  const double each = static_cast<double>(chunks) * static_cast<double>(state.iterations());
  state.counters["us_per_chunk"] = with / each * 1e6;
  state.counters["of_ceiling"] = without / with;
  state.counters["looked_at_per_chunk"] =
      static_cast<double>(step.looked_at() - looked_at_before) / each;
  state.counters["waiting_max"] = static_cast<double>(step.waiting_max());
}

void sweep(benchmark::State& state) { measure(state, false); }
void crowd(benchmark::State& state) { measure(state, true); }

void chunk_counts(benchmark::internal::Benchmark* bench) {
  const char* limit = std::getenv("ZIGGURAT_BENCH_CHUNKS");
  const std::int64_t chunks_max = limit != nullptr ? std::atoll(limit) : 150000;
  for (const std::int64_t chunks : {1000, 10000, 150000}) {
    if (chunks <= chunks_max) bench->Arg(chunks);
  }
  bench->ArgName("chunks")->UseManualTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK(sweep)->Apply(chunk_counts);
BENCHMARK(crowd)->Apply(chunk_counts);

}  // namespace
}  // namespace ziggurat::measure

BENCHMARK_MAIN();
