// SPDX-License-Identifier: Apache-2.0
// integrations/cli/profile.cc: `ziggurat profile`, which shows the measured speeds of this machine
// as planning reads them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "base/bytes.h"
#include "base/topology/limits.h"
#include "base/topology/topology.h"
#include "core/plan/machine_profile.h"
#include "integrations/cli/commands.h"

namespace ziggurat::cli {
namespace {

std::string rate(double gb_per_s) {
  return gb_per_s > 0 ? fmt::format("{:.2f}", gb_per_s) : "not measured";
}

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

}  // namespace

int profile(const ProfileCommand& command) {
  const std::string file = command.file.empty() ? default_profile_path() : command.file;
  const std::optional<MachineProfile> known = read_profile(file);
  if (!known) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} does not exist; run `ziggurat bench io --path DIR` to write it", file));
  }
  fmt::print("profile      {}\n", file);
  fmt::print("CPU          {}, Linux {}\n", known->cpu_model, known->kernel);
  if (known->cpu_model != Topology::discover().cpu_model)
    fmt::print("             it was measured on another CPU than this machine's: measure again\n");
  else if (known->kernel != kernel_release())
    fmt::print("             now Linux {}: measure again if it matters\n", kernel_release());
  fmt::print("host AdamW   {} GB/s\n", rate(known->host_adam_gb_per_s));
  if (command.path.empty()) {
    for (const DriveProfile& drive : known->drives) show(drive);
    return 0;
  }
  const std::string path = std::filesystem::absolute(command.path).lexically_normal().string();
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
