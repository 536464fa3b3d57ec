// SPDX-License-Identifier: Apache-2.0
// bench/device_link_bench.cc: how fast do copies reach a device and come back, by size, through the
// streams that the engine uses?
//
// Host memory is registered once, as the engine's pool is. The ceiling of a GPU is its PCI link as
// the kernel reports it (a lane at 16 GT/s or more carries 128 of 130 bits). The ceiling of the
// emulated device is a memcpy of the same bytes, taken in the same run. Before it measures, it
// verifies that the same bytes come back.
//   device_link_bench [--benchmark_filter=...]    ZIGGURAT_BENCH_MIB=n: the largest copy (256)
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/topology/pci_link.h"
#include "tiers/device/cuda_device.h"
#include "tiers/device/host_device.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

std::uint64_t largest_bytes() {
  const char* const text = std::getenv("ZIGGURAT_BENCH_MIB");
  return (text != nullptr ? std::strtoull(text, nullptr, 10) : 256) * kMiB;
}

/// Returns the link's bytes per second, or 0 if they are not known.
double link_limit(const std::string& address) {
  const std::optional<PciLink> link = pci_link("", address);
  if (!link) return 0;
  return link->lanes * link->gigatransfers * 1e9 * 128 / 130 / 8;
}

class Link {
 public:
  /// Returns the bytes per second of copies of one size, or 0 if they are not known.
  using Limit = std::function<double(std::uint64_t size_bytes)>;

  Link(std::unique_ptr<Device> device, Limit limit, Reactor& reactor)
      : reactor_(reactor),
        device_(std::move(device)),
        limit_(std::move(limit)),
        host_({.owner = "device_link_bench", .size_bytes = largest_bytes()}),
        registered_(device_->register_host_memory(host_.bytes())),
        stream_(device_->create_stream("bench")),
        buffer_(device_->allocate(largest_bytes(), Purpose::kStaging)) {}

  void copy(Stream::Direction direction, std::uint64_t size_bytes) {
    const bool up = direction == Stream::Direction::kToDevice;
    std::byte* const host = host_.bytes().data();
    const Stream::Copy request{.destination = up ? buffer_.data() : host,
                               .source = up ? host : buffer_.data(),
                               .size_bytes = size_bytes,
                               .direction = direction};
    reactor_.block_on(ziggurat::copy(reactor_, *stream_, request));
  }
  bool comes_back() {
    const std::span<std::byte> bytes = host_.bytes().first(largest_bytes());
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 3);
    const std::vector<std::byte> before(bytes.begin(), bytes.end());
    copy(Stream::Direction::kToDevice, bytes.size());
    std::ranges::fill(bytes, std::byte{0});
    copy(Stream::Direction::kToHost, bytes.size());
    return std::ranges::equal(before, bytes);
  }
  double limit(std::uint64_t size_bytes) const { return limit_(size_bytes); }

 private:
  Reactor& reactor_;
  std::unique_ptr<Device> device_;
  Limit limit_;
  HostMapping host_;
  std::shared_ptr<HostRegistration> registered_;
  std::unique_ptr<Stream> stream_;
  DeviceBuffer buffer_;
};

void run(benchmark::State& state, Link& link, Stream::Direction direction) {
  const auto size_bytes = static_cast<std::uint64_t>(state.range(0));
  for (auto _ : state) link.copy(direction, size_bytes);
  const auto moved = static_cast<double>(size_bytes) * static_cast<double>(state.iterations());
  state.counters["bytes_per_second"] = {moved, benchmark::Counter::kIsRate};
  const double limit = link.limit(size_bytes);
  if (limit > 0) state.counters["of_limit"] = {moved / limit, benchmark::Counter::kIsRate};
}

/// Copies the same bytes again and again, as the benchmark does, because small copies stay in a
/// cache.
double memcpy_limit(std::uint64_t size_bytes) {
  std::vector<std::byte> from(size_bytes, std::byte{1});
  std::vector<std::byte> to(size_bytes, std::byte{2});
  double best = 0;
  for (int round = 0; round < 20; ++round) {
    const Nanoseconds begin = monotonic_now();
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::DoNotOptimize(to.data());
    const double seconds = static_cast<double>((monotonic_now() - begin).count()) * 1e-9;
    best = std::max(best, static_cast<double>(from.size()) / seconds);
  }
  return best;
}

void add(const std::string& name, Link& link) {
  if (!link.comes_back()) {
    std::fprintf(stderr, "device_link_bench: %s: the bytes that came back differ from those sent\n",
                 name.c_str());
    std::exit(1);
  }
  for (const auto& [what, direction] : {std::pair{"to_device", Stream::Direction::kToDevice},
                                        std::pair{"to_host", Stream::Direction::kToHost}}) {
    auto* const row = benchmark::RegisterBenchmark(
        (name + "/" + what).c_str(),
        [&link, way = direction](benchmark::State& state) { run(state, link, way); });
    row->RangeMultiplier(8)->Range(64 << 10, static_cast<std::int64_t>(largest_bytes()));
    row->UseRealTime();
  }
}

int run_all() {
  Reactor reactor;
  std::vector<std::unique_ptr<Link>> links;
  const std::uint64_t capacity = largest_bytes() + kMiB;
  for (const CudaInventory::Gpu& gpu : cuda_devices().gpus) {
    links.push_back(std::make_unique<Link>(
        CudaDevice::create(reactor, {.index = gpu.index, .capacity_bytes = capacity}),
        [limit = link_limit(gpu.pci_bus_id)](std::uint64_t) { return limit; }, reactor));
    add("cuda" + std::to_string(gpu.index), *links.back());
  }
  links.push_back(
      std::make_unique<Link>(HostDevice::create(reactor, capacity), memcpy_limit, reactor));
  add("emulated", *links.back());
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace ziggurat

int main(int count, char** arguments) {
  benchmark::Initialize(&count, arguments);
  if (benchmark::ReportUnrecognizedArguments(count, arguments)) return 1;
  return ziggurat::run_all();
}
