// SPDX-License-Identifier: Apache-2.0
// bench/device_kernel_bench.cc: how fast are the operations on a device's own bytes, and how near
// to its memory's speed?
//
// Each operation is queued and waited for as the engine does it, so every figure includes a launch
// and an event. The ceiling is a copy of the largest span within the device, taken in the same run,
// whose reads and writes are both counted. The codes of `quantize` cross the link as well
// (device_link_bench).
//   device_kernel_bench [--benchmark_filter=...]    ZIGGURAT_BENCH_TILES=n: tiles of each span
//   (512)
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/runtime/worker_pool.h"
#include "core/compute/compute.h"
#include "tiers/device/cuda_device.h"
#include "tiers/device/host_device.h"
#include "tiers/pool/host_mapping.h"
#include "tiers/store/record_format.h"

namespace ziggurat {
namespace {

constexpr int kCeilingRounds = 10;

std::uint64_t tiles() {
  const char* const text = std::getenv("ZIGGURAT_BENCH_TILES");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 512;
}
std::uint64_t count() { return tiles() * kTileElements; }
std::uint64_t record_bytes() {
  return record_format(OptimizerKind::kAdamW, StateFormat::kFp32).record_bytes(tiles());
}

class Operations {
 public:
  Operations(std::unique_ptr<Device> device, Reactor& reactor, WorkerPool& workers)
      : reactor_(reactor),
        device_(std::move(device)),
        host_({.owner = "device_kernel_bench", .size_bytes = 2 * count()}),
        registered_(device_->register_host_memory(host_.bytes())),
        compute_(make_compute(*device_, reactor, workers,
                              {.round_count_max = count(), .quantizes = true})),
        stream_(device_->create_stream("bench")),
        record_(device_->allocate(record_bytes(), Purpose::kStaging)),
        values_(device_->allocate(count() * sizeof(float), Purpose::kStaging)),
        param_(device_->allocate(count() * sizeof(bf16), Purpose::kStaging)) {
    clear(record_);
    clear(values_);
  }
  static std::uint64_t device_bytes() {
    return record_bytes() + count() * (sizeof(float) + sizeof(bf16) + 1) + 2 * kMiB;
  }

  void clear(const DeviceBuffer& buffer) {
    const Event done = reactor_.block_on(compute_->clear(device_span(buffer)));
    reactor_.block_on(done.wait());
  }
  void clear() { clear(values_); }
  void round() {
    const Compute::Rounding rounding{.values = device_span(values_).as<float>(),
                                     .out = {DType::kBFloat16, device_span(param_)},
                                     .squares = {}};
    reactor_.block_on(compute_->round(rounding));
  }
  void quantize() {
    const Compute::Quantizing quantizing{
        .values = device_span(values_).as<float>(),
        .bits = QuantizedBits::k8,
        .codes = host_.bytes().first(quantized_bytes(QuantizedBits::k8, count()))};
    reactor_.block_on(compute_->quantize(quantizing));
  }
  void update() {
    const OptimizerStep step = OptimizerStep::make({.learning_rate = 0.01F,
                                                    .beta1 = 0.9F,
                                                    .beta2 = 0.95F,
                                                    .eps = 1e-8F,
                                                    .weight_decay = 0.1F,
                                                    .grad_scale = 1,
                                                    .t = 1});
    const std::vector<DecayRun> runs{{0, count(), true}};
    const DeviceSpan<std::byte> grad = device_span(values_).first(param_.size_bytes());
    const Compute::Update update{.steps = step,
                                 .record = device_span(record_),
                                 .grad = {DType::kBFloat16, grad},
                                 .param = {DType::kBFloat16, device_span(param_)},
                                 .runs = runs};
    reactor_.block_on(compute_->update(update));
  }
  /// Returns the bytes per second that a copy reads and writes.
  double ceiling() {
    const std::uint64_t half = record_.size_bytes() / 2;
    double best = 0;
    for (int i = 0; i < kCeilingRounds; ++i) {
      const Nanoseconds begin = monotonic_now();
      reactor_.block_on(copy(reactor_, *stream_,
                             {.destination = record_.data(),
                              .source = record_.data() + half,
                              .size_bytes = half,
                              .direction = Stream::Direction::kOnDevice}));
      const double seconds = static_cast<double>((monotonic_now() - begin).count()) * 1e-9;
      best = std::max(best, 2 * static_cast<double>(half) / seconds);
    }
    return best;
  }

 private:
  Reactor& reactor_;
  std::unique_ptr<Device> device_;
  HostMapping host_;
  std::shared_ptr<HostRegistration> registered_;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<Stream> stream_;
  DeviceBuffer record_;
  DeviceBuffer values_;
  DeviceBuffer param_;
};

struct Row {
  const char* name;
  double element_bytes;  ///< bytes per element that it reads and writes on the device
  void (Operations::*run)();
};
constexpr Row kRows[] = {{"clear", 4, &Operations::clear},
                         {"round_to_bf16", 6, &Operations::round},
                         {"quantize_to_8_bit", 6.03, &Operations::quantize},
                         {"update_adamw_fp32", 28, &Operations::update}};

void add(const std::string& name, Operations& operations) {
  const double ceiling = operations.ceiling();
  for (const Row& row : kRows) {
    auto* const added = benchmark::RegisterBenchmark(
        (name + "/" + row.name).c_str(), [&operations, row, ceiling](benchmark::State& state) {
          for (auto _ : state) (operations.*row.run)();
          const double moved = row.element_bytes * static_cast<double>(count()) *
                               static_cast<double>(state.iterations());
          state.counters["bytes_per_second"] = {moved, benchmark::Counter::kIsRate};
          state.counters["of_limit"] = {moved / ceiling, benchmark::Counter::kIsRate};
        });
    added->UseRealTime();
  }
}

int run_all() {
  Reactor reactor;
  WorkerPool workers({.threads = 1, .cpus = {}});
  std::vector<std::unique_ptr<Operations>> all;
  const std::uint64_t capacity = Operations::device_bytes();
  for (const CudaInventory::Gpu& gpu : cuda_devices().gpus) {
    all.push_back(std::make_unique<Operations>(
        CudaDevice::create(reactor, {.index = gpu.index, .capacity_bytes = capacity}), reactor,
        workers));
    add("cuda" + std::to_string(gpu.index), *all.back());
  }
  all.push_back(
      std::make_unique<Operations>(HostDevice::create(reactor, capacity), reactor, workers));
  add("emulated", *all.back());
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace ziggurat

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  return ziggurat::run_all();
}
