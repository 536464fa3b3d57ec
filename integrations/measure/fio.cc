// SPDX-License-Identifier: Apache-2.0
// integrations/measure/fio.cc: runs fio as a child, reads its output from a pipe, and parses its
// JSON.
#include "integrations/measure/fio.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "aio/posix_files.h"
#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat::measure {
namespace {

constexpr int kExecFailed = 127;

struct ChildOutput {
  int status = 0;
  std::string text;  // standard output and standard error
};

std::string read_all(int fd) {
  std::string text;
  std::array<char, 65536> part;
  for (;;) {
    const ssize_t count = ::read(fd, part.data(), part.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw system_error(errno, "cannot read fio's output");
    if (count == 0) return text;
    text.append(part.data(), static_cast<std::size_t>(count));
  }
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

std::vector<std::string> environment_with(const std::string& addition) {
  const std::string name = addition.substr(0, addition.find('=') + 1);
  std::vector<std::string> all;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (name.empty() || std::strncmp(*variable, name.c_str(), name.size()) != 0)
      all.emplace_back(*variable);
  }
  if (!addition.empty()) all.push_back(addition);
  return all;
}

/// Runs a program, with its output and its errors in one stream. The child is killed when this
/// thread ends, so that an interrupted benchmark leaves no process that writes.
ChildOutput run_child(std::vector<std::string> words, const std::string& variable) {
  std::vector<std::string> variables = environment_with(variable);
  const std::vector<char*> argv = pointers(words);
  const std::vector<char*> envp = pointers(variables);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error(errno, "cannot make a pipe for fio");
  const UniqueFd from_child(ends[0]);
  UniqueFd to_us(ends[1]);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw system_error(errno, "cannot start a process for fio");
  if (child == 0) {  // the child of a process with threads may call only a few functions
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(kExecFailed);
    const int nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, STDIN_FILENO);
    ::dup2(to_us.get(), STDOUT_FILENO);
    ::dup2(to_us.get(), STDERR_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(kExecFailed);
  }
  to_us = UniqueFd();
  ChildOutput output;
  output.text = read_all(from_child.get());
  while (::waitpid(child, &output.status, 0) < 0) {
    if (errno != EINTR) throw system_error(errno, "cannot wait for fio");
  }
  return output;
}

const char* pattern(IoMix kind) {
  switch (kind) {
    case IoMix::kRead: return "read";
    case IoMix::kWrite: return "write";
    case IoMix::kMix: break;
  }
  return "rw";
}

std::vector<std::string> arguments(const FioJob& job, const char* memory) {
  std::vector<std::string> words{
      "fio",
      "--name=peer",
      "--filename=" + job.path,
      fmt::format("--size={}", job.size_bytes),
      fmt::format("--rw={}", pattern(job.kind)),
      fmt::format("--bs={}k", job.block_bytes / kKiB),
      "--ioengine=io_uring",
      fmt::format("--iodepth={}", job.depth),
      "--direct=1",
      "--fixedbufs=1",
      "--registerfiles=1",
      fmt::format("--iomem={}", memory),
      "--scramble_buffers=0",  // nobody reads what fio writes
      "--time_based=1",
      fmt::format("--runtime={}ms", static_cast<std::int64_t>(job.seconds * 1000)),
      "--thread=1",
      "--allow_file_create=0",
      "--output-format=json"};
  if (job.read_only) words.emplace_back("--readonly");
  return words;
}

Error not_fio(const std::string& text) {
  return {ErrorCode::kUnavailable,
          fmt::format("fio failed or gave no figures: {}", text.substr(0, 300))};
}

}  // namespace

FioFigure parse_fio(const std::string& text, const FioJob& job) {
  using nlohmann::json;
  // fio may print warnings before the JSON object.
  const auto begin = text.find('{');
  const json parsed =
      json::parse(begin == std::string::npos ? text : text.substr(begin), nullptr, false);
  try {
    const json& peer = parsed.at("jobs").at(0);
    if (peer.at("error").get<int>() != 0) throw not_fio(text);
    const auto bytes = peer.at("read").at("io_bytes").get<double>() +
                       peer.at("write").at("io_bytes").get<double>();
    const double seconds = std::max(peer.at("read").at("runtime").get<double>(),
                                    peer.at("write").at("runtime").get<double>()) /
                           1000;
    if (bytes <= 0 || seconds <= 0) throw not_fio(text);
    FioFigure figure;
    figure.depth = job.depth;
    figure.write_bytes = peer.at("write").at("io_bytes").get<std::uint64_t>();
    figure.gb_per_s = bytes / 1e9 / seconds;
    const double cpu_share =
        (peer.at("usr_cpu").get<double>() + peer.at("sys_cpu").get<double>()) / 100;
    figure.cpu_s_per_gb = cpu_share * peer.at("job_runtime").get<double>() / 1000 / (bytes / 1e9);
    const json& side = peer.at(job.kind == IoMix::kWrite ? "write" : "read");
    const json& percentiles = side.at("clat_ns").at("percentile");
    figure.p50_us = percentiles.at("50.000000").get<double>() / 1e3;
    figure.p99_us = percentiles.at("99.000000").get<double>() / 1e3;
    return figure;
  } catch (const json::exception&) {
    throw not_fio(text);
  }
}

std::optional<Fio> Fio::find(const FioJob& probe, std::string& why) {
  const ChildOutput version = run_child({"fio", "--version"}, "");
  if (!WIFEXITED(version.status) || WEXITSTATUS(version.status) != 0) {
    why = "fio is not installed";
    return std::nullopt;
  }
  Fio fio;
  fio.version_ = version.text.substr(0, version.text.find('\n'));
  for (const Memory memory : {Memory::kHuge, Memory::kTransparent}) {
    fio.memory_ = memory;
    try {
      static_cast<void>(fio.run(probe));
      return fio;
    } catch (const Error& error) {
      why = error.what();
    }
  }
  return std::nullopt;
}

FioFigure Fio::run(const FioJob& job) const {
  const bool huge = memory_ == Memory::kHuge;
  const ChildOutput output = run_child(arguments(job, huge ? "mmaphuge" : "malloc"),
                                       huge ? "" : "GLIBC_TUNABLES=glibc.malloc.hugetlb=1");
  if (!WIFEXITED(output.status) || WEXITSTATUS(output.status) != 0) throw not_fio(output.text);
  return parse_fio(output.text, job);
}

std::string Fio::how() const {
  return fmt::format(
      "{} uses io_uring, direct I/O, a registered file and fixed buffers in {}", version_,
      memory_ == Memory::kHuge
          ? "2 MiB huge pages (mmaphuge)"
          : "transparent huge pages (malloc under "
            "GLIBC_TUNABLES=glibc.malloc.hugetlb=1; none are reserved for mmaphuge)");
}

}  // namespace ziggurat::measure
