// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_faults_test.cc: three steps of an engine on a GPU, from open to close,
// with an error at each CUDA call in turn, and the GPU lost at each call and each completion: a
// clear error, no hang, nothing against the documentation, and a store that opens at a generation
// that was durable, with the bits of plain arrays.
//
// Each case has a process of its own, since what a lost GPU may still write to is never given back.
// ZIGGURAT_FAULTS: how many of each kind are tried, spread over all (16); "all" tries every one.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/core/cuda_rig.h"
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/optimizer_twins.h"
#include "tests/support/pipe_text.h"

namespace ziggurat::testing {
namespace {

constexpr std::uint64_t kSteps = 3;
constexpr auto kLimit = std::chrono::seconds(60);

enum class At { kNowhere, kCall, kCompletion };

struct Fault {
  At at;
  std::uint64_t n;
  cudaError_t error;
};

/// What a case saw, as its process tells it.
struct Outcome {
  std::uint64_t calls = 0, completions = 0;
  std::uint64_t durable = 0, resumed = 0;
  std::string struck;                 ///< what the fault hit; empty: the run was over before
  std::string error;                  ///< what the engine or the device threw; empty: nothing
  std::string logged;                 ///< by anybody in its process
  std::vector<std::string> problems;  ///< what should not be
};

/// One case, in its process.
class Case {
 public:
  Case(const ModelSpec& model, const GpuSettings& settings, const PlainRun& plain)
      : model_(model), settings_(settings), plain_(plain) {}

  Outcome run(const Fault& fault) {
    const ScratchDirectory directory;
    const EngineConfig config = settings_.config(directory.path());
    cuda_double::reset(1 + fault.n);
    if (fault.at == At::kCall) cuda_double::fail_call(fault.n, fault.error);
    if (fault.at == At::kCompletion) cuda_double::fail_completion(fault.n, fault.error);
    train(config);
    its_.calls = cuda_double::calls();
    its_.completions = cuda_double::completions();
    its_.struck = cuda_double::struck();
    expect_named(fault);
    for (const std::string& finding : cuda_double::report()) {
      // What a call that failed, or a lost GPU, did not give back stays.
      const bool left = finding.starts_with("leak:") || finding.starts_with("under way at the end");
      expect(left && !its_.struck.empty(), finding);
    }
    resume(config);
    return its_;
  }

 private:
  void expect(bool holds, const std::string& otherwise) {
    if (!holds) its_.problems.push_back(otherwise);
  }

  void train(const EngineConfig& config) {
    std::unique_ptr<GpuRig> rig;
    try {
      rig = std::make_unique<GpuRig>(model_, config);
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        const StepResult result = train_on(*rig->gpu, *rig->engine, model_, step, settings_);
        expect(result.grad_norm == plain_.norms[step], fmt::format("the norm of step {}", step));
        its_.durable = rig->engine->durable_generation();
      }
      rig->engine->make_durable();
      its_.durable = kSteps;
    } catch (const TrainerError& error) {
      ask(rig.get());
    } catch (const Error& error) {
      its_.error = error.what();
    }
  }
  /// The trainer's own call failed; the engine may have something to say of it too.
  void ask(GpuRig* rig) {
    if (rig == nullptr || !rig->engine) return;
    try {
      rig->engine->acquire(0);
      rig->engine->release(0);
      its_.durable = rig->engine->durable_generation();
    } catch (const Error& error) {
      its_.error = error.what();
    }
  }
  void expect_named(const Fault& fault) {
    if (its_.error.empty()) return;
    expect(!its_.struck.empty(), "an error without a fault: " + its_.error);
    const auto has = [&](const std::string& text) {
      expect(its_.error.find(text) != std::string::npos,
             fmt::format("'{}' is not in: {}", text, its_.error));
    };
    has("cuda0");
    has(cudaGetErrorName(fault.error));
    const bool of_call = fault.at == At::kCall && !cuda_double::is_sticky(fault.error);
    if (of_call) has(its_.struck);
    if (of_call && its_.struck == "cudaMemcpyAsync") has("cudaMemcpyAsync of ");
    static const std::regex call("cuda(Get|Set|Device|Mem|Malloc|Free|Host|Stream|Event|Launch)");
    expect(std::regex_search(its_.error, call), "no call is named: " + its_.error);
  }
  /// On the CPU, as if the GPU were gone.
  void resume(const EngineConfig& config) {
    Rig cpu(model_, config);
    its_.resumed = cpu.engine->generation();
    expect(its_.resumed >= its_.durable,
           fmt::format("generation {} was durable, and {} is there", its_.durable, its_.resumed));
    expect(its_.resumed <= kSteps, "a generation that was never made");
    if (its_.resumed > kSteps) return;
    expect(testing::same_params(*cpu.engine, plain_.at[its_.resumed], model_),
           fmt::format("wrong bits of generation {}", its_.resumed));
  }

  const ModelSpec& model_;
  const GpuSettings& settings_;
  const PlainRun& plain_;
  Outcome its_;
};

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

void write_outcome(int pipe, const Outcome& its) {
  std::string text =
      fmt::format("numbers {} {} {} {}\nstruck {}\nerror {}\n", its.calls, its.completions,
                  its.durable, its.resumed, one_line(its.struck), one_line(its.error));
  for (const std::string& problem : its.problems) text += "problem " + one_line(problem) + "\n";
  text += "end\n";
  if (::write(pipe, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(3);
}

Outcome parse_outcome(const std::string& text) {
  Outcome its;
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
struct Tally {
  std::uint64_t cases = 0, struck = 0, threw = 0;
  std::map<std::uint64_t, std::uint64_t> resumed;     ///< how many, by generation
  std::map<std::string, std::uint64_t> by_operation;  ///< that was struck

  void add(const Outcome& its) {
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

class EngineCudaFaults : public ::testing::TestWithParam<GpuSettings> {
 protected:
  Outcome run(const Fault& fault) const {
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
    Outcome its = parse_outcome(text);
    if (!ended) its.problems.push_back(fmt::format("it hangs: no end after {} s", kLimit.count()));
    if (status != 0) its.problems.push_back(fmt::format("status {:#x}", status));
    return its;
  }

  /// A case for each of some n of 1 to `count`: all, or about so many as are asked for; with one of
  /// `errors` after the other.
  void fail_at_each(At at, std::uint64_t count, const std::vector<cudaError_t>& errors) {
    const char* const wanted = std::getenv("ZIGGURAT_FAULTS");
    const std::string tried = wanted != nullptr ? wanted : "16";
    const std::uint64_t most = tried == "all" ? count : std::strtoull(tried.c_str(), nullptr, 10);
    const std::uint64_t stride = std::max<std::uint64_t>(1, count / most);
    Tally tally;
    for (std::uint64_t n = 1; n <= count; n += stride) {
      const cudaError_t error = errors[n / stride % errors.size()];
      const Outcome its = run({at, n, error});
      for (const std::string& problem : its.problems)
        ADD_FAILURE() << cudaGetErrorName(error) << " at " << n << " (" << its.struck
                      << "): " << problem << "\nerror: " << its.error << "\n"
                      << its.logged;
      tally.add(its);
    }
    fmt::print("{}, {} at {} of {} {}: {}\n", GetParam().name, cudaGetErrorName(errors[0]),
               tally.cases, count, at == At::kCall ? "calls" : "completions", tally.text());
    EXPECT_GE(tally.struck * 10, tally.cases * 9) << "the run has become shorter";
    EXPECT_GE(tally.threw * 5, tally.cases) << "much of what fails matters to the engine";
  }

  const ModelSpec model_ = small_model();
  const PlainRun plain_{model_, GetParam(), kSteps};

 private:
  [[noreturn]] void be(const Fault& fault, int pipe) const {
    ::dup2(pipe, STDERR_FILENO);
    cuda_double::add_optimizer_twins();
    cuda_double::run_programs(cuda_double::Programs::kTwins);
    Outcome its;
    try {
      its = Case(model_, GetParam(), plain_).run(fault);
    } catch (const std::exception& error) {
      its.problems.push_back(fmt::format("the store did not open again: {}", error.what()));
    }
    write_outcome(pipe, its);
    ::_exit(0);
  }
};

TEST_P(EngineCudaFaults, AtEachCallAndCompletionEndTheRunAndNothingElse) {
  const Outcome healthy = run({At::kNowhere, 0, cudaSuccess});
  EXPECT_THAT(healthy.problems, ::testing::IsEmpty());
  EXPECT_EQ(healthy.error, "");
  ASSERT_EQ(healthy.resumed, kSteps);
  EXPECT_GT(healthy.calls, 200U);
  EXPECT_GT(healthy.completions, 100U);
  // One call's errors, and those that lose the GPU.
  fail_at_each(At::kCall, healthy.calls,
               {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorNotSupported});
  fail_at_each(At::kCall, healthy.calls, {cudaErrorLaunchFailure, cudaErrorECCUncorrectable});
  fail_at_each(At::kCompletion, healthy.completions,
               {cudaErrorIllegalAddress, cudaErrorECCUncorrectable});
}

INSTANTIATE_TEST_SUITE_P(
    Runs, EngineCudaFaults,
    ::testing::Values(
        GpuSettings{.name = "StateOnDrive", .placement = "params=host,grads=host,optimizer=nvme"},
        GpuSettings{.name = "AllOnDrive", .placement = "params=nvme,grads=nvme,optimizer=nvme"},
        GpuSettings{.name = "Mixed", .placement = "params=nvme,grads=host,optimizer=host"},
        GpuSettings{.name = "AllOnGpu", .placement = "all=device"},
        GpuSettings{.name = "Divided", .placement = "optimizer=device:1MiB,host:512KiB,nvme"}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace ziggurat::testing
