// SPDX-License-Identifier: Apache-2.0
// tests/core/gpu_faults.h: a campaign of faults of a GPU, over the double of the CUDA runtime: one
// case for each CUDA call and each completion that fails, and what became of it.
//
// Each case has a process of its own, since what a lost GPU may still write to is never given back.
// ZIGGURAT_FAULTS: how many of each kind are tried, spread over all; "all" tries every one.
#pragma once

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/pipe_text.h"

namespace ziggurat::testing {

enum class FaultAt { kNowhere, kCall, kCompletion };

struct GpuFault {
  FaultAt at;
  std::uint64_t n;
  cudaError_t error;

  /// A fresh machine that will have it.
  void arm() const {
    cuda_double::reset(1 + n);
    if (at == FaultAt::kCall) cuda_double::fail_call(n, error);
    if (at == FaultAt::kCompletion) cuda_double::fail_completion(n, error);
  }
};

/// What a case saw, as its process tells it.
struct FaultOutcome {
  std::uint64_t calls = 0, completions = 0;
  std::uint64_t durable = 0, resumed = 0;
  std::string struck;                 ///< what the fault hit; empty: the run was over before
  std::string error;                  ///< what the engine or the device threw; empty: nothing
  std::string logged;                 ///< by anybody in its process
  std::vector<std::string> problems;  ///< what should not be

  void expect(bool holds, const std::string& otherwise) {
    if (!holds) problems.push_back(otherwise);
  }
  /// After the run: what the machine has seen, what is left there, and how the error names it.
  void look(const GpuFault& fault) {
    calls = cuda_double::calls();
    completions = cuda_double::completions();
    struck = cuda_double::struck();
    expect_named(fault);
    for (const std::string& finding : cuda_double::report()) {
      // What a call that failed, or a lost GPU, did not give back stays.
      const bool left = finding.starts_with("leak:") || finding.starts_with("under way at the end");
      expect(left && !struck.empty(), finding);
    }
  }

 private:
  void expect_named(const GpuFault& fault) {
    if (error.empty()) return;
    expect(!struck.empty(), "an error without a fault: " + error);
    const auto has = [&](const std::string& text) {
      expect(error.find(text) != std::string::npos, fmt::format("'{}' is not in: {}", text, error));
    };
    has("cuda0");
    has(cudaGetErrorName(fault.error));
    const bool of_call = fault.at == FaultAt::kCall && !cuda_double::is_sticky(fault.error);
    if (of_call) has(struck);
    if (of_call && struck == "cudaMemcpyAsync") has("cudaMemcpyAsync of ");
    static const std::regex call("cuda(Get|Set|Device|Mem|Malloc|Free|Host|Stream|Event|Launch)");
    expect(std::regex_search(error, call), "no call is named: " + error);
  }
};

inline std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

inline void write_outcome(int pipe, const FaultOutcome& its) {
  std::string text =
      fmt::format("numbers {} {} {} {}\nstruck {}\nerror {}\n", its.calls, its.completions,
                  its.durable, its.resumed, one_line(its.struck), one_line(its.error));
  for (const std::string& problem : its.problems) text += "problem " + one_line(problem) + "\n";
  text += "end\n";
  if (::write(pipe, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(3);
}

inline FaultOutcome parse_outcome(const std::string& text) {
  FaultOutcome its;
  std::istringstream lines(text);
  bool whole = false;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.find(' ');
    const std::string word = line.substr(0, space);
    const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
    if (word == "numbers") {
      std::istringstream(rest) >> its.calls >> its.completions >> its.durable >> its.resumed;
    } else if (word == "struck") {
      its.struck = rest;
    } else if (word == "error") {
      its.error = rest;
    } else if (word == "problem") {
      its.problems.push_back(rest);
    } else if (word == "end") {
      whole = true;
    } else {
      its.logged += line + "\n";
    }
  }
  if (!whole) its.problems.push_back("the process ended before its time");
  return its;
}

/// What became of many cases.
struct FaultTally {
  std::uint64_t cases = 0, struck = 0, threw = 0;
  std::map<std::uint64_t, std::uint64_t> resumed;     ///< how many, by generation
  std::map<std::string, std::uint64_t> by_operation;  ///< that was struck

  void add(const FaultOutcome& its) {
    ++cases;
    struck += its.struck.empty() ? 0 : 1;
    threw += its.error.empty() ? 0 : 1;
    ++resumed[its.resumed];
    const bool is_kernel = its.struck.starts_with("kernel");
    ++by_operation[is_kernel ? "a kernel" : its.struck.substr(0, its.struck.find(" of "))];
  }
  std::string text() const {
    std::string all =
        fmt::format("{} struck, {} runs ended by the engine's error; resumed at", struck, threw);
    for (const auto& [generation, times] : resumed)
      all += fmt::format(" generation {}: {}", generation, times);
    all += "; struck";
    for (const auto& [name, times] : by_operation)
      all += fmt::format(" {} {}", name.empty() ? "nothing" : name, times);
    return all;
  }
};

/// Runs cases, each in a process of its own.
class FaultCampaign {
 public:
  /// `run` has the fault's machine, and may throw what is a problem.
  FaultCampaign(std::string name, std::uint64_t tried,
                std::function<FaultOutcome(const GpuFault&)> run)
      : name_(std::move(name)), tried_(tried), run_(std::move(run)) {}

  FaultOutcome run(const GpuFault& fault) const {
    constexpr auto kLimit = std::chrono::seconds(60);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error(errno, "pipe2");
    const pid_t child = ::fork();
    if (child < 0) throw system_error(errno, "fork");
    if (child == 0) be(fault, ends[1]);
    ::close(ends[1]);
    std::string text;
    const bool ended = read_all(ends[0], std::chrono::steady_clock::now() + kLimit, text);
    ::close(ends[0]);
    if (!ended) ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    FaultOutcome its = parse_outcome(text);
    if (!ended) its.problems.push_back(fmt::format("it hangs: no end after {} s", kLimit.count()));
    if (status != 0) its.problems.push_back(fmt::format("status {:#x}", status));
    return its;
  }

  /// A case for each of some n of 1 to `count`: all, or about so many as are asked for; with one of
  /// `errors` after the other.
  void fail_at_each(FaultAt at, std::uint64_t count, const std::vector<cudaError_t>& errors) const {
    const char* const wanted = std::getenv("ZIGGURAT_FAULTS");
    const std::string tried = wanted != nullptr ? wanted : fmt::format("{}", tried_);
    const std::uint64_t most = tried == "all" ? count : std::strtoull(tried.c_str(), nullptr, 10);
    const std::uint64_t stride = std::max<std::uint64_t>(1, count / most);
    FaultTally tally;
    for (std::uint64_t n = 1; n <= count; n += stride) {
      const cudaError_t error = errors[n / stride % errors.size()];
      const FaultOutcome its = run({at, n, error});
      for (const std::string& problem : its.problems)
        ADD_FAILURE() << cudaGetErrorName(error) << " at " << n << " (" << its.struck
                      << "): " << problem << "\nerror: " << its.error << "\n"
                      << its.logged;
      tally.add(its);
    }
    fmt::print("{}, {} at {} of {} {}: {}\n", name_, cudaGetErrorName(errors[0]), tally.cases,
               count, at == FaultAt::kCall ? "calls" : "completions", tally.text());
    // The last two may come after the end of a run that is shorter than the healthy one: how often
    // a run asks for an event depends on the machine's other work.
    EXPECT_GE((tally.struck + 2) * 10, tally.cases * 9) << "the run has become shorter";
    EXPECT_GE(tally.threw * 5, tally.cases) << "much of what fails matters to the engine";
  }
  /// One call's errors, those that lose the GPU there, and at completions.
  void fail_everywhere(const FaultOutcome& healthy) const {
    fail_at_each(FaultAt::kCall, healthy.calls,
                 {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorNotSupported});
    fail_at_each(FaultAt::kCall, healthy.calls,
                 {cudaErrorLaunchFailure, cudaErrorECCUncorrectable});
    fail_at_each(FaultAt::kCompletion, healthy.completions,
                 {cudaErrorIllegalAddress, cudaErrorECCUncorrectable});
  }

 private:
  [[noreturn]] void be(const GpuFault& fault, int pipe) const {
    ::dup2(pipe, STDERR_FILENO);
    FaultOutcome its;
    try {
      its = run_(fault);
    } catch (const std::exception& error) {
      its.problems.push_back(fmt::format("the store did not open again: {}", error.what()));
    }
    write_outcome(pipe, its);
    ::_exit(0);
  }

  std::string name_;
  std::uint64_t tried_;
  std::function<FaultOutcome(const GpuFault&)> run_;
};

}  // namespace ziggurat::testing
