// SPDX-License-Identifier: Apache-2.0
// bench/io_bench.cc: how near is DirectFile to the speed of the drive, and what does a gigabyte
// cost in CPU?
//
// Ceiling: fio's io_uring engine on the same file with the same block, depth, registered buffers
// and huge pages, the best plain loop there is. Ours and fio take turns, since drives and
// neighbours drift; `of_fio` is the median of the ratios of adjacent turns, CPU is each process's
// own, user and system. The file is filled with random bytes first: extents that were never
// written, and bytes that compress, are faster than any drive.
//   ZIGGURAT_BENCH_DIR=.   ZIGGURAT_BENCH_MIB=2048   ZIGGURAT_BENCH_ROUNDS=3   ZIGGURAT_IO=...
// fio wants reserved huge pages for its buffers: sysctl vm.nr_hugepages=64.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "aio/drive_cap.h"
#include "aio/probe.h"
#include "base/bytes.h"
#include "base/check.h"
#include "tiers/host_mapping.h"

namespace ziggurat::bench {
namespace {

constexpr std::size_t kDepthMax = 32;
constexpr std::size_t kBlock = DirectFile::kBlockBytes;

std::string setting(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

struct Figure {
  double gigabytes_per_second = 0;
  double cpu_seconds_per_gigabyte = 0;
};

double cpu_seconds() {
  rusage usage{};
  ZIGGURAT_CHECK(::getrusage(RUSAGE_SELF, &usage) == 0, "getrusage");
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// A filled file of our own, and the engine over it.
class Bench {
 public:
  Bench()
      : blocks_(std::max<std::size_t>(1, std::stoull(setting("ZIGGURAT_BENCH_MIB", "2048")))),
        path_(
            fmt::format("{}/ziggurat-io-bench-{}", setting("ZIGGURAT_BENCH_DIR", "."), ::getpid())),
        engine_(choose_io_engine(reactor_, setting("ZIGGURAT_BENCH_DIR", "."))),
        memory_({.owner = "io_bench", .size_bytes = kDepthMax * kBlock}) {
    engine_->register_memory(memory_.bytes());
    file_ = DirectFile::open(reactor_, *engine_, path_, {.create = true, .writable = true});
    std::mt19937_64 random(1);
    for (std::size_t at = 0; at < memory_.bytes().size(); at += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory_.bytes().data() + at, &word, 8);
    }
    file_->allocate(blocks_ * kBlock);
    run(true, kDepthMax);
    reactor_.block_on(file_->sync());
  }
  ~Bench() { ::unlink(path_.c_str()); }
  Bench(const Bench&) = delete;

  /// The whole file once, `depth` transfers of a block in flight.
  Figure run(bool write, std::size_t depth) {
    next_ = 0;
    const double cpu = cpu_seconds();
    const auto start = std::chrono::steady_clock::now();
    reactor_.block_on(stream(write, depth));
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
    const double gigabytes = static_cast<double>(blocks_ * kBlock) * 1e-9;
    return {gigabytes / wall.count(), (cpu_seconds() - cpu) / gigabytes};
  }

  /// Nothing where fio or its huge pages are missing.
  std::optional<Figure> run_fio(bool write, std::size_t depth) const {
    const std::string command = fmt::format(
        "fio --name=peer --filename='{}' --rw={} --bs=1M --iodepth={} --size={}M --direct=1 "
        "--ioengine=io_uring --fixedbufs=1 --iomem=mmaphuge --fallocate=none --thread=1 "
        "--output-format=json 2>/dev/null",
        path_, write ? "write" : "read", depth, blocks_);
    std::FILE* const pipe = ::popen(command.c_str(), "r");
    if (pipe == nullptr) return std::nullopt;
    std::string text;
    char part[4096];
    while (const std::size_t count = std::fread(part, 1, sizeof(part), pipe)) {
      text.append(part, count);
    }
    if (::pclose(pipe) != 0) return std::nullopt;
    const auto report = nlohmann::json::parse(text, nullptr, false);
    if (report.is_discarded()) return std::nullopt;
    const auto& job = report.at("jobs").at(0);
    const auto& side = job.at(write ? "write" : "read");
    const double per_second = side.at("bw_bytes").get<double>() * 1e-9;
    // Per cent of one CPU, over the job's run time.
    const double busy = job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>();
    return Figure{per_second, busy / 100 / per_second};
  }

  DriveCap find_cap(bool write) {
    return reactor_.block_on(find_drive_cap(reactor_, *file_, memory_.bytes(),
                                            {.kind = write ? IoKind::kWrite : IoKind::kRead,
                                             .range_bytes = blocks_ * kBlock,
                                             .sample_bytes = blocks_ * kBlock / 4}));
  }

  std::string description() const {
    return fmt::format("{}, {}", engine_->description(), memory_.page_kind());
  }

 private:
  Task<> stream(bool write, std::size_t depth) {
    WorkGroup lanes(reactor_);
    for (std::size_t lane = 0; lane < depth; ++lane) lanes.spawn(follow(write, lane));
    co_await lanes.wait_idle();
  }
  Task<> follow(bool write, std::size_t lane) {
    const auto memory = memory_.bytes().subspan(lane * kBlock, kBlock);
    while (next_ < blocks_) {
      const std::uint64_t offset = next_++ * kBlock;
      if (write) {
        co_await file_->write(offset, memory);
      } else {
        co_await file_->read(offset, memory);
      }
    }
  }

  std::size_t blocks_;
  std::size_t next_ = 0;
  std::string path_;
  Reactor reactor_;
  std::unique_ptr<IoEngine> engine_;
  HostMapping memory_;
  std::unique_ptr<DirectFile> file_;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Bench& the_bench() {
  static Bench bench;  // the file is filled once
  return bench;
}

/// How little at the drive at once is enough, for a DriveQueue.
void smallest_cap(benchmark::State& state) {
  Bench& bench = the_bench();
  DriveCap cap;
  for (auto _ : state) {
    cap = bench.find_cap(state.range(0) != 0);
    state.SetIterationTime(1 / cap.bytes_per_second * 1e9);
  }
  state.counters["cap_MiB"] = static_cast<double>(cap.outstanding_bytes) / kMiB;
  state.counters["GB/s"] = cap.bytes_per_second * 1e-9;
  std::string label;
  for (const DriveCap::Sample& each : cap.samples) {
    label += fmt::format("{}{} MiB: {:.2f}", label.empty() ? "" : ", ",
                         each.outstanding_bytes / kMiB, each.bytes_per_second * 1e-9);
  }
  state.SetLabel(label + " GB/s");
}

void stream(benchmark::State& state) {
  Bench& bench = the_bench();
  const bool write = state.range(0) != 0;
  const auto depth = static_cast<std::size_t>(state.range(1));
  std::vector<double> speed, cpu, fio_speed, fio_cpu, ratio;
  for (auto _ : state) {
    const Figure ours = bench.run(write, depth);
    const std::optional<Figure> fio = bench.run_fio(write, depth);
    state.SetIterationTime(1 / ours.gigabytes_per_second);
    speed.push_back(ours.gigabytes_per_second);
    cpu.push_back(ours.cpu_seconds_per_gigabyte);
    if (!fio) continue;
    fio_speed.push_back(fio->gigabytes_per_second);
    fio_cpu.push_back(fio->cpu_seconds_per_gigabyte);
    ratio.push_back(ours.gigabytes_per_second / fio->gigabytes_per_second);
  }
  state.counters["GB/s"] = median(speed);
  state.counters["cpu_s/GB"] = median(cpu);
  std::string label = bench.description();
  if (ratio.empty()) {
    label += "; no fio here, or no huge pages for it (sysctl vm.nr_hugepages=64)";
  } else {
    state.counters["fio_GB/s"] = median(fio_speed);
    state.counters["fio_cpu_s/GB"] = median(fio_cpu);
    state.counters["of_fio"] = median(ratio);
  }
  state.SetLabel(label);
}

}  // namespace
}  // namespace ziggurat::bench

int main(int argc, char** argv) {
  const int rounds =
      std::max(1, std::atoi(ziggurat::bench::setting("ZIGGURAT_BENCH_ROUNDS", "3").c_str()));
  for (const auto& [write, depth] : {std::pair{0, 8}, {0, 32}, {1, 8}, {1, 32}}) {
    benchmark::RegisterBenchmark("stream", ziggurat::bench::stream)
        ->ArgNames({"write", "depth"})
        ->Args({write, depth})
        ->Iterations(rounds)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  for (const int write : {0, 1}) {
    benchmark::RegisterBenchmark("smallest_cap", ziggurat::bench::smallest_cap)
        ->ArgName("write")
        ->Arg(write)
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
