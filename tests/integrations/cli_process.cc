// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_process.cc: posix_spawn, and reading what came out.
#include "tests/integrations/cli_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

namespace ziggurat::test {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

Process::Process(const fs::path& folder, const Arguments& arguments,
                 const Environment& environment) {
  static int number = 0;
  ++number;
  out_ = folder / ("stdout-" + std::to_string(number));
  err_ = folder / ("stderr-" + std::to_string(number));
  std::vector<std::string> words{ZIGGURAT_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (environment.count(text.substr(0, text.find('='))) == 0) variables.push_back(text);
  }
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out_.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err_.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0600);
  const int result =
      ::posix_spawn(&pid_, ZIGGURAT_BINARY, &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  if (result != 0) {
    pid_ = -1;
    ADD_FAILURE() << "cannot start " << ZIGGURAT_BINARY << ": errno " << result;
  }
}

Process::~Process() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Process::signal(int number) const {
  if (pid_ > 0) ::kill(pid_, number);
}

bool Process::ended() {
  if (pid_ < 0) return true;
  if (::waitpid(pid_, &status_, WNOHANG) != pid_) return false;
  pid_ = -1;
  return true;
}

bool Process::wait_until(const std::function<bool()>& reached) const {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (std::chrono::steady_clock::now() < deadline) {
    siginfo_t info{};
    const bool over =
        ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == pid_;
    if (reached()) return true;
    if (over) return false;
    std::this_thread::sleep_for(2ms);
  }
  return false;
}

bool Process::wait_for_output(const std::string& text) const {
  return wait_until([&] { return out().find(text) != std::string::npos; });
}

Output Process::wait(std::chrono::seconds longest) {
  const auto deadline = std::chrono::steady_clock::now() + longest;
  while (!ended()) {
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "still running after " << longest.count() << " s; so far:\n"
                    << out() << err();
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status_, 0);
      pid_ = -1;
      break;
    }
    std::this_thread::sleep_for(2ms);
  }
  Output output;
  if (WIFEXITED(status_)) output.exit_code = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) output.signal = WTERMSIG(status_);
  output.out = out();
  output.err = err();
  return output;
}

std::string Process::out() const { return contents(out_); }

/// Without what a run says of this machine's processor, which no test here is about.
std::string Process::err() const {
  constexpr std::string_view kOfThisMachine = "matmul: the CPU has no bf16 dot product";
  std::istringstream lines(contents(err_));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (line.find(kOfThisMachine) == std::string::npos) kept += line + '\n';
  }
  return kept;
}

Output ziggurat(const fs::path& folder, const Arguments& arguments,
                const Environment& environment) {
  return Process(folder, arguments, environment).wait();
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (fs::current_path() / "cli-XXXXXX").string();
  const char* made = ::mkdtemp(pattern.data());
  if (made == nullptr) throw std::runtime_error("mkdtemp failed in " + fs::current_path().string());
  path_ = made;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string sample_text() {
  static const char* const kWords[] = {"and ",  "the ",   "earth ", "was ",   "without ",
                                       "form ", "void; ", "light ", "day.\n", "waters "};
  std::string text;
  unsigned state = 1;
  while (text.size() < 20'000) {
    state = state * 1664525U + 1013904223U;
    text += kWords[(state >> 16) % std::size(kWords)];
  }
  return text;
}

Arguments tiny_train(const TemporaryFolder& folder, const std::string& store, int steps) {
  const std::string data = folder / "text.txt";
  if (!fs::exists(data)) write_file(data, sample_text());
  return {"train",
          "--model",
          "2x64x2",
          "--data",
          data,
          "--store",
          folder / store,
          "--steps",
          std::to_string(steps),
          "--batch",
          "2",
          "--accumulate",
          "2",
          "--context",
          "32",
          "--device-memory",
          "8MiB",
          "--host-memory",
          "16MiB",
          "--print-loss-bits"};
}

Arguments operator+(Arguments left, const Arguments& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

namespace {

/// `format` reads a number and ten characters.
std::map<int, std::string> bits_of(const std::string& out, const char* format) {
  std::map<int, std::string> bits;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    int number = 0;
    char text[16] = {};
    if (std::sscanf(line.c_str(), format, &number, text) != 2) continue;
    const auto [place, fresh] = bits.emplace(number, text);
    if (!fresh) {
      EXPECT_EQ(place->second, text) << number << " twice, with other bits";
    }
  }
  return bits;
}

}  // namespace

std::map<int, std::string> loss_bits(const std::string& out) {
  return bits_of(out, "step %d loss-bits %10s");
}

std::map<int, std::string> attempt_bits(const std::string& out) {
  return bits_of(out, "step %*d attempt %d loss-bits %10s");
}

}  // namespace ziggurat::test
