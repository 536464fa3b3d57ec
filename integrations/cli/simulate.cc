// SPDX-License-Identifier: Apache-2.0
// integrations/cli/simulate.cc: `ziggurat simulate`, which plays the engine in virtual time and
// shows each step beside the plan's figure, as tables or JSON.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "core/plan/strategies/step_time.h"
#include "core/rehearsal/rehearsal_faults.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/simulate_options.h"

namespace ziggurat::cli {
namespace {

/// A resource that takes nearly a whole step binds it; if none does, the step waits in turns.
constexpr double kBinds = 0.9;

std::string in_gb(double bytes) {
  return fmt::format("{:.{}f}", bytes / 1e9, bytes < 99.95e9 ? 2 : 1);
}

/// What a step used of something that can be busy.
struct Used {
  std::string what;
  double bytes = 0;
  double busy_s = 0;
};

/// A step as it is shown.
struct Shown {
  double seconds = 0;  ///< to the next step's begin; the last one's, until all is durable
  std::vector<Used> used;

  const Used& busiest() const { return *std::ranges::max_element(used, {}, &Used::busy_s); }
  std::string bound() const {
    const Used& most = busiest();
    const double part = seconds > 0 ? most.busy_s / seconds : 0;
    return fmt::format("{}{}, {:.0f} % busy", part >= kBinds ? "" : "waits in turns; ", most.what,
                       100 * part);
  }
};

Shown shown(const SimulateCommand& command, const RehearsedRank& rank, std::size_t index) {
  const RehearsedStep& step = rank.steps[index];
  const RehearsedMachine& machine = command.request.machine;
  const NetworkShape& network = machine.network;
  const double in_node = std::min(network.ranks, network.ranks_per_node);
  const auto bytes = [&](Counter counter) { return static_cast<double>(step.counted(counter)); };
  Shown its;
  its.seconds = index + 1 < rank.steps.size() ? rank.steps[index + 1].began_s - step.began_s
                                              : step.seconds + rank.durable_s;
  its.used.push_back(
      {machine.workers_compute ? "the cores' compute" : "the GPU's compute", 0, step.compute_s});
  const auto link = [&](const char* what, double moved, double per_second) {
    its.used.push_back({what, moved, moved / per_second});
  };
  link("copies from host to GPU", bytes(Counter::kHostToDeviceBytes),
       machine.device.to_device.bytes_per_second);
  link("copies from GPU to host", bytes(Counter::kDeviceToHostBytes),
       machine.device.to_host.bytes_per_second);
  its.used.push_back({"host memory, in jobs", bytes(Counter::kOptimizerBytes),
                      step.workers_busy_s / static_cast<double>(machine.workers.threads)});
  const double read = bytes(Counter::kNvmeReadBytes);
  const double written = bytes(Counter::kNvmeWriteBytes);
  its.used.push_back({"the node's drives", read + written,
                      in_node * (read / machine.drive.read_bytes_per_second +
                                 written / machine.drive.write_bytes_per_second)});
  if (network.ranks > 1)
    link("the network within the node", static_cast<double>(step.sent_in_node),
         network.within_node.bytes_per_s);
  if (network.ranks > network.ranks_per_node)
    link("the network to other nodes", static_cast<double>(step.sent_to_nodes),
         network.between_nodes.bytes_per_s / in_node);
  return its;
}

/// Returns the mean of all steps. What a step leaves to be written is moved in later ones, and the
/// last one waits for all of it, so that no single step has a share of its own.
Shown mean_of(const std::vector<Shown>& steps) {
  Shown mean = steps.front();
  for (std::size_t i = 1; i < steps.size(); ++i) {
    mean.seconds += steps[i].seconds;
    for (std::size_t at = 0; at < mean.used.size(); ++at) {
      mean.used[at].bytes += steps[i].used[at].bytes;
      mean.used[at].busy_s += steps[i].used[at].busy_s;
    }
  }
  const auto count = static_cast<double>(steps.size());
  mean.seconds /= count;
  for (Used& used : mean.used) {
    used.bytes /= count;
    used.busy_s /= count;
  }
  return mean;
}

std::string played_text(const SimulateCommand& command) {
  const int ranks = command.job.gpus;
  if (ranks == 1) return "One rank is played.";
  if (!command.request.mirrored) return fmt::format("All {} ranks are played.", ranks);
  return fmt::format(
      "Rank 0 is played. The other {} are taken to do the same at the same time; what they send is "
      "counted by closed forms, and rank 0 has an equal share of its node's drives and memory.",
      ranks - 1);
}

std::string note_on_network(const SimulateCommand& command) {
  if (command.request.machine.network.route == Route::kRing)
    return "Ranks exchange in rings over the links between GPUs, as with NCCL.";
  return "Ranks exchange through host memory and sockets, each with each; --collectives nccl uses "
         "the links between GPUs.";
}

void print_opening(Console& console, const SimulateCommand& command) {
  const RehearsalRequest& request = command.request;
  const Machine& machine = command.job.machine;
  console.line(fmt::format(
      "{}: {:.4g} billion parameters in {} units; {} rank{} on {}, {} to a "
      "node; {}",
      request.model.name, static_cast<double>(request.model.count()) / 1e9,
      request.model.units.size(), command.job.gpus, command.job.gpus == 1 ? "" : "s", machine.name,
      request.machine.network.ranks_per_node, to_string(command.strategy)));
  console.line(fmt::format(
      "{} micro-batch{} of {} x {} tokens a step; {}; device memory {}, host memory {} a rank; {} "
      "chunks a rank",
      command.training.micro_batches, command.training.micro_batches == 1 ? "" : "es",
      command.training.micro_batch, command.training.sequence, to_string(request.config.placement),
      format_bytes(request.machine.device.memory_bytes),
      format_bytes(request.config.host_budget_bytes), command.plan.chunk_count));
  if (!command.chosen.empty()) console.line(command.chosen);
  console.line(played_text(command));
  if (command.job.gpus > 1) console.line(note_on_network(command));
}

void print_steps(Console& console, const RehearsedRank& rank, const std::vector<Shown>& steps) {
  console.line(fmt::format("\n{:>4}  {:>9}  {:>9}  {:>9}  {:>9}  {:>8}  {:>8}  {}", "step",
                           "time s", "params s", "grads s", "step() s", "GPU GB", "host GB",
                           "bound by"));
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const RehearsedStep& step = rank.steps[i];
    console.line(fmt::format("{:>4}  {:>9.4g}  {:>9.4g}  {:>9.4g}  {:>9.4g}  {:>8}  {:>8}  {}",
                             i + 1, steps[i].seconds, step.acquire_s, step.gradient_s, step.step_s,
                             in_gb(static_cast<double>(step.device_peak_bytes)),
                             in_gb(static_cast<double>(step.host_peak_bytes)), steps[i].bound()));
  }
  console.line(
      "time: to the next step's begin, the last one's until all steps are durable. params, grads, "
      "step(): the trainer waits for parameters, to hand gradients over, and inside step(). GPU "
      "and host: peaks of rank 0 so far.");
}

void print_links(Console& console, const Shown& mean, std::size_t steps) {
  console.line(fmt::format("\nA step of rank 0, the mean of {}: {:.4g} s, bound by {}", steps,
                           mean.seconds, mean.bound()));
  for (const Used& used : mean.used) {
    const double part = mean.seconds > 0 ? 100 * used.busy_s / mean.seconds : 0;
    console.line(fmt::format("  {:<28} {:>10}    busy {:>5.1f} %", used.what,
                             used.bytes > 0 ? in_gb(used.bytes) + " GB" : "-", part));
  }
}

void print_plan(Console& console, const SimulateCommand& command, const RehearsedRank& rank,
                double seconds) {
  const StepTime time = step_time(command.training, command.computing);
  console.line(fmt::format(
      "\nBeside the plan: a step takes {:.4g} s here and {:.4g} s by `ziggurat plan`'s formulas, "
      "{:+.1f} %; no schedule is faster than {:.4g} s ({}).",
      seconds, time.seconds, 100 * (seconds / time.seconds - 1), time.bound, time.binds));
  for (const TimeLine& line : time.lines)
    console.line(fmt::format("  {:<40} {:>9.4g} s", line.what, line.seconds));
  const auto planned = static_cast<double>(command.plan.device.peak_bytes());
  const auto peak = static_cast<double>(rank.device.peak_bytes());
  // The trainer's own memory is set aside, but no engine allocates it here.
  const auto trainer = static_cast<double>(command.plan.device.trainer_bytes);
  console.line(fmt::format(
      "Device memory: {} GB at the peak here beside {} GB of the trainer, {} GB planned in all.",
      in_gb(peak), in_gb(trainer), in_gb(planned)));
}

nlohmann::json json_of(const Shown& shown, const RehearsedStep& step) {
  nlohmann::json used = nlohmann::json::array();
  for (const Used& one : shown.used)
    used.push_back({{"what", one.what}, {"bytes", one.bytes}, {"busy_s", one.busy_s}});
  nlohmann::json counters;
  for (std::size_t i = 0; i < step.counters.size(); ++i)
    counters[std::string(to_string(static_cast<Counter>(i)))] = step.counters[i];
  return {{"seconds", shown.seconds},
          {"compute_s", step.compute_s},
          {"waits_params_s", step.acquire_s},
          {"waits_gradients_s", step.gradient_s},
          {"in_step_s", step.step_s},
          {"generation", step.generation},
          {"bound_by", shown.busiest().what},
          {"device_peak_bytes", step.device_peak_bytes},
          {"host_peak_bytes", step.host_peak_bytes},
          {"sent_same_node_bytes", step.sent_in_node},
          {"sent_other_nodes_bytes", step.sent_to_nodes},
          {"used", std::move(used)},
          {"counters", std::move(counters)}};
}

void write_json(const SimulateCommand& command, const RehearsedRank& rank,
                const std::vector<Shown>& steps) {
  nlohmann::json all = nlohmann::json::array();
  for (std::size_t i = 0; i < steps.size(); ++i) all.push_back(json_of(steps[i], rank.steps[i]));
  const StepTime time = step_time(command.training, command.computing);
  const Shown mean = mean_of(steps);
  const nlohmann::json report{{"model", command.request.model.name},
                              {"parameters", command.request.model.count()},
                              {"machine", command.job.machine.name},
                              {"ranks", command.job.gpus},
                              {"ranks_played", command.request.mirrored ? 1 : command.job.gpus},
                              {"strategy", to_string(command.strategy)},
                              {"placement", to_string(command.request.config.placement)},
                              {"steps", std::move(all)},
                              {"seconds", mean.seconds},
                              {"bound_by", mean.busiest().what},
                              {"planned_seconds", time.seconds},
                              {"planned_bound_s", time.bound},
                              {"planned_device_bytes", command.plan.device.peak_bytes()}};
  write_output(command.json_path, report.dump(2) + "\n");
}

/// Plays the run with what the seed draws. Returns the exit code.
int simulate_faults(Console& console, const SimulateCommand& command) {
  console.line(
      fmt::format("\nPlaying without faults, then with those of seed {}.", *command.faults));
  const FaultCampaign campaign(command.request);
  const FaultReport report = campaign.play(*command.faults);
  for (const std::string& fault : report.faults) console.line("  " + fault);
  if (report.ended_with.empty()) {
    console.line(fmt::format("The run trained to its end, generation {}.", report.generation));
  } else {
    console.line(
        fmt::format("The run ended after generation {}: {}", report.generation, report.ended_with));
  }
  if (!report.did_not_open.empty()) {
    console.line("Opened again, the engine refuses what is left: " + report.did_not_open);
  } else if (report.broken.empty()) {
    console.line(
        fmt::format("Opened again, the engine goes on from generation {}.", report.went_on_from));
  }
  console.line(
      fmt::format("{} events; the history of the seed is {:016x}.", report.events, report.history));
  if (report.broken.empty()) {
    console.line("Everything that must hold does.");
    return 0;
  }
  for (const std::string& broken : report.broken)
    console.line(fmt::format("seed {}: broken: {}", report.seed, broken));
  return kExitWorld;
}

}  // namespace

int simulate(const SimulateCommand& command) {
  Console console;
  print_opening(console, command);
  if (command.faults) return simulate_faults(console, command);
  RehearsalRequest request = command.request;
  const auto begun = std::chrono::steady_clock::now();
  request.progress = [&](std::uint64_t done, std::uint64_t of) {
    if (std::chrono::steady_clock::now() - begun < std::chrono::seconds(2)) return;
    console.live(fmt::format("played {:.0f} % of {} steps",
                             100.0 * static_cast<double>(done) / static_cast<double>(of),
                             request.steps));
  };
  request.config.progress = [&](const char* what, std::uint64_t done, std::uint64_t total) {
    console.progress(what, done, total);
  };
  const RehearsedRank rank = rehearse(request).front();
  std::vector<Shown> steps;
  for (std::size_t i = 0; i < rank.steps.size(); ++i) steps.push_back(shown(command, rank, i));
  print_steps(console, rank, steps);
  const Shown mean = mean_of(steps);
  print_links(console, mean, steps.size());
  print_plan(console, command, rank, mean.seconds);
  if (!request.trace_path.empty())
    console.line(fmt::format("The trace is in {}; ui.perfetto.dev opens it.", request.trace_path));
  if (!command.json_path.empty()) write_json(command, rank, steps);
  return console.whole() ? 0 : 1;
}

}  // namespace ziggurat::cli
