// SPDX-License-Identifier: Apache-2.0
// bench/ranks_bench.cc: do the ranks of a host that share its cores lose time to each other?
//
// The ceiling is one process that does all the work on all cores. The same records are updated by
// that one process, by `--ranks` processes that share the cores as their launcher's variables say
// (base/topology/core_budget.h), and by as many processes that know nothing of each other. The
// groups take turns, and the figures are medians of each round's ratio.
//   ranks_bench [--ranks 8] [--params 32000000] [--steps 4] [--rounds 7]
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <limits>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "base/runtime/worker_pool.h"
#include "base/topology/core_budget.h"
#include "optimizer/update.h"
#include "tiers/pool/host_mapping.h"

namespace {

using namespace ziggurat;

constexpr std::uint64_t kTilesPerRecord = 8;
constexpr std::uint64_t kElements = kTilesPerRecord * kTileElements;

struct Options {
  std::size_t ranks = 8;
  std::uint64_t params = 32'000'000;
  int steps = 4;
  int rounds = 7;
};

/// fp32 AdamW records with their gradients and parameters.
class Records {
 public:
  explicit Records(std::size_t count)
      : count_(count), mapping_({.owner = "ranks benchmark", .size_bytes = count * kBytes}) {}

  std::size_t count() const { return count_; }
  void update(std::size_t index) {
    const std::span<std::byte> all = mapping_.bytes().subspan(index * kBytes, kBytes);
    const RecordView view{.record = all.first(12 * kElements),
                          .grad = {DType::kBFloat16, all.subspan(12 * kElements, 2 * kElements)},
                          .param = {DType::kBFloat16, all.subspan(14 * kElements, 2 * kElements)}};
    const DecayRun whole{0, kElements, true};
    const OptimizerStep step = OptimizerStep::make({.learning_rate = 1e-4F,
                                                    .beta1 = 0.9F,
                                                    .beta2 = 0.95F,
                                                    .eps = 1e-8F,
                                                    .weight_decay = 0.1F,
                                                    .grad_scale = 1.0F,
                                                    .t = 10});
    update_record(step, view, {&whole, 1});
  }

 private:
  static constexpr std::size_t kBytes = 16 * kElements;
  std::size_t count_;
  HostMapping mapping_;
};

/// Reads or writes one byte. receive() returns false at the end of the pipe.
bool receive(int pipe) {
  char byte = 0;
  return ::read(pipe, &byte, 1) == 1;
}
void send(int pipe) {
  const char byte = 1;
  if (::write(pipe, &byte, 1) != 1) throw system_error(errno, "cannot write to a pipe");
}

/// Makes `steps` steps on its records for every byte that it receives, until it is killed.
[[noreturn]] void run_rank(const CoreBudget& budget, std::size_t records, int steps, int from,
                           int to) {
  Records work(records);
  WorkerPool workers({.threads = budget.workers, .cpus = budget.cpus});
  const std::function<void(std::size_t)> update = [&](std::size_t i) { work.update(i); };
  workers.for_each(records, update);
  for (;;) {
    send(to);
    if (!receive(from)) ::_exit(1);
    for (int step = 0; step < steps; ++step) workers.for_each(records, update);
  }
}

class Rank {
 public:
  Rank(const CoreBudget& budget, std::size_t records, int steps) {
    int down[2], up[2];
    if (::pipe2(down, O_CLOEXEC) != 0 || ::pipe2(up, O_CLOEXEC) != 0)
      throw system_error(errno, "pipe2");
    pid_ = ::fork();
    if (pid_ < 0) throw system_error(errno, "fork");
    if (pid_ == 0) {
      ::close(down[1]);
      ::close(up[0]);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      run_rank(budget, records, steps, down[0], up[1]);
    }
    ::close(down[0]);
    ::close(up[1]);
    go_ = down[1];
    done_ = up[0];
  }
  ~Rank() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::close(go_);
    ::close(done_);
  }
  Rank(const Rank&) = delete;
  void start() const { send(go_); }
  double cpu_seconds() const {
    clockid_t clock{};
    timespec time{};
    if (::clock_getcpuclockid(pid_, &clock) != 0 || ::clock_gettime(clock, &time) != 0)
      throw system_error(errno, "clock_gettime of a rank");
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  void wait() const { ZIGGURAT_CHECK(receive(done_), "rank {} died", pid_); }

 private:
  pid_t pid_ = -1;
  int go_ = -1, done_ = -1;
};

using Group = std::vector<std::unique_ptr<Rank>>;

Group make_group(const Options& options, std::size_t ranks, bool shared) {
  const Topology topology = Topology::discover();
  const std::size_t records = (options.params + kElements - 1) / kElements;
  Group group;
  for (std::size_t i = 0; i < ranks; ++i) {
    const LocalRank place = shared ? LocalRank{i, ranks, "benchmark"} : LocalRank{};
    group.push_back(std::make_unique<Rank>(
        core_budget(topology, place, std::numeric_limits<double>::infinity()),
        records * (i + 1) / ranks - records * i / ranks, options.steps));
  }
  for (const auto& rank : group) rank->wait();
  return group;
}

/// Wall time, and processor time of all ranks, which still means something on a busy machine.
struct Seconds {
  double wall, cpu;
};

Seconds seconds_of(const Group& group) {
  const auto cpu = [&] {
    double sum = 0;
    for (const auto& rank : group) sum += rank->cpu_seconds();
    return sum;
  };
  const double cpu_before = cpu();
  const auto start = std::chrono::steady_clock::now();
  for (const auto& rank : group) rank->start();
  for (const auto& rank : group) rank->wait();
  const auto end = std::chrono::steady_clock::now();
  return {std::chrono::duration<double>(end - start).count(), cpu() - cpu_before};
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// A group's times as multiples of one process's times before and after the group's turn.
struct Multiples {
  std::vector<double> wall, cpu;
  void add(const Seconds& group, const Seconds& before, const Seconds& after) {
    wall.push_back(2 * group.wall / (before.wall + after.wall));
    cpu.push_back(2 * group.cpu / (before.cpu + after.cpu));
  }
  void print(const std::string& name) const {
    fmt::print("{:<34} {:>8.3f} {:>8.3f} {:>8.3f}\n", name, median(wall),
               *std::ranges::max_element(wall), median(cpu));
  }
};

void run(const Options& options) {
  const Group one = make_group(options, 1, true);
  const Group shared = make_group(options, options.ranks, true);
  const Group strangers = make_group(options, options.ranks, false);
  Multiples sharing, not_sharing;
  std::vector<double> alone;
  Seconds before = seconds_of(one);
  for (int round = 0; round < options.rounds; ++round) {
    const Seconds with_budget = seconds_of(shared);
    const Seconds between = seconds_of(one);
    const Seconds without = seconds_of(strangers);
    const Seconds after = seconds_of(one);
    sharing.add(with_budget, before, between);
    not_sharing.add(without, between, after);
    alone.push_back(between.wall);
    before = after;
  }
  fmt::print("{} M parameters, {} steps; {} rounds; one process on all cores: {:.3f} s\n",
             options.params / 1'000'000, options.steps, options.rounds, median(alone));
  fmt::print("{:<34} {:>8} {:>8} {:>8}\n", "relative to one process", "median", "worst", "CPU");
  sharing.print(fmt::format("{} ranks that share the cores", options.ranks));
  not_sharing.print(fmt::format("{} processes, each on all cores", options.ranks));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Do the ranks of a host that share its cores lose time to each other?");
  app.add_option("--ranks", options.ranks)->check(CLI::PositiveNumber);
  app.add_option("--params", options.params, "of all ranks")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "in each turn")->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ranks_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
