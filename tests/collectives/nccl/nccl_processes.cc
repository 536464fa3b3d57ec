// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/nccl_processes.cc: fork, a pipe each, and a limit of time.
#include "tests/collectives/nccl/nccl_processes.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "tests/collectives/nccl/double/cuda_machine.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/free_port.h"

namespace ziggurat {
namespace {

// The slowest job takes 20 s of processor time under AddressSanitizer.
constexpr auto kLimit = std::chrono::seconds(300);
constexpr const char* kReportLine = "report";
constexpr const char* kFindingLine = "CUDA: ";

void set_environment(const NcclJob& job, int rank) {
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), 1);
  };
  const auto own = [rank](const std::vector<std::string>& all) {
    return all.empty() ? std::string() : all.at(static_cast<std::size_t>(rank));
  };
  std::vector<int> every(static_cast<std::size_t>(job.world));
  std::iota(every.begin(), every.end(), 0);
  set("LOCAL_RANK", std::to_string(rank));
  set("LOCAL_WORLD_SIZE", std::to_string(job.world));
  set("ZIGGURAT_DOUBLE_GPUS",
      job.gpus.empty() ? fmt::format("{}", fmt::join(every, ",")) : own(job.gpus));
  if (!own(job.faults).empty()) set("ZIGGURAT_NCCL_DOUBLE_FAULT", own(job.faults));
  if (!own(job.reduce).empty()) set("ZIGGURAT_REDUCE", own(job.reduce));
}

void write_line(int pipe, const std::string& line) {
  const std::string text = line + "\n";
  if (::write(pipe, text.data(), text.size()) < 0) ::_exit(3);
}

void write_report(int pipe) {
  nccl_double::Report report;
  if (void* const found = ::dlsym(RTLD_DEFAULT, nccl_double::kReportSymbol)) {
    reinterpret_cast<nccl_double::GetReport>(found)(&report);
  }
  write_line(pipe, fmt::format("{} {} {} {} {} {} {} {}", kReportLine, report.joined,
                               report.destroyed, report.aborted, report.living, report.operations,
                               report.sums, cuda_double::contexts()));
  for (const std::string& finding : cuda_double::report()) write_line(pipe, kFindingLine + finding);
}

[[noreturn]] void be(const NcclJob& job, int rank, std::uint16_t port, int pipe) {
  set_environment(job, rank);
  nccl_double::start_cuda_machine();
  RankOptions options = rank_options([](const char* name) -> std::optional<std::string> {
    const char* const value = std::getenv(name);
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  });
  options.rank = rank;
  options.world_size = job.world;
  options.rendezvous = fmt::format("127.0.0.1:{}", port);
  options.secret = "secret";
  options.call_timeout = job.timeout;
  options.collectives = Collectives::kNccl;
  try {
    Reactor reactor;
    WorkerPool workers({.threads = 1, .cpus = {}});
    reactor.start();
    try {
      NcclRank its(reactor, connect_ranks(reactor, workers, options), pipe);
      job.body(its);
    } catch (const std::exception& error) {
      write_line(pipe, error.what());
    }
  } catch (const std::exception& error) {  // or the test itself would go on in the child
    write_line(pipe, error.what());
  }
  write_report(pipe);
  ::_exit(0);
}

void read_report(const std::string& line, NcclOutcome& outcome) {
  std::istringstream text(line.substr(std::string(kReportLine).size()));
  nccl_double::Report& report = outcome.report;
  text >> report.joined >> report.destroyed >> report.aborted >> report.living >>
      report.operations >> report.sums >> outcome.contexts;
}

/// Everything that comes until the other end is closed, or the time is over.
std::string read_all(int pipe, std::chrono::steady_clock::time_point limit) {
  std::string text;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        limit - std::chrono::steady_clock::now());
    pollfd ready{pipe, POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(std::max<long>(0, left.count()))) != 1) {
      return text + "hangs\n";
    }
    std::array<char, 4096> buffer{};
    const auto length = ::read(pipe, buffer.data(), buffer.size());
    if (length <= 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(length));
  }
}

}  // namespace

void NcclRank::run(const std::function<Task<>()>& body) {
  // A call begins when it is made, so it is made on the reactor.
  const auto on_reactor = [](const std::function<Task<>()>& its) -> Task<> {
    Task<> call = its();
    co_await std::move(call);
  };
  try {
    reactor.block_on(on_reactor(body));
    say("done");
  } catch (const Error& error) {
    say(fmt::format("{}: {}", static_cast<int>(error.code()), error.what()));
  }
}

void NcclRank::say(const std::string& line) const { write_line(pipe_, line); }

std::unique_ptr<Communicator> NcclRank::split_of_all() {
  std::unique_ptr<Communicator> part;
  reactor.block_on([](NcclRank& its, std::unique_ptr<Communicator>& made) -> Task<> {
    std::vector<int> members(static_cast<std::size_t>(its.all->world_size()));
    std::iota(members.begin(), members.end(), 0);
    made = its.all->split(members);
    co_return;
  }(*this, part));
  return part;
}

std::string NcclOutcome::text() const { return fmt::format("{}", fmt::join(lines, "\n")); }

std::vector<NcclOutcome> run_nccl_job(const NcclJob& job) {
  const std::uint16_t port = free_port();
  std::vector<std::pair<pid_t, int>> processes;
  for (int rank = 0; rank < job.world; ++rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error(errno, "pipe2");
    const pid_t child = ::fork();
    if (child < 0) throw system_error(errno, "fork");
    if (child == 0) be(job, rank, port, ends[1]);
    ::close(ends[1]);
    processes.emplace_back(child, ends[0]);
  }
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  std::vector<NcclOutcome> outcomes;
  for (const auto& [process, pipe] : processes) {
    NcclOutcome outcome;
    std::istringstream text(read_all(pipe, limit));
    for (std::string line; std::getline(text, line);) {
      if (line.starts_with(kReportLine)) {
        read_report(line, outcome);
      } else if (line.starts_with(kFindingLine)) {
        outcome.findings.push_back(line);
      } else {
        outcome.lines.push_back(line);
      }
    }
    if (outcome.text().ends_with("hangs")) ::kill(process, SIGKILL);  // not reaped yet: still ours
    ::waitpid(process, &outcome.status, 0);
    ::close(pipe);
    EXPECT_THAT(outcome.findings, testing::IsEmpty());
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

}  // namespace ziggurat
