// SPDX-License-Identifier: Apache-2.0
// integrations/cli/launch.cc: `ziggurat launch`, which starts, watches and ends the ranks of a job
// together.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/topology/core_budget.h"
#include "collectives/random.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/interrupt.h"

namespace ziggurat::cli {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr int kExitNotStarted = 127;              // the code that shells use
constexpr auto kGrace = std::chrono::seconds(4);  // time to report why, after another rank failed
constexpr auto kLastGrace = std::chrono::seconds(5);  // time to end, after SIGTERM
constexpr std::size_t kLineMax = 8192;

/// Reads a rank's output from a pipe and prints whole lines with the rank's number in front.
class PrefixedStream : public std::enable_shared_from_this<PrefixedStream> {
 public:
  PrefixedStream(asio::io_context& context, int read_end, std::FILE* to, int rank)
      : stream_(context, read_end), to_(to), rank_(rank) {}

  void read() {
    stream_.async_read_some(asio::buffer(buffer_),
                            [self = shared_from_this()](const error_code& error, std::size_t n) {
                              self->take({self->buffer_.data(), n});
                              if (!error) return self->read();
                              self->print();  // the last line, if it had no end
                            });
  }

 private:
  void take(std::string_view text) {
    for (const char c : text) {
      if (c != '\n') line_ += c;
      if (c == '\n' || line_.size() == kLineMax) print();
    }
  }
  /// Prints the line. A failure is ignored, so that the rank goes on after the terminal was closed.
  void print() {
    if (!line_.empty()) std::fputs(fmt::format("[rank {}] {}\n", rank_, line_).c_str(), to_);
    std::fflush(to_);
    line_.clear();
  }

  asio::posix::stream_descriptor stream_;
  std::FILE* to_;
  int rank_;
  std::array<char, 4096> buffer_;
  std::string line_;
};

struct Pipe {
  int read_end = -1;
  int write_end = -1;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    throw system_error(errno, "cannot make a pipe for a rank's output");
  return {ends[0], ends[1]};
}

using Variables = std::vector<std::pair<std::string, std::string>>;

/// The signal settings that a rank starts with: those that this process was started with, as if
/// there were no launcher. Ranks that run this program start with the signals that it handles
/// blocked, until main() has installed its handlers.
struct RankSignals {
  sigset_t blocked{};
  sighandler_t on_pipe = SIG_DFL;
};

/// Turns the child into the rank's program after fork(), calling only what may be called there.
/// Ends the child with _exit() if that fails.
[[noreturn]] void become(const std::vector<char*>& arguments, const Variables& variables, int out,
                         int err, pid_t launcher, const RankSignals& signals) {
  // In a process group of its own the rank gets no Ctrl-C from the terminal: the launcher passes it
  // on once.
  bool ready = ::setpgid(0, 0) == 0 && ::prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
  ready = ready && ::getppid() == launcher;
  const int nothing = ::open("/dev/null", O_RDONLY);
  ready = ready && nothing >= 0 && ::dup2(nothing, STDIN_FILENO) >= 0;
  ready = ready && (out < 0 || ::dup2(out, STDOUT_FILENO) >= 0);
  ready = ready && (err < 0 || ::dup2(err, STDERR_FILENO) >= 0);
  for (const auto& [name, value] : variables) {
    ready = ready && ::setenv(name.c_str(), value.c_str(), 1) == 0;
  }
  ready = ready && ::signal(SIGPIPE, signals.on_pipe) != SIG_ERR;
  ready = ready && ::sigprocmask(SIG_SETMASK, &signals.blocked, nullptr) == 0;
  if (ready) ::execvp(arguments.front(), arguments.data());
  fmt::print(stderr, "ziggurat: error: {}: {}\n", arguments.front(), errno_text(errno));
  ::_exit(kExitNotStarted);
}

class Launcher {
 public:
  explicit Launcher(const LaunchCommand& command);
  int run();

 private:
  struct Child {
    pid_t pid = -1;
    int rank = 0;  // of the job
    bool running = false;
  };

  Variables variables_of(int local) const;
  void start(int local);
  void wait_for_signal();
  void take(int number);
  void reap();
  void ended(Child& child, int status);
  void signal_all(int number);
  void end_all_after(std::chrono::seconds grace, int number);

  const LaunchCommand& command_;
  std::string rendezvous_, secret_;
  asio::io_context context_;
  // Delivers the signals. They are blocked from before the first rank until the exit, so that none
  // of them ends this process and the ranks with it.
  asio::posix::stream_descriptor signals_{context_};
  RankSignals of_ranks_;
  asio::steady_timer timer_{context_};
  std::vector<Child> children_;
  int exit_code_ = 0;
  bool interrupted_ = false;
};

Launcher::Launcher(const LaunchCommand& command) : command_(command) {
  sigset_t ours = run_signals();
  if (command_.own_ranks) {
    of_ranks_.blocked = ours;
  } else {
    ::sigemptyset(&of_ranks_.blocked);
  }
  of_ranks_.on_pipe = ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGCHLD, SIG_DFL);  // if it were ignored, waitpid() would not tell how a rank ended
  ::sigaddset(&ours, SIGCHLD);
  if (::sigprocmask(SIG_BLOCK, &ours, nullptr) != 0) throw system_error(errno, "sigprocmask");
  const int told = ::signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
  if (told < 0) throw system_error(errno, "signalfd");
  signals_.assign(told);
}

Variables Launcher::variables_of(int local) const {
  Variables variables{{"LOCAL_RANK", std::to_string(local)},
                      {"LOCAL_WORLD_SIZE", std::to_string(command_.ranks)},
                      {"RANK", std::to_string(command_.node * command_.ranks + local)},
                      {"WORLD_SIZE", std::to_string(command_.nodes * command_.ranks)},
                      {"ZIGGURAT_RENDEZVOUS", rendezvous_}};
  if (!secret_.empty()) variables.emplace_back("ZIGGURAT_SECRET", secret_);
  return variables;
}

void Launcher::start(int local) {
  const int rank = command_.node * command_.ranks + local;
  const Variables variables = variables_of(local);
  std::vector<char*> arguments;
  for (const std::string& argument : command_.arguments) {
    arguments.push_back(const_cast<char*>(argument.c_str()));  // execvp() does not write to them
  }
  arguments.push_back(nullptr);
  const bool has_terminal = local == 0;
  const Pipe out = has_terminal ? Pipe{} : make_pipe();
  const Pipe err = has_terminal ? Pipe{} : make_pipe();
  const pid_t launcher = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) become(arguments, variables, out.write_end, err.write_end, launcher, of_ranks_);
  if (pid < 0) throw system_error(errno, fmt::format("fork for rank {}", rank));
  children_.push_back({pid, rank, true});
  if (has_terminal) return;
  ::close(out.write_end);
  ::close(err.write_end);
  std::make_shared<PrefixedStream>(context_, out.read_end, stdout, rank)->read();
  std::make_shared<PrefixedStream>(context_, err.read_end, stderr, rank)->read();
}

void Launcher::wait_for_signal() {
  signals_.async_wait(asio::posix::stream_descriptor::wait_read, [this](const error_code& error) {
    if (error) return;
    signalfd_siginfo told{};
    while (::read(signals_.native_handle(), &told, sizeof(told)) == sizeof(told))
      take(static_cast<int>(told.ssi_signo));
    if (std::ranges::any_of(children_, &Child::running)) {
      wait_for_signal();
    } else {
      timer_.cancel();
    }
  });
}

/// Handles one signal. SIGHUP is passed on as SIGTERM, which every trainer handles, because a
/// terminal that was closed is gone for all ranks.
void Launcher::take(int number) {
  if (number == SIGCHLD) return reap();
  if (number != SIGUSR1) interrupted_ = true;
  signal_all(number == SIGHUP ? SIGTERM : number);
}

void Launcher::reap() {
  for (Child& child : children_) {
    int status = 0;
    if (child.running && ::waitpid(child.pid, &status, WNOHANG) == child.pid) ended(child, status);
  }
}

void Launcher::ended(Child& child, int status) {
  child.running = false;
  const bool killed = WIFSIGNALED(status);
  const int code = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (code == 0 || exit_code_ != 0) return;
  exit_code_ = code;
  if (interrupted_) return;  // the ranks were asked to end
  const std::string how = killed ? fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                                               ::strsignal(WTERMSIG(status)))
                                 : fmt::format("ended with exit code {}", code);
  std::fputs(fmt::format("ziggurat: rank {} (process {}) {}; the other ranks have {} s to end\n",
                         child.rank, child.pid, how, kGrace.count())
                 .c_str(),
             stderr);
  end_all_after(kGrace, SIGTERM);
}

void Launcher::signal_all(int number) {
  for (const Child& child : children_) {
    if (child.running) ::kill(child.pid, number);  // the process exists until it is reaped
  }
}

void Launcher::end_all_after(std::chrono::seconds grace, int number) {
  timer_.expires_after(grace);
  timer_.async_wait([this, number](const error_code& error) {
    if (error) return;
    signal_all(number);
    if (number != SIGKILL) end_all_after(kLastGrace, SIGKILL);
  });
}

/// Returns an address with a free port on loopback. Another process could take the port before rank
/// 0 does; rank 0 then reports that.
std::string free_rendezvous() {
  asio::io_context context;
  asio::ip::tcp::acceptor acceptor(context,
                                   asio::ip::tcp::endpoint(asio::ip::address_v4::loopback(), 0));
  return fmt::format("127.0.0.1:{}", acceptor.local_endpoint().port());
}

int Launcher::run() {
  rendezvous_ = command_.rendezvous;
  if (rendezvous_.empty()) {
    rendezvous_ = process_environment("ZIGGURAT_RENDEZVOUS").value_or("");
  }
  if (command_.node < 0 || command_.node >= command_.nodes) {
    throw UsageError(fmt::format("--node-rank {} must be at least 0 and less than --nnodes {}",
                                 command_.node, command_.nodes));
  }
  if (rendezvous_.empty() && command_.nodes > 1) {
    throw UsageError(
        "--rendezvous is missing; give HOST:PORT, an address of node 0 that all nodes can reach");
  }
  if (rendezvous_.empty()) rendezvous_ = free_rendezvous();
  const bool has_secret =
      process_environment("ZIGGURAT_SECRET") || process_environment("ZIGGURAT_SECRET_FILE");
  if (command_.nodes == 1 && !has_secret) secret_ = random_secret();
  for (int local = 0; local < command_.ranks; ++local) start(local);
  wait_for_signal();  // signals that came since signals_ was made are still pending
  context_.run();
  return exit_code_;
}

}  // namespace

int launch(const LaunchCommand& command) { return Launcher(command).run(); }

}  // namespace ziggurat::cli
