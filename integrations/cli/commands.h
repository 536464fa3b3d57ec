// SPDX-License-Identifier: Apache-2.0
// integrations/cli/commands.h: what `ziggurat` can do. Each returns the exit code, or throws Error.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/error.h"
#include "integrations/cli/settings.h"
#include "integrations/cli/train_options.h"
#include "integrations/measure/optimizer_suite.h"
#include "integrations/measure/suite.h"

namespace ziggurat::cli {

/// A file, a disk, a budget, a store.
inline constexpr int kExitWorld = 1;

/// An error with what to do about it: the lines are printed below the message.
class AdvisedError : public Error {
 public:
  AdvisedError(const Error& error, std::vector<std::string> advice)
      : Error(error.code(), error.what(), error.native()), advice_(std::move(advice)) {}
  const std::vector<std::string>& advice() const noexcept { return advice_; }

 private:
  std::vector<std::string> advice_;
};

int train(const TrainOptions& options);

/// Ranks of one job on this machine, as processes that find each other.
struct LaunchCommand {
  int ranks = 1;                       ///< on this machine
  int nodes = 1;                       ///< machines with as many each
  int node = 0;                        ///< which of them this is
  std::string rendezvous;              ///< HOST:PORT of node 0; empty: loopback, with one node
  std::vector<std::string> arguments;  ///< the program, found in PATH, and what it is told
  bool own_ranks = false;  ///< it is this program, which takes signals from its main() on
};
/// Exit code of the first rank that failed (128 and its signal where one killed it), 0 if none did.
/// Rank 0 of the machine has the terminal; lines of the others bear their number. When a rank
/// fails, the rest have 6 s to say why and end. SIGINT, SIGTERM and SIGUSR1 are passed on to every
/// rank, SIGHUP as SIGTERM, unless it was ignored at the start.
int launch(const LaunchCommand& command);

/// A table, or a JSON file of every step. Takes the settings of `train`.
struct ScheduleCommand {
  ScheduleOptions schedule;
  std::uint64_t steps = 0;
  std::string json_path;  ///< empty: the table
};
ScheduleCommand read_show_schedule(const Settings& settings);
int show_schedule(const ScheduleCommand& command);

/// Every setting in force and where it came from: a table, or JSON. Takes the settings of `train`.
int show_config(const Settings& settings);

struct SampleCommand {
  std::string store;  ///< or a checkpoint, or a folder of them
  std::string prompt = "In the beginning";
  std::int64_t bytes = 300;
  double temperature = 0.8;
  std::uint64_t seed = 1;
  std::uint64_t device_bytes = 0;  ///< 0: what it needs
  std::uint64_t host_bytes = 0;
};
std::span<const SettingOf<SampleCommand>> sample_settings();
SampleCommand read_sample(const Settings& settings);
int sample(const SampleCommand& command);

struct ExportCommand {
  std::string store;  ///< or a checkpoint, or a folder of them
  std::string to;
  DType dtype = DType::kFloat32;
  bool force = false;
};
std::span<const SettingOf<ExportCommand>> export_settings();
ExportCommand read_export(const Settings& settings);
int export_model(const ExportCommand& command);

struct CkptCommand {
  std::vector<std::string> paths;  ///< checkpoints, or folders of which the newest one is meant
  std::uint64_t keep_last = 0;     ///< prune
  std::uint64_t keep_every = 0;
  bool keep_best = false;
  std::string line;            ///< prune: an id's first digits, or "none"; empty: the newest line
  std::optional<DType> dtype;  ///< to-hf; none: as it is, masters in fp32
  bool force = false;
};
/// What it holds, by its manifest alone.
int ckpt_inspect(const CkptCommand& command);
/// Reads and compares every byte. Errors: kDataLoss naming the file and the tensor.
int ckpt_verify(const CkptCommand& command);
/// The tensors in which two differ: exit code 1 if any does.
int ckpt_diff(const CkptCommand& command);
int ckpt_prune(const CkptCommand& command);
/// The store paths[0], as a checkpoint in the folder paths[1].
int ckpt_save(const CkptCommand& command);
/// paths[0], to the directory paths[1].
int ckpt_to_hf(const CkptCommand& command);
/// The weights paths[0], as a checkpoint of step 0 in the folder paths[1].
int ckpt_from_hf(const CkptCommand& command);

/// For `ranks` ranks, as a run with `engine`'s strategy, degree and budget has them.
struct ReshardCommand {
  ReshardCommand() { engine.host_budget_bytes = 384 * kMiB; }

  std::string store;
  int ranks = 1;
  EngineConfig engine;
  bool keeps_format = true;  ///< else engine's
};
std::span<const SettingOf<ReshardCommand>> reshard_settings();
ReshardCommand read_reshard(const Settings& settings, std::string store);
int ckpt_reshard(const ReshardCommand& command);

int doctor(const std::vector<std::string>& paths);
/// `doctor --train`: becomes the Python package's check, which trains with PyTorch.
int doctor_train(const std::vector<std::string>& paths);

struct BenchIoCommand {
  measure::BenchOptions options;
  std::string json_path;
  std::string report_path;
  std::string profile_path;  ///< empty: leave the profile alone
};
std::span<const Setting> bench_io_settings();
BenchIoCommand read_bench_io(const Settings& settings, std::vector<std::string> paths);
int bench_io(const BenchIoCommand& command);

struct BenchOptimizerCommand {
  measure::OptimizerBenchOptions options;
  std::string json_path;
};
std::span<const Setting> bench_optimizer_settings();
BenchOptimizerCommand read_bench_optimizer(const Settings& settings);
int bench_optimizer(const BenchOptimizerCommand& command);

struct BenchCollectivesCommand {
  int ranks = 2;
  std::uint64_t largest_bytes = 0;
  int rounds = 7;
  std::string back_ends;  ///< names, with commas between
  std::string json_path;  ///< empty: none
};
std::span<const Setting> bench_collectives_settings();
BenchCollectivesCommand read_bench_collectives(const Settings& settings);
int bench_collectives(const BenchCollectivesCommand& command);

struct ProfileCommand {
  std::string file;  ///< empty: the default
  std::string path;  ///< empty: all
};
int profile(const ProfileCommand& command);

}  // namespace ziggurat::cli
