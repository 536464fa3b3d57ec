// SPDX-License-Identifier: Apache-2.0
// core/plan/machines/this_machine.cc: a machine from what was measured on it.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/topology/limits.h"
#include "base/topology/topology.h"
#include "core/plan/machine_profile.h"
#include "core/plan/machines/machine.h"

namespace ziggurat {
namespace {

constexpr double kGiga = 1e9;

double rate_of(const DriveProfile& drive) {
  return drive.sweep_gb_per_s > 0 ? drive.sweep_gb_per_s : drive.mix_gb_per_s;
}

/// Returns the drive that serves the optimizer fastest; none if none was measured.
const DriveProfile* fastest(const MachineProfile& profile) {
  const auto found = std::ranges::max_element(profile.drives, {}, rate_of);
  return found == profile.drives.end() || rate_of(*found) <= 0 ? nullptr : &*found;
}

/// Leaves a part of the cores.
void take_part(Machine& machine, double part) {
  for (double* const rate : {&machine.flops, &machine.fp32_flops, &machine.device_bandwidth,
                             &machine.kernel_bandwidth, &machine.weight_bandwidth})
    *rate *= part;
}

double memory_bytes() {
  double all = 0;
  for (const NumaNode& node : Topology::discover().nodes)
    all += static_cast<double>(node.memory_bytes);
  return std::min(all, static_cast<double>(cgroup_memory().limit_bytes));
}

}  // namespace

Machine machine_of_profile(const MachineProfile& profile, const MachineRoom& room) {
  const bool measured = profile.compute && profile.compute->layer_gflop_per_s > 0 &&
                        profile.compute->attention_gflop_per_s > 0 &&
                        profile.compute->pass_gb_per_s > 0 && profile.compute->copy_gb_per_s > 0;
  if (!measured) {
    throw Error(ErrorCode::kInvalidArgument,
                "this machine has not been measured: `ziggurat profile` says how, or give machine "
                "another name");
  }
  const ComputeProfile& compute = *profile.compute;
  Machine made;
  made.name = "this machine";
  made.figures = fmt::format(
      "measured on {} with {} thread{}, {}: products, passes and copies of its cores, not of a GPU",
      profile.cpu_model, compute.threads, compute.threads == 1 ? "" : "s", compute.measured_at);
  made.one_memory = true;
  made.device_bytes = made.host_bytes = room.memory_bytes;
  made.processors = 1;  // the measured products have been cut into tiles already
  made.flops = compute.layer_gflop_per_s * kGiga;
  made.fp32_flops = compute.layer_fp32_gflop_per_s * kGiga;
  made.threads = static_cast<int>(compute.threads);
  made.device_bandwidth = compute.pass_gb_per_s * kGiga;
  made.link_bandwidth = compute.copy_gb_per_s * kGiga;
  made.host_bandwidth =
      (profile.host_adam_gb_per_s > 0 ? profile.host_adam_gb_per_s : compute.pass_gb_per_s) * kGiga;
  if (const DriveProfile* const drive = fastest(profile)) {
    made.drive_bytes = room.drive_bytes;
    made.drive_bandwidth = rate_of(*drive) * kGiga;
    made.figures += fmt::format("; drive of {}, {}", drive->path, drive->measured_at);
  }
  made.reach.product = 1;
  made.reach.unaligned =
      compute.unaligned_gflop_per_s > 0
          ? std::min(1.0, compute.unaligned_gflop_per_s / compute.layer_gflop_per_s)
          : 1;
  made.reach.stream = made.reach.host = 1;
  made.reach.flash = compute.attention_gflop_per_s / compute.layer_gflop_per_s;
  made.kernel_bandwidth = compute.kernels_gb_per_s * kGiga;
  made.weight_bandwidth = compute.weights_gb_per_s * kGiga;
  // Older profiles have the rate of attention's products alone, of which planning takes half.
  if (compute.kernels_gb_per_s > 0) made.attention_block = kAttentionBlock;
  return made;
}

Machine shared_by(Machine machine, int processes) {
  machine.gpus = processes;
  machine.threads = std::max(1, machine.threads / processes);
  machine.device_bytes /= processes;
  take_part(machine, 1.0 / processes);
  // Each has a thread that copies, until they all copy as fast as memory can be read and written.
  machine.link_bandwidth = std::min(machine.link_bandwidth, machine.device_bandwidth / 2);
  return machine;
}

Machine with_threads(Machine machine, int threads) {
  if (machine.threads <= 0 || threads >= machine.threads) return machine;
  const double part = static_cast<double>(threads) / machine.threads;
  take_part(machine, part);
  machine.host_bandwidth *= part;
  machine.threads = threads;
  return machine;
}

Machine in_fp32(Machine machine) {
  if (machine.fp32_flops <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("how fast {} multiplies fp32 numbers is not known; of this machine "
                            "`ziggurat profile` says how to measure it",
                            machine.name));
  }
  machine.flops = machine.fp32_flops;
  machine.device_bandwidth /= 2;  // kernels compute in fp32 whatever they read, and are as fast
  return machine;
}

Machine this_machine() {
  const MachineProfile profile = read_default_profile().value_or(MachineProfile{});
  MachineRoom room{.memory_bytes = memory_bytes()};
  if (const DriveProfile* const drive = fastest(profile))
    room.drive_bytes = static_cast<double>(filesystem_of(drive->path).available_bytes);
  Machine made = machine_of_profile(profile, room);
  if (const std::string here = Topology::discover().cpu_model; here != profile.cpu_model) {
    made.figures += fmt::format(
        "; but this machine has another CPU, {}: measure it, `ziggurat profile` says how", here);
  }
  return made;
}

}  // namespace ziggurat
