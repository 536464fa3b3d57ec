// SPDX-License-Identifier: Apache-2.0
// tests/collectives/exchange/rank_death_test.cc: real processes that die, stop, or are slow in the
// middle of a call. The survivors say who, in which call, and after how long; none hangs.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "base/error.h"
#include "collectives/rendezvous/rendezvous.h"
#include "tests/support/free_port.h"

namespace ziggurat {
namespace rank_death_test {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// Calls of all kinds and sizes until one fails: then its text.
Task<std::string> work(Communicator& c) {
  std::vector<std::byte> slice(1 << 20);
  std::vector<std::byte> all(slice.size() * static_cast<std::size_t>(c.world_size()));
  try {
    for (;;) {
      co_await c.all_reduce(all, DType::kBFloat16);
      co_await c.all_gather(slice, all);
      co_await c.reduce_scatter(all, slice, DType::kFloat32);
      co_await c.barrier();
    }
  } catch (const Error& error) {
    co_return error.what();
  }
}

/// A rank in a process of its own, which writes what ended its work into a pipe. Forked before this
/// process has threads.
class RankProcess {
 public:
  RankProcess(int rank, int world, std::uint16_t port, std::chrono::milliseconds timeout) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error(errno, "pipe2");
    pid_ = ::fork();
    if (pid_ < 0) throw system_error(errno, "fork");
    if (pid_ == 0) be(rank, world, port, timeout, ends[1]);
    ::close(ends[1]);
    read_end_ = ends[0];
  }
  ~RankProcess() {
    ::kill(pid_, SIGKILL);  // reaped below: it is still ours
    ::waitpid(pid_, nullptr, 0);
    ::close(read_end_);
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  void signal(int number) const { ASSERT_EQ(::kill(pid_, number), 0); }
  /// One line: "ready", then the text of the failure. Empty at the end.
  std::string line() const {
    std::string text;
    for (char c = 0; ::read(read_end_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }

 private:
  [[noreturn]] static void be(int rank, int world, std::uint16_t port,
                              std::chrono::milliseconds timeout, int out) {
    RankOptions options;
    options.rank = rank;
    options.world_size = world;
    options.rendezvous = fmt::format("127.0.0.1:{}", port);
    options.secret = "secret";
    options.call_timeout = timeout;
    const auto say = [&](const std::string& line) {
      const std::string text = line + "\n";
      if (::write(out, text.data(), text.size()) < 0) ::_exit(3);
    };
    try {
      Reactor reactor;
      WorkerPool workers({.threads = 1, .cpus = {}});
      reactor.start();
      const auto ranks = connect_ranks(reactor, workers, options);
      say("ready");
      say(reactor.block_on(work(*ranks)));
    } catch (const std::exception& error) {  // or the test itself would go on in the child
      say(error.what());
    }
    ::_exit(0);
  }

  pid_t pid_ = -1;
  int read_end_ = -1;
};

std::vector<std::unique_ptr<RankProcess>> start(
    int world, std::chrono::milliseconds timeout = std::chrono::minutes(10)) {
  const std::uint16_t port = free_port();
  std::vector<std::unique_ptr<RankProcess>> ranks;
  for (int r = 0; r < world; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(r, world, port, timeout));
  }
  for (const auto& rank : ranks) EXPECT_EQ(rank->line(), "ready");
  return ranks;
}

TEST(RankDeath, IsReportedByEverySurvivorWhereverItHappens) {
  std::mt19937 random(3);
  for (int i = 0; i < 12; ++i) {
    auto ranks = start(3);
    const std::size_t victim = random() % 3;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
    ranks[victim]->signal(SIGKILL);
    const auto killed = Clock::now();
    for (std::size_t r = 0; r < 3; ++r) {
      if (r == victim) continue;
      const std::string text = ranks[r]->line();
      EXPECT_THAT(text, HasSubstr(fmt::format("rank {} is gone", victim)));
      EXPECT_THAT(text, ::testing::AnyOf(HasSubstr(" of ranks 0, 1, 2) has waited "),
                                         HasSubstr(fmt::format("rank {} called ", r))));
    }
    // The promise, which leaves ten times what a busy machine needs.
    EXPECT_LT(Clock::now() - killed, std::chrono::seconds(5));
  }
}

TEST(RankDeath, AStoppedRankIsMissedByTheOthersWhichNameIt) {
  auto ranks = start(3, std::chrono::seconds(2));
  ranks[1]->signal(SIGSTOP);
  for (const std::size_t r : {0u, 2u}) {
    EXPECT_THAT(ranks[r]->line(), HasSubstr("rank 1 has not answered for "));
  }
  ranks[1]->signal(SIGCONT);
  EXPECT_THAT(ranks[1]->line(), HasSubstr("rank 1 has not answered for ")) << "it hears of it too";
}

TEST(RankDeath, ARankThatStopsForLessThanTheTimeoutIsWaitedFor) {
  auto ranks = start(2);
  ranks[1]->signal(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(4'500));  // more than a dead link is given
  ranks[1]->signal(SIGCONT);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  ranks[0]->signal(SIGKILL);
  EXPECT_THAT(ranks[1]->line(), HasSubstr("rank 0 is gone")) << "it was at work until now";
}

}  // namespace rank_death_test
}  // namespace ziggurat
