// SPDX-License-Identifier: Apache-2.0
// integrations/cli/main.cc: `ziggurat`: commands, flags, and the one place where errors become a
// line and an exit code.
//
// Exit codes: 0 done; 1 the world (a file, a disk, a budget, a store); 2 the command line or the
// settings file; 130 Ctrl-C.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/rank_options.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/plan_options.h"
#include "integrations/cli/settings.h"
#include "integrations/cli/store_paths.h"

namespace ziggurat::cli {
namespace {

constexpr int kExitWorld = 1;
constexpr int kExitUsage = 2;

/// One line whatever the message holds: a path or a key may have control characters in it.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

/// The flags of one command, collected as text; Settings decides what they mean.
struct Flags {
  std::span<const Setting> table;
  std::map<std::string, std::string> texts;
  std::string config;

  void add_to(CLI::App& command) {
    for (const Setting& setting : table) {
      const std::string flag = "--" + setting.key;
      if (setting.kind == SettingKind::kSwitch) {
        command.add_flag_callback(
            flag, [this, &setting] { texts[setting.key] = "true"; }, setting.help);
        continue;
      }
      command
          .add_option_function<std::string>(
              flag, [this, &setting](const std::string& text) { texts[setting.key] = text; },
              setting.help)
          ->type_name(setting.value_name)
          ->default_str(setting.default_text)
          ->take_last();
    }
  }

  void add_config_to(CLI::App& command) {
    command
        .add_option("--config", config,
                    "JSON file with the same keys, or DeepSpeed's; flags win over it")
        ->type_name("FILE");
  }

  Settings settings() const {
    Settings settings(table);
    for (const auto& [key, text] : texts) settings.apply_flag(key, text);
    if (!config.empty()) settings.apply_file(config);
    return settings;
  }
};

std::span<const Setting> sample_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"store", kText, "", "DIR[,DIR..]",
       "folder of the training state (required); several, on different drives, share it"},
      {"prompt", kText, "In the beginning", "TEXT", "what the model goes on from"},
      {"bytes", kInteger, "300", "N", "bytes to add"},
      {"temperature", kNumber, "0.8", "T", "0 takes the likeliest byte each time"},
      {"seed", kInteger, "1", "S", "of the draw"},
      {"device-memory", kSize, "160MiB", "SIZE",
       "budget of the device, of each rank that the store has"},
      {"host-memory", kSize, "384MiB", "SIZE",
       "budget of pinned host memory, of each rank that the store has"},
  };
  return table;
}

std::span<const Setting> export_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"store", kText, "", "DIR[,DIR..]",
       "folder of the training state (required); several, on different drives, share it"},
      {"to", kText, "", "FILE", "the safetensors file to make (required)"},
      {"dtype", kText, "fp32", "fp32|bf16|fp16",
       "fp32: the masters, every bit; bf16, fp16: rounded, half the size"},
      {"force", kSwitch, "false", "", "replace a file that is there"},
      {"host-memory", kSize, "384MiB", "SIZE",
       "budget of pinned host memory, of each rank that the store has"},
  };
  return table;
}

/// Of several ranks, unless a launcher has made this process one of them, it is the launcher: each
/// rank is this program with these arguments.
int run_as_ranks(int ranks, std::span<char*> arguments, const std::function<int()>& run) {
  if (ranks <= 1 || rank_options().world_size > 1) return run();
  LaunchCommand command;
  command.ranks = ranks;
  command.arguments.emplace_back("/proc/self/exe");
  command.arguments.insert(command.arguments.end(), arguments.begin() + 1, arguments.end());
  return launch(command);
}

int run_sample(const Settings& settings, std::span<char*> arguments) {
  SampleCommand command;
  command.store = settings.required("store", "the folder that `ziggurat train --store` made");
  command.prompt = settings.required("prompt", "at least one byte");
  command.bytes = settings.integer("bytes", {.min = 1, .max = 1'000'000});
  command.temperature = settings.number("temperature", {.min = 0, .max = 100});
  command.seed = static_cast<std::uint64_t>(settings.integer("seed", {}));
  command.device_bytes = settings.size("device-memory", 1);
  command.host_bytes = settings.size("host-memory", 1);
  return run_as_ranks(stored_ranks(parse_store(command.store)), arguments,
                      [&] { return sample(command); });
}

int run_export(const Settings& settings, std::span<char*> arguments) {
  ExportCommand command;
  command.store = settings.required("store", "the folder that `ziggurat train --store` made");
  command.to = settings.required("to", "a file name, model.safetensors");
  command.dtype = *parse_dtype(settings.choice("dtype", kDTypeNames));
  command.force = settings.on("force");
  command.host_bytes = settings.size("host-memory", 1);
  return run_as_ranks(stored_ranks(parse_store(command.store)), arguments,
                      [&] { return export_model(command); });
}

/// What the settings file has that changes nothing.
void say_notes(const Settings& settings) {
  for (const std::string& note : settings.notes())
    fmt::print(stderr, "ziggurat: note: {}\n", one_line(note));
}

int run_train(const Settings& settings, std::span<char*> arguments) {
  const TrainOptions options = read_train_options(settings);
  return run_as_ranks(options.nproc, arguments, [&] {
    if (rank_options().rank == 0) say_notes(settings);
    return train(options);
  });
}

void complain(const std::string& message) {
  fmt::print(stderr, "ziggurat: error: {}\n", one_line(message));
}

/// CLI11 says what it did not expect in its own words; these are ours, with what was probably
/// meant.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* chosen = &app;
  std::string name = "ziggurat";
  while (!chosen->get_subcommands().empty()) {
    chosen = chosen->get_subcommands().front();
    name += " " + chosen->get_name();
  }
  const std::string help = fmt::format("see {} --help", name);
  const auto kind = static_cast<CLI::ExitCodes>(error.get_exit_code());
  if (kind == CLI::ExitCodes::ExtrasError || kind == CLI::ExitCodes::RequiredError) {
    const std::vector<std::string> rest = app.remaining(true);
    std::vector<std::string> known;
    for (const CLI::App* command : chosen->get_subcommands([](const CLI::App*) { return true; }))
      known.push_back(command->get_name());
    if (rest.empty()) {
      return chosen != &app
                 ? fmt::format("say what to do: {}; {}", fmt::join(known, " or "), help)
                 : fmt::format(
                       "say what to do: bench, launch, plan, profile, train, sample, export "
                       "or doctor; {}",
                       help);
    }
    for (const CLI::Option* option : chosen->get_options()) known.push_back(option->get_name());
    // A word after an unknown flag is most likely its value: the flag is what to name.
    const auto flag = std::find_if(rest.begin(), rest.end(),
                                   [](const std::string& word) { return word.rfind("-", 0) == 0; });
    const std::string& first = flag == rest.end() ? rest.front() : *flag;
    const std::string given = first.substr(0, first.find('='));
    const std::string meant = closest(given, known);
    return fmt::format("unknown {} '{}'{}; {}", given.rfind("-", 0) == 0 ? "flag" : "word", given,
                       meant.empty() ? "" : fmt::format(", did you mean {}?", meant), help);
  }
  return fmt::format("{}; {}", error.what(), help);
}

int run(int argc, char** argv) {
  CLI::App app{
      "Trains models whose state does not fit memory: parameters, gradients and optimizer state on "
      "device, host and NVMe.\n"
      "Exit codes: 0 done, 1 the world (file, disk, budget, store), 2 the command, 130 Ctrl-C (the "
      "step is finished first).",
      "ziggurat"};
  app.set_version_flag("--version", ZIGGURAT_VERSION);
  app.require_subcommand(1);
  const std::span<char*> words(argv, static_cast<std::size_t>(argc));
  app.failure_message([](const CLI::App*, const CLI::Error&) { return std::string(); });

  std::function<int()> action;
  Flags train_flags{train_settings(), {}, {}};
  CLI::App* train_command = app.add_subcommand(
      "train", "train a GPT-2 on the bytes of a text; goes on where the store stands");
  train_flags.add_to(*train_command);
  train_flags.add_config_to(*train_command);
  train_command->callback(
      [&] { action = [&] { return run_train(train_flags.settings(), words); }; });

  Flags schedule_flags{train_settings(), {}, {}};
  CLI::App* schedule_command = app.add_subcommand(
      "schedule", "show the learning rates of the run that `train` with the same flags would be");
  schedule_flags.add_to(*schedule_command);
  schedule_flags.add_config_to(*schedule_command);
  schedule_command->callback([&] {
    action = [&] {
      const Settings settings = schedule_flags.settings();
      say_notes(settings);
      return show_schedule(read_show_schedule(settings));
    };
  });

  Flags plan_flags{plan_settings(), {}, {}};
  CLI::App* plan_command = app.add_subcommand(
      "plan",
      "say what each rank would hold on device, host and NVMe, and send, before anything runs");
  plan_flags.add_to(*plan_command);
  plan_command->callback([&] { action = [&] { return plan(read_plan(plan_flags.settings())); }; });

  Flags sample_flags{sample_settings(), {}, {}};
  CLI::App* sample_command = app.add_subcommand("sample", "let a stored model write");
  sample_flags.add_to(*sample_command);
  sample_command->callback(
      [&] { action = [&] { return run_sample(sample_flags.settings(), words); }; });

  Flags export_flags{export_settings(), {}, {}};
  CLI::App* export_command =
      app.add_subcommand("export", "write a stored model's weights as a safetensors file");
  export_flags.add_to(*export_command);
  export_command->callback(
      [&] { action = [&] { return run_export(export_flags.settings(), words); }; });

  Flags bench_flags{bench_io_settings(), {}, {}};
  std::vector<std::string> bench_paths;
  CLI::App* bench_command = app.add_subcommand("bench", "measure this machine for training");
  bench_command->require_subcommand(1);
  CLI::App* bench_io_command = bench_command->add_subcommand(
      "io",
      "what a drive gives training: streams, the optimizer's sweep, deadlines, beside AdamW and "
      "against fio; says how much it will write, and touches no file but its own");
  bench_io_command->add_option("--path", bench_paths, "folders to measure in (default: .)")
      ->type_name("DIR");
  bench_flags.add_to(*bench_io_command);
  bench_io_command->callback([&] {
    action = [&] { return bench_io(read_bench_io(bench_flags.settings(), bench_paths)); };
  });

  Flags bench_optimizer_flags{bench_optimizer_settings(), {}, {}};
  CLI::App* bench_optimizer_command = bench_command->add_subcommand(
      "optimizer",
      "how near the optimizer's step comes to the speed of memory, in every format of state");
  bench_optimizer_flags.add_to(*bench_optimizer_command);
  bench_optimizer_command->callback([&] {
    action = [&] {
      return bench_optimizer(read_bench_optimizer(bench_optimizer_flags.settings()));
    };
  });

  Flags bench_collectives_flags{bench_collectives_settings(), {}, {}};
  CLI::App* bench_collectives_command = bench_command->add_subcommand(
      "collectives",
      "how fast ranks exchange: each operation and size, beside plain sockets and plain copies");
  bench_collectives_flags.add_to(*bench_collectives_command);
  bench_collectives_command->callback([&] {
    action = [&] {
      return bench_collectives(read_bench_collectives(bench_collectives_flags.settings()));
    };
  });

  LaunchCommand launch_command;
  CLI::App* launch_app = app.add_subcommand(
      "launch", "start the ranks of a job on this machine: launch --nproc N -- COMMAND...");
  launch_app->add_option("--nproc", launch_command.ranks, "ranks on this machine")
      ->check(CLI::Range(1, 1024))
      ->required();
  launch_app->add_option("--nnodes", launch_command.nodes, "machines with as many ranks each")
      ->check(CLI::Range(1, 10'000));
  launch_app->add_option("--node-rank", launch_command.node, "which of them this is, from 0");
  launch_app
      ->add_option("--rendezvous", launch_command.rendezvous,
                   "where rank 0 listens until all have come (default: loopback, one machine)")
      ->type_name("HOST:PORT");
  launch_app->add_option("command", launch_command.arguments, "what each rank runs, after --")
      ->required();
  launch_app->callback([&] { action = [&] { return launch(launch_command); }; });

  ProfileCommand profile_command;
  CLI::App* profile_app =
      app.add_subcommand("profile", "show what `bench io` wrote down of this machine");
  profile_app->add_option("--path", profile_command.path, "that folder's drive only")
      ->type_name("DIR");
  profile_app->add_option("--file", profile_command.file, "the profile")
      ->type_name("FILE")
      ->default_str("~/.config/ziggurat/profile.json");
  profile_app->callback([&] { action = [&] { return profile(profile_command); }; });

  std::vector<std::string> paths{"."};
  CLI::App* doctor_command = app.add_subcommand(
      "doctor", "say what this machine offers, what is in force, and why not more");
  doctor_command->add_option("--path", paths, "folders where a store may go")
      ->type_name("DIR")
      ->default_str(".");
  doctor_command->callback([&] { action = [&] { return doctor(paths); }; });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    complain(usage_message(app, error));
    return kExitUsage;
  }
  return action();
}

}  // namespace
}  // namespace ziggurat::cli

int main(int argc, char** argv) {
  using namespace ziggurat;
  try {
    return cli::run(argc, argv);
  } catch (const cli::UsageError& error) {
    cli::complain(error.what());
    return cli::kExitUsage;
  } catch (const cli::AdvisedError& error) {
    cli::complain(error.what());
    for (const std::string& line : error.advice())
      fmt::print(stderr, "  {}\n", cli::one_line(line));
  } catch (const std::exception& error) {
    cli::complain(error.what());
  }
  return cli::kExitWorld;
}
