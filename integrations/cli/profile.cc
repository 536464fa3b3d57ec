// SPDX-License-Identifier: Apache-2.0
// integrations/cli/profile.cc: `ziggurat profile`, which shows the measured speeds of this machine
// as planning reads them, and measures them with --measure.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>

#include "base/bytes.h"
#include "base/error.h"
#include "base/topology/limits.h"
#include "base/topology/topology.h"
#include "core/engine/runtime.h"
#include "core/plan/machine_profile.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/flag_words.h"
#include "integrations/gpt/core_rates.h"
#include "integrations/measure/result_json.h"

namespace ziggurat::cli {
namespace {

std::string rate(double per_s) { return per_s > 0 ? fmt::format("{:.2f}", per_s) : "not measured"; }

void show(const DriveProfile& drive) {
  fmt::print("{}\n", drive.path);
  fmt::print("  {:<12} {} on {}\n", "drive", drive.filesystem, drive.device);
  fmt::print("  {:<12} read {}, write {}, mix {}, sweep {}\n", "GB/s", rate(drive.read_gb_per_s),
             rate(drive.write_gb_per_s), rate(drive.mix_gb_per_s), rate(drive.sweep_gb_per_s));
  fmt::print("  {:<12} {} transfers of {}: {}\n", "in flight", drive.queue_depth,
             format_bytes(drive.block_bytes), format_bytes(drive.outstanding_bytes()));
  fmt::print("  {:<12} {}, by {}\n", "measured", drive.measured_at, drive.engine);
  if (!drive.flags.empty()) fmt::print("  {:<12} {}\n", "doubts", fmt::join(drive.flags, ", "));
}

void show(const std::optional<ComputeProfile>& compute) {
  if (!compute) {
    fmt::print("cores        not measured: `ziggurat profile --measure` does it\n");
    return;
  }
  fmt::print("cores        {} thread{}, {}\n", compute->threads, compute->threads == 1 ? "" : "s",
             compute->measured_at);
  fmt::print("  {:<12} of a layer {}, with unaligned sides {}, of attention {}\n", "GFLOP/s, bf16",
             rate(compute->layer_gflop_per_s), rate(compute->unaligned_gflop_per_s),
             rate(compute->attention_gflop_per_s));
  fmt::print("  {:<12} of a layer {}\n", "GFLOP/s, fp32", rate(compute->layer_fp32_gflop_per_s));
  const bool takes_none = compute->weights_gb_per_s <= 0 && compute->kernels_gb_per_s > 0;
  fmt::print("  {:<13} weights {}, a layer beside products {}\n", "GB/s",
             takes_none ? "take no time of their own" : rate(compute->weights_gb_per_s),
             rate(compute->kernels_gb_per_s));
  fmt::print("  {:<13} passes over memory {}, a copy by one thread {}\n", "GB/s",
             rate(compute->pass_gb_per_s), rate(compute->copy_gb_per_s));
}

std::string absolute(const std::string& path) {
  return std::filesystem::absolute(path).lexically_normal().string();
}

/// Refuses before anything is measured what could not be measured in the end.
void require_measurable(const ProfileCommand& command, const std::string& folder) {
  if (!std::filesystem::is_directory(folder)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is no directory, so no drive can be measured there: give `path` "
                            "one that exists",
                            folder));
  }
  if (command.size_bytes < measure::kSmallestFileBytes) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("`size={}` is too small to measure a drive with: give at least {}",
                    exact_bytes(command.size_bytes), exact_bytes(measure::kSmallestFileBytes)));
  }
  if (!std::isfinite(command.seconds))
    throw Error(ErrorCode::kInvalidArgument, "`seconds` must be a number from 0.05 to 60");
}

/// Measures the cores, then the drive of `folder`. Each is written when it is known.
void measure_machine(const ProfileCommand& command, const std::string& file,
                     const std::string& folder) {
  require_measurable(command, folder);
  end_at_signals();
  Console console;
  const measure::Progress progress{[&](const std::string& text) { console.line(text); },
                                   [&](const std::string& text) { console.live(text); }};
  MachineProfile profile = read_profile(file).value_or(MachineProfile{});
  {
    const std::unique_ptr<Runtime> runtime = Runtime::create({});
    console.line("Measures products, layers, passes and copies of the cores");
    profile.compute = gpt::measure_cores(*runtime->workers, command.seconds);
    profile.cpu_model = runtime->topology.cpu_model;
    profile.kernel = kernel_release();
    write_profile(profile, file);
  }
  measure::BenchOptions options;
  options.paths = {folder};
  options.size_bytes = command.size_bytes / kMiB * kMiB;
  options.seconds = command.seconds;
  options.block_bytes = 4 * kMiB;  // as `bench io` has it
  options.with_fio = false;
  options.model = {"1B", 1e9, 32};
  write_profile(measure::updated_profile(std::move(profile), measure::run_bench(options, progress)),
                file);
}

}  // namespace

int profile(const ProfileCommand& command) {
  const std::string file = command.file.empty() ? default_profile_path() : command.file;
  const std::string path = command.path.empty() ? "" : absolute(command.path);
  if (command.measure) measure_machine(command, file, path.empty() ? absolute(".") : path);
  const std::optional<MachineProfile> known = read_profile(file);
  if (!known) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not exist; run `ziggurat profile --measure` to write it, or "
                            "`ziggurat bench io --path DIR` for a drive alone",
                            file));
  }
  fmt::print("profile      {}\n", file);
  fmt::print("CPU          {}, Linux {}\n", known->cpu_model, known->kernel);
  if (known->cpu_model != Topology::discover().cpu_model)
    fmt::print("             it was measured on another CPU than this machine's: measure again\n");
  else if (known->kernel != kernel_release())
    fmt::print("             now Linux {}: measure again if it matters\n", kernel_release());
  show(known->compute);
  fmt::print("host AdamW   {} GB/s\n", rate(known->host_adam_gb_per_s));
  if (path.empty()) {
    for (const DriveProfile& drive : known->drives) show(drive);
    return 0;
  }
  const DriveProfile* const drive = known->find(path);
  if (drive == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has no figures for the drive of {}; run `ziggurat bench io --path "
                            "{}` to measure it",
                            file, path, path));
  }
  show(*drive);
  return 0;
}

}  // namespace ziggurat::cli
