// SPDX-License-Identifier: Apache-2.0
// integrations/c/simulated_steps.cc: reads a recording, and asks core/rehearsal/lent_rehearsal.h.
#include "integrations/c/simulated_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/plan/machine_profile.h"
#include "core/plan/machines/machine.h"
#include "core/rehearsal/lent_rehearsal.h"
#include "core/rehearsal/rehearsed_training.h"
#include "integrations/c/measured_drives.h"
#include "integrations/c/wrong.h"

namespace ziggurat {
namespace {

using nlohmann::json;
using Kind = LentEvent::Kind;

/// The first steps fill memory, and make the store.
constexpr int kWarm = 3;
constexpr int kSteps = kWarm + 4;
constexpr double kMostSeconds = 1e6;
constexpr std::uint64_t kMostThreads = 4096;
/// In bytes a second. With less the clock of a large model's steps, in nanoseconds, overflows.
constexpr double kSlowestDrive = 1000;
/// The part of AdamW's measured rate that updates of 8-bit states reach, whose arithmetic takes
/// longer than their bytes (bench/results/optimizer_zen5-2vcpu_202611.md).
constexpr double kReachOf8Bit = 0.26;

constexpr std::array<std::string_view, 5> kKeys{"events", "fp32_gradients", "update_at_once",
                                                "drive_bytes_per_s", "threads"};
constexpr std::array kKinds{
    std::pair{"compute", Kind::kCompute},   std::pair{"acquire", Kind::kAcquire},
    std::pair{"release", Kind::kRelease},   std::pair{"wait", Kind::kWait},
    std::pair{"gradient", Kind::kGradient}, std::pair{"add_gradient", Kind::kAddGradient},
    std::pair{"step", Kind::kStep}};

std::uint32_t number_of(const json& given, const char* what) {
  if (given.is_number_unsigned() && given.get<std::uint64_t>() < (std::uint64_t{1} << 31))
    return given.get<std::uint32_t>();
  throw wrong(fmt::format("recording: {} must be a whole number from 0 on", what));
}

LentEvent event_of(const json& given) {
  if (!given.is_array() || given.empty() || given.size() > 3 || !given[0].is_string())
    throw wrong("recording: each event must be an array that begins with its name");
  const auto name = given[0].get<std::string>();
  const auto* const found = std::ranges::find(kKinds, name, &std::pair<const char*, Kind>::first);
  if (found == kKinds.end()) throw wrong(fmt::format("recording: unknown event \"{}\"", name));
  LentEvent event{.kind = found->second};
  const bool computes = event.kind == Kind::kCompute;
  const std::size_t least = event.kind == Kind::kStep ? 1 : 2;
  if (given.size() < least || given.size() > least + (computes ? 1 : 0))
    throw wrong(fmt::format("recording: an event \"{}\" has {} values: see ziggurat_simulate()",
                            name, given.size() - 1));
  if (!computes) {
    if (least == 2) event.of = number_of(given[1], "a unit or parameter");
    return event;
  }
  event.seconds = given[1].is_number() ? given[1].get<double>() : -1;
  if (!(event.seconds >= 0 && event.seconds < kMostSeconds))
    throw wrong("recording: \"compute\" must have seconds from 0 on");
  if (given.size() == 3) event.threads = number_of(given[2], "the threads of \"compute\"");
  return event;
}

bool truth_of(const json& all, const char* key) {
  const auto found = all.find(key);
  if (found == all.end()) return false;
  if (!found->is_boolean())
    throw wrong(fmt::format("recording: \"{}\" must be true or false", key));
  return found->get<bool>();
}

json read_recording(std::string_view text) {
  json all = json::parse(text, nullptr, false);
  if (!all.is_object() || !all.contains("events") || !all["events"].is_array())
    throw wrong("recording: the text must be a JSON object with an array \"events\"");
  for (const auto& [key, value] : all.items()) {
    if (std::ranges::find(kKeys, key) == kKeys.end())
      throw wrong(fmt::format("recording: unknown key \"{}\"", key));
  }
  return all;
}

/// Fills in what a trainer has recorded.
void take_recording(const json& all, LentRehearsal& request) {
  for (const json& event : all["events"]) request.events.push_back(event_of(event));
  if (truth_of(all, "fp32_gradients")) request.gradients = DType::kFloat32;
  request.update_at_once = truth_of(all, "update_at_once");
}

/// Returns the bytes a second of the store's drive: as a trainer says, or as they were measured.
double rate_for(const json& recording, const EmbeddedConfig& config) {
  const auto found = recording.find("drive_bytes_per_s");
  if (found == recording.end()) return measured_rate(config.store);
  if (!found->is_number() || !(found->get<double>() >= kSlowestDrive))
    throw wrong(fmt::format("recording: \"drive_bytes_per_s\" must be at least {}", kSlowestDrive));
  return found->get<double>();
}

/// Returns how many workers the runtime has; 0 for as many as cores.
int threads_of(const json& recording) {
  const auto found = recording.find("threads");
  if (found == recording.end()) return 0;
  const std::uint32_t threads = number_of(*found, "\"threads\"");
  if (threads == 0 || threads > kMostThreads)
    throw wrong(fmt::format("recording: \"threads\" must be from 1 to {}", kMostThreads));
  return static_cast<int>(threads);
}

/// Returns this machine with the drive that the store is on, and so many workers.
RehearsedMachine machine_for(const EmbeddedConfig& config, double rate, int threads) {
  Machine machine = this_machine();
  const int cores = std::max(1, machine.threads);
  if (threads == 0) threads = cores;
  if (!config.store.empty()) {
    if (rate <= 0)
      throw wrong(fmt::format("the drive of {} has not been measured: `ziggurat profile` says how",
                              config.store.front().path));
    machine.drive_bandwidth = rate;
  } else if (machine.drive_bandwidth <= 0) {
    machine.drive_bandwidth = 1e9;  // of a drive on which there is nothing
  }
  if (config.optimizer.state.format == StateFormat::k8Bit) machine.host_bandwidth *= kReachOf8Bit;
  // AdamW is measured on all cores, and on records that a large cache may hold; a step passes over
  // all of them. So a few workers are as fast as their cores, and all no faster than memory.
  const int at_once = std::min(threads, cores);
  machine.host_bandwidth =
      std::min(machine.host_bandwidth * at_once / cores, machine.device_bandwidth);
  // What more workers than cores have each is what they would have alone on a core.
  machine.host_bandwidth *= static_cast<double>(threads) / at_once;
  machine.drive_bytes = 0;  // whether there is room is another question
  RehearsedMachine its =
      rehearsed_machine(machine, {.threads = threads, .device_bytes = config.device_bytes});
  its.workers.cores = static_cast<std::size_t>(cores);
  return its;
}

double sum_of(const RehearsedRank& rank, double RehearsedStep::*part) {
  double sum = 0;
  for (int i = kWarm; i < kSteps - 1; ++i) sum += rank.steps[static_cast<std::size_t>(i)].*part;
  return sum;
}

json mean_step(const RehearsedRank& rank, const RehearsedMachine& machine) {
  constexpr double kCount = kSteps - 1 - kWarm;  // the last one's end is not that of a usual step
  const auto moved = [&](Counter counter) {
    double sum = 0;
    for (int i = kWarm; i < kSteps - 1; ++i)
      sum += static_cast<double>(rank.steps[static_cast<std::size_t>(i)].counted(counter));
    return sum / kCount;
  };
  const double seconds = (rank.steps[kSteps - 1].began_s - rank.steps[kWarm].began_s) / kCount;
  const double read = moved(Counter::kNvmeReadBytes);
  const double written = moved(Counter::kNvmeWriteBytes);
  return {{"seconds", seconds},
          {"compute_s", sum_of(rank, &RehearsedStep::compute_s) / kCount},
          {"params_s", sum_of(rank, &RehearsedStep::acquire_s) / kCount},
          {"gradients_s", sum_of(rank, &RehearsedStep::gradient_s) / kCount},
          {"step_s", sum_of(rank, &RehearsedStep::step_s) / kCount},
          {"copies_busy_s",
           moved(Counter::kHostToDeviceBytes) / machine.device.to_device.bytes_per_second},
          {"update_busy_s", sum_of(rank, &RehearsedStep::workers_busy_s) / kCount /
                                static_cast<double>(machine.workers.threads)},
          {"drive_busy_s", read / machine.drive.read_bytes_per_second +
                               written / machine.drive.write_bytes_per_second},
          {"read_bytes", read},
          {"written_bytes", written},
          {"workers", machine.workers.threads}};
}

}  // namespace

std::string simulated_steps_json(const std::vector<EmbeddedParam>& params, EmbeddedConfig config,
                                 std::string_view recording) {
  if (!config.wholes.empty() || config.device != 0)
    throw wrong(
        "ziggurat_simulate() plays one rank in host memory: leave out \"wholes\" and \"device\"");
  LentRehearsal request{.model = embedded_model(params, config)};
  const json recorded = read_recording(recording);
  take_recording(recorded, request);
  config.blob_bytes_max = kTrainerBlobBytes;
  config.counts_steps = true;
  take_measured(config.store);
  request.machine = machine_for(config, rate_for(recorded, config), threads_of(recorded));
  request.config = std::move(config);
  request.steps = kSteps;
  return mean_step(rehearse_lent(request), request.machine).dump();
}

}  // namespace ziggurat
