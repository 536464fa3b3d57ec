// SPDX-License-Identifier: Apache-2.0
// tests/faults/rank_jobs.cc: a rank tells its parent line by line what it has been promised; what
// it has not said when it dies was not promised to anybody.
#include "tests/faults/rank_jobs.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <sstream>

#include "aio/faulty_engine.h"
#include "base/error.h"
#include "base/log.h"
#include "collectives/rendezvous/rendezvous.h"
#include "tests/core/checkpoint_rig.h"
#include "tests/support/free_port.h"
#include "tests/support/pipe_text.h"

namespace ziggurat::testing {
namespace {

/// For a whole job, which takes a second: only one that hangs takes longer.
constexpr auto kLimit = std::chrono::seconds(120);
/// FS_IOC_SHUTDOWN, or XFS_IOC_GOINGDOWN: linux/fs.h has it since 6.10 only.
constexpr unsigned long kShutdownFilesystem = _IOR('X', 125, std::uint32_t);

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// A rank's side of the pipe to its parent. Any thread.
class Teller {
 public:
  explicit Teller(int pipe) : pipe_(pipe) {}
  void say(const std::string& what) const {
    const std::string line = one_line(what) + "\n";
    if (::write(pipe_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) ::_exit(3);
  }

 private:
  int pipe_;
};

/// Counts a rank's calls, and strikes one. Reactor's thread, but for end().
class Striker {
 public:
  Striker(const Strike& strike, int rank, const Teller& teller)
      : strike_(strike), mine_(strike.rank == rank), teller_(teller) {}

  int operator()(FaultPoint point) {
    if (ended_) return 0;
    const std::uint64_t call = calls_++;
    const bool hit = mine_ && strike_.effect != Strike::Effect::kNothing && call == strike_.call;
    return hit ? strike(point) : 0;
  }
  /// Nothing is counted or struck any more.
  void end() { ended_ = true; }
  std::uint64_t calls() const { return calls_; }

 private:
  int strike(FaultPoint point) {
    teller_.say(fmt::format("struck {}", static_cast<int>(point)));
    switch (strike_.effect) {
      case Strike::Effect::kNothing: return 0;
      case Strike::Effect::kErrno: return strike_.error_number;
      case Strike::Effect::kShutdown: shut_down(); return 0;
      case Strike::Effect::kKill: ::kill(::getpid(), SIGKILL); break;
      case Strike::Effect::kKillAll: ::kill(0, SIGKILL); break;
    }
    for (;;) ::pause();
  }
  void shut_down() const {
    const int directory = ::open(strike_.filesystem.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    std::uint32_t flags = strike_.shutdown_flags;
    if (directory < 0 || ::ioctl(directory, kShutdownFilesystem, &flags) != 0)
      teller_.say(
          fmt::format("problem shutting {} down: {}", strike_.filesystem, errno_text(errno)));
    ::close(directory);
  }

  const Strike& strike_;
  bool mine_;
  const Teller& teller_;
  std::atomic<bool> ended_ = false;
  std::atomic<std::uint64_t> calls_ = 0;
};

/// One rank of a job, in its process.
class RankRun {
 public:
  RankRun(const Job& job, const Strike& strike, int rank, std::uint16_t port, const Teller& teller)
      : job_(job), rank_(rank), teller_(teller), striker_(strike, rank, teller) {
    runtime_->io_engine = [this, usual = runtime_->io_engine](Reactor& reactor,
                                                              const std::string& directory) {
      std::unique_ptr<IoEngine> io = usual(reactor, directory);
      if (!watches(directory)) return io;
      auto faulty = std::make_unique<FaultyEngine>(reactor, std::move(io));
      faulty->set_gate([this](FaultPoint point) { return striker_(point); });
      return std::unique_ptr<IoEngine>(std::move(faulty));
    };
    if (job.ranks == 1) return;
    RankOptions options;
    options.rank = rank;
    options.world_size = job.ranks;
    options.rendezvous = fmt::format("127.0.0.1:{}", port);
    options.one_host = true;
    options.secret = fmt::format("job {}", ::getppid());  // where another takes the same port
    options.call_timeout = std::chrono::minutes(1);
    runtime_->ranks = connect_ranks(runtime_->reactor, *runtime_->workers, options);
  }

  void run() {
    const Layout layout{.name = "job", .ranks = job_.ranks};
    EngineConfig config = config_of(layout, job_.store);
    config.resume = job_.resume;
    CheckpointRank rank(*runtime_, layout, config, "");
    if (job_.watched == Job::Watched::kStore) striker_.end();
    const std::uint64_t opened = rank.engine->generation();
    teller_.say(fmt::format("opened {}", opened));
    save_copy(*rank.engine, job_.opened_copy);
    train(rank);
    rank.engine->finish_saves();
    tell_saves(*rank.engine);
    striker_.end();
    if (!job_.target.empty()) save_last(*rank.engine);
    rank.end();
    teller_.say(fmt::format("durable {}", rank.engine->durable_generation()));
    save_copy(*rank.engine, job_.last_copy);
    teller_.say(fmt::format("ended {}", striker_.calls()));
  }

 private:
  bool watches(const std::string& directory) const {
    if (job_.watched == Job::Watched::kStore) return directory.starts_with(job_.store);
    return directory == job_.target;
  }
  CheckpointRequest request() const {
    return {.folder = job_.target, .resume = {}, .keep_last = job_.keep_last};
  }

  void train(CheckpointRank& rank) {
    const CheckpointRequest wanted = request();
    for (std::uint64_t step = rank.engine->generation() + 1; step <= job_.last_step; ++step) {
      const bool saves =
          !job_.target.empty() && step % job_.save_every == 0 && step < job_.last_step;
      if (saves) rank.engine->finish_saves();
      rank.step(saves ? &wanted : nullptr);
      teller_.say(fmt::format("durable {}", rank.engine->durable_generation()));
      tell_saves(*rank.engine);
    }
  }
  void save_last(Engine& engine) {
    try {
      engine.save_checkpoint(request());
      tell_saves(engine);
    } catch (const Error& error) {
      tell_failure(engine.generation(), error.what());
    }
  }
  void tell_saves(Engine& engine) {
    for (const SaveOutcome& outcome : engine.ended_saves()) {
      const bool is_copy = !outcome.directory.starts_with(job_.target + "/");
      if (is_copy && !outcome.failure) continue;
      if (outcome.failure) {
        tell_failure(outcome.step, outcome.failure->what());
      } else {
        teller_.say(fmt::format("saved {}", outcome.step));
      }
    }
  }
  void tell_failure(std::uint64_t step, const std::string& why) {
    const std::string directory = job_.target + "/" + checkpoint_name(step);
    teller_.say(fmt::format("failed {} {}", step, why));
    if (rank_ != 0) return;  // rank 0 removes what is left, before it says anything
    std::error_code dead;    // the filesystem, where it was shut down
    const bool is_half = std::filesystem::exists(directory, dead) &&
                         !std::filesystem::exists(directory + "/manifest.json", dead) && !dead;
    if (is_half) teller_.say(fmt::format("half {}", step));
  }
  void save_copy(Engine& engine, const std::string& folder) {
    if (!folder.empty()) engine.save_checkpoint({.folder = folder, .resume = {}});
  }

  const Job& job_;
  int rank_;
  const Teller& teller_;
  Striker striker_;
  std::unique_ptr<Runtime> runtime_ =
      Runtime::create({.threads = 1, .pin = false, .trace_path = ""});
};

[[noreturn]] void be(const Job& job, const Strike& strike, int rank, std::uint16_t port, int pipe) {
  ::signal(SIGPIPE, SIG_IGN);
  log().set_level(LogLevel::kOff);  // hundreds of jobs fail alike
  const Teller teller(pipe);
  try {
    RankRun(job, strike, rank, port, teller).run();
  } catch (const Error& error) {
    teller.say(fmt::format("error {}", error.what()));
  } catch (const std::exception& error) {
    teller.say(fmt::format("problem not an Error: {}", error.what()));
  }
  ::_exit(0);
}

struct Child {
  pid_t pid = -1;
  int pipe = -1;
};

/// All in a group of processes of their own.
std::vector<Child> start(const Job& job, const Strike& strike) {
  const std::uint16_t port = job.ranks > 1 ? free_port() : std::uint16_t{0};
  std::vector<Child> children;
  for (int rank = 0; rank < job.ranks; ++rank) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw system_error(errno, "pipe2");
    const pid_t group = children.empty() ? 0 : children.front().pid;
    const pid_t pid = ::fork();
    if (pid < 0) throw system_error(errno, "fork");
    if (pid == 0) {
      ::setpgid(0, group);
      be(job, strike, rank, port, ends[1]);
    }
    ::setpgid(pid, group);
    ::close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  return children;
}

RankReport parse(const std::string& text) {
  RankReport its;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    std::uint64_t number = 0;
    words >> word;
    const std::string rest = line.substr(std::min(line.size(), word.size() + 1));
    if (word == "error") its.error = rest;
    if (word == "problem") its.problems.push_back(rest);
    if (word == "struck") its.struck = true;
    if (!(words >> number)) continue;
    if (word == "opened") its.opened = number;
    if (word == "durable") its.durable = std::max(its.durable, number);
    if (word == "saved") its.saved.insert(number);
    if (word == "half") its.halves.insert(number);
    if (word == "failed") its.failed[number] = rest.substr(rest.find(' ') + 1);
    if (word == "ended") {
      its.ended = true;
      its.calls = number;
    }
  }
  return its;
}

}  // namespace

std::string to_string(const Strike& strike) {
  const auto effect = [&]() -> std::string {
    switch (strike.effect) {
      case Strike::Effect::kNothing: return "nothing";
      case Strike::Effect::kKill: return "SIGKILL";
      case Strike::Effect::kKillAll: return "SIGKILL of all ranks";
      case Strike::Effect::kErrno: return errno_text(strike.error_number);
      case Strike::Effect::kShutdown:
        return fmt::format("shutdown with flags {}", strike.shutdown_flags);
    }
    return "?";
  };
  return fmt::format("{} at call {} of rank {}", effect(), strike.call, strike.rank);
}

namespace {

std::vector<RankReport> run_once(const Job& job, const Strike& strike) {
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  std::vector<RankReport> reports;
  const std::vector<Child> children = start(job, strike);
  for (const Child& child : children) {
    std::string text;
    const bool ended = read_all(child.pipe, limit, text);
    ::close(child.pipe);
    if (!ended) ::kill(child.pid, SIGKILL);
    reports.push_back(parse(text));
    ::waitpid(child.pid, &reports.back().status, 0);
    if (!ended) reports.back().problems.emplace_back("it hangs");
  }
  return reports;
}

}  // namespace

/// Again where another process has taken the port before rank 0 did: nothing was opened then.
std::vector<RankReport> run_job(const Job& job, const Strike& strike) {
  for (;;) {
    std::vector<RankReport> reports = run_once(job, strike);
    if (reports[0].error.find("EADDRINUSE") == std::string::npos) return reports;
  }
}

std::uint64_t durable(const std::vector<RankReport>& ranks) {
  return std::ranges::max(ranks, {}, &RankReport::durable).durable;
}

std::set<std::uint64_t> saved(const std::vector<RankReport>& ranks) {
  std::set<std::uint64_t> all;
  for (const RankReport& rank : ranks) all.insert(rank.saved.begin(), rank.saved.end());
  return all;
}

bool struck(const std::vector<RankReport>& ranks) {
  return std::ranges::any_of(ranks, &RankReport::struck);
}

std::string trouble(const std::vector<RankReport>& ranks) {
  std::string text;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankReport& its = ranks[rank];
    if (!its.error.empty()) text += fmt::format("rank {}: error: {}\n", rank, its.error);
    for (const auto& [step, why] : its.failed)
      text += fmt::format("rank {}: save of step {}: {}\n", rank, step, why);
    for (const std::string& problem : its.problems)
      text += fmt::format("rank {}: {}\n", rank, problem);
    if (its.status != 0) text += fmt::format("rank {}: status {:#x}\n", rank, its.status);
    if (!its.ended) text += fmt::format("rank {}: it did not end\n", rank);
  }
  return text;
}

}  // namespace ziggurat::testing
