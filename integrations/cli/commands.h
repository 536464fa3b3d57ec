// SPDX-License-Identifier: Apache-2.0
// integrations/cli/commands.h: the commands of `ziggurat`. Each returns the program's exit code, or
// throws Error.
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

/// The exit code for an error outside the command line: of a file, a disk, a budget or a store.
inline constexpr int kExitWorld = 1;

/// An error with advice, whose lines are printed below the message.
class AdvisedError : public Error {
 public:
  AdvisedError(const Error& error, std::vector<std::string> advice)
      : Error(error.code(), error.what(), error.native()), advice_(std::move(advice)) {}
  const std::vector<std::string>& advice() const noexcept { return advice_; }

 private:
  std::vector<std::string> advice_;
};

int train(const TrainOptions& options);

/// Describes the ranks of one job to start on this machine, as processes that find each other.
struct LaunchCommand {
  int ranks = 1;           ///< on this machine
  int nodes = 1;           ///< machines in the job, each with `ranks` ranks
  int node = 0;            ///< this machine's number among them, from 0
  std::string rendezvous;  ///< HOST:PORT of node 0; empty for loopback on a single machine
  std::vector<std::string> arguments;  ///< the program, found in PATH, and its arguments
  /// True if the ranks run this program, which takes signals once its main() has begun.
  bool own_ranks = false;
};
/// Starts the ranks and waits until all have ended. Returns the exit code of the first rank that
/// failed (128 plus the signal if one killed it), or 0 if none failed. Rank 0 of the machine has
/// the terminal; output lines of the other ranks begin with their number. When a rank fails, the
/// other ranks have a few seconds to report why and to end. SIGINT, SIGTERM and SIGUSR1 are passed
/// on to every rank. SIGHUP is passed on as SIGTERM, unless SIGHUP was ignored at the start.
int launch(const LaunchCommand& command);

/// Describes the learning rates to show: as a table, or of every step in a JSON file. It takes the
/// settings of `train`.
struct ScheduleCommand {
  ScheduleOptions schedule;
  std::uint64_t steps = 0;
  std::string json_path;  ///< empty to print the table
};
ScheduleCommand read_show_schedule(const Settings& settings);
int show_schedule(const ScheduleCommand& command);

/// Prints every setting in force and where it came from, as a table, or writes them as JSON. It
/// takes the settings of `train`.
int show_config(const Settings& settings);

struct SampleCommand {
  std::string store;  ///< a store, a checkpoint, or a folder of checkpoints
  std::string prompt = "In the beginning";
  std::int64_t bytes = 300;
  double temperature = 0.8;
  std::uint64_t seed = 1;
  std::uint64_t device_bytes = 0;  ///< 0 for as much as the model needs
  std::uint64_t host_bytes = 0;
};
std::span<const SettingOf<SampleCommand>> sample_settings();
SampleCommand read_sample(const Settings& settings);
int sample(const SampleCommand& command);

struct ExportCommand {
  std::string store;  ///< a store, a checkpoint, or a folder of checkpoints
  std::string to;
  DType dtype = DType::kFloat32;
  bool force = false;
};
std::span<const SettingOf<ExportCommand>> export_settings();
ExportCommand read_export(const Settings& settings);
int export_model(const ExportCommand& command);

struct CkptCommand {
  std::vector<std::string> paths;  ///< checkpoints, or folders whose newest checkpoint is meant
  std::optional<std::uint64_t> keep_last;  ///< for prune, which needs it
  std::uint64_t keep_every = 0;
  bool keep_best = false;
  /// For prune: the first digits of a line's id, or "none"; empty for the newest line.
  std::string line;
  /// For to-hf: the type to write. None keeps the types of weights, and writes masters in fp32.
  std::optional<DType> dtype;
  bool force = false;
};
/// Prints what a checkpoint, a store or a weights file holds. Does not read its tensors.
int ckpt_inspect(const CkptCommand& command);
/// Reads every byte and compares it with its hash. Errors: kDataLoss naming the file and the
/// tensor.
int ckpt_verify(const CkptCommand& command);
/// Prints the tensors in which two states differ. Returns exit code 1 if any differs.
int ckpt_diff(const CkptCommand& command);
int ckpt_prune(const CkptCommand& command);
/// Writes the store paths[0] as a checkpoint into the folder paths[1].
int ckpt_save(const CkptCommand& command);
/// Writes the weights of the state paths[0] to the directory paths[1].
int ckpt_to_hf(const CkptCommand& command);
/// Writes the weights paths[0] as a checkpoint of step 0 into the folder paths[1].
int ckpt_from_hf(const CkptCommand& command);

/// Describes how to divide a store again: for `ranks` ranks, with the strategy, the tensor-parallel
/// degree and the host memory of `engine`.
struct ReshardCommand {
  ReshardCommand() { engine.host_budget_bytes = 384 * kMiB; }

  std::string store;
  int ranks = 1;
  EngineConfig engine;
  bool keeps_format = true;  ///< false if the format of `engine` replaces the store's
};
std::span<const SettingOf<ReshardCommand>> reshard_settings();
ReshardCommand read_reshard(const Settings& settings, std::string store);
int ckpt_reshard(const ReshardCommand& command);

int doctor(const std::vector<std::string>& paths);
/// Runs `doctor --train`: replaces this process by the Python package's check, which trains with
/// PyTorch.
int doctor_train(const std::vector<std::string>& paths);

struct BenchIoCommand {
  measure::BenchOptions options;
  std::string json_path;
  std::string report_path;
  std::string profile_path;  ///< empty if the profile is not updated
};
std::span<const Setting> bench_io_settings();
BenchIoCommand read_bench_io(const Settings& settings, std::vector<std::string> paths);
int bench_io(const BenchIoCommand& command);
/// Makes SIGINT and SIGTERM end the process with a word; what measures leaves no files behind.
void end_at_signals();

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
  std::string back_ends;  ///< names, separated by commas
  std::string json_path;  ///< empty: none
};
std::span<const Setting> bench_collectives_settings();
BenchCollectivesCommand read_bench_collectives(const Settings& settings);
int bench_collectives(const BenchCollectivesCommand& command);

struct ProfileCommand {
  std::string file;      ///< empty: the default
  std::string path;      ///< empty: all; with `measure` the folder whose drive is measured
  bool measure = false;  ///< measure first, and write the file
  double seconds = 1;    ///< of each figure
  std::uint64_t size_bytes = kGiB;  ///< of the file on the drive
};
/// Shows the profile. With `measure` it first measures cores and drive, and writes each to the file
/// as it is known.
int profile(const ProfileCommand& command);

}  // namespace ziggurat::cli
