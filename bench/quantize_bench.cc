// SPDX-License-Identifier: Apache-2.0
// bench/quantize_bench.cc: how fast are 16-bit values turned into 8- or 4-bit blocks, and added to
// fp32 sums, compared with memory?
//
// The ceiling is a memcpy of half the bytes that a kernel reads and writes together, so that as
// many bytes are moved. Ceiling and kernel take turns, and `of_ceiling` is the median of the ratios
// of adjacent turns. Before it is timed, a kernel is verified against the scalar specification.
//   quantize_bench [--benchmark_filter=...]     ZIGGURAT_BENCH_MILLIONS=n: elements (default 64)
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/numerics/simd_target.h"
#include "collectives/quantize/quantize.h"

namespace ziggurat::measure {
namespace {

std::size_t elements() {
  const char* text = std::getenv("ZIGGURAT_BENCH_MILLIONS");
  const std::size_t millions = text != nullptr ? std::strtoull(text, nullptr, 10) : 64;
  return std::max<std::size_t>(1, millions) << 20;
}

/// Values in bf16, their blocks, and fp32 sums of the values.
struct Arrays {
  QuantizedBits bits;
  std::vector<bf16> values;
  std::vector<std::byte> blocks;
  std::vector<float> sums;

  Arrays(QuantizedBits with, std::size_t count)
      : bits(with), values(count), blocks(quantized_bytes(with, count)), sums(count, 0.0f) {
    std::mt19937 random(1);
    for (bf16& value : values) value = static_cast<bf16>(0x3c00u + random() % 0x200u);
    encode();
  }
  void encode() { quantize(bits, as_typed(std::span<const bf16>(values)), blocks); }
  void decode() { dequantize(bits, blocks, as_typed(std::span(values))); }
  void add() { add_dequantized(bits, blocks, sums); }

  std::size_t coded_bytes() const { return blocks.size() + values.size() * sizeof(bf16); }
  std::size_t added_bytes() const { return blocks.size() + 2 * sums.size() * sizeof(float); }
};

struct Kernel {
  void (Arrays::*run)();
  std::size_t (Arrays::*bytes)() const;  ///< read and written
};

bool verified(const Kernel& kernel, QuantizedBits bits) {
  const std::string target(simd_target());
  const auto result = [&](std::string_view on) {
    force_simd_target(on);
    Arrays arrays(bits, 5 * kQuantizedBlock + 3);
    (arrays.*kernel.run)();
    return arrays;
  };
  const Arrays want = result("scalar");
  const Arrays got = result(target);
  return want.values == got.values && want.blocks == got.blocks && want.sums == got.sums;
}

double seconds_of(const std::function<void()>& action) {
  const auto start = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void against_ceiling(benchmark::State& state, const Kernel& kernel) {
  const auto bits = static_cast<QuantizedBits>(state.range(0));
  if (!verified(kernel, bits))
    return state.SkipWithError("the kernel differs from the scalar specification");
  Arrays arrays(bits, elements());
  const std::size_t bytes = (arrays.*kernel.bytes)();
  std::vector<std::byte> from(bytes / 2);
  std::vector<std::byte> to(bytes / 2);
  const auto ceiling = [&] {
    std::memcpy(to.data(), from.data(), to.size());
    benchmark::DoNotOptimize(to.data());
  };
  const auto run = [&] { (arrays.*kernel.run)(); };
  ceiling();
  run();
  std::vector<double> ratios;
  double last_ceiling = seconds_of(ceiling);
  for (auto _ : state) {
    const double seconds = seconds_of(run);
    const double next_ceiling = seconds_of(ceiling);
    state.SetIterationTime(seconds);
    ratios.push_back((last_ceiling + next_ceiling) / 2 / seconds);
    last_ceiling = next_ceiling;
  }
  const auto moved = static_cast<double>(bytes) * static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(moved / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_ceiling"] = median(ratios);
  state.SetLabel(std::string(simd_target()));
}

void encode(benchmark::State& state) {
  against_ceiling(state, {&Arrays::encode, &Arrays::coded_bytes});
}
void decode(benchmark::State& state) {
  against_ceiling(state, {&Arrays::decode, &Arrays::coded_bytes});
}
void add(benchmark::State& state) { against_ceiling(state, {&Arrays::add, &Arrays::added_bytes}); }

BENCHMARK(encode)->ArgName("bits")->Arg(8)->Arg(4)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode)->ArgName("bits")->Arg(8)->Arg(4)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(add)->ArgName("bits")->Arg(8)->Arg(4)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ziggurat::measure

BENCHMARK_MAIN();
