// SPDX-License-Identifier: Apache-2.0
// integrations/cli/main.cc: the program `ziggurat`: its commands and flags, and the one place that
// turns errors into a line and an exit code.
//
// Exit codes: 0 for success; 1 for an error outside the command line (a file, a disk, a budget, a
// store), and for a run that finished except for its last checkpoint or a report; 2 for an error in
// the command line or the settings file; 130 for Ctrl-C.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/rank_options.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/flag_words.h"
#include "integrations/cli/interrupt.h"
#include "integrations/cli/plan_options.h"
#include "integrations/cli/plan_strategies.h"
#include "integrations/cli/settings.h"
#include "integrations/cli/simulate_options.h"

namespace ziggurat::cli {
namespace {

constexpr int kExitUsage = 2;

/// Returns the message as one line, because a path or a key in it may hold control characters.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

using Words = std::span<char*>;

/// Describes a command whose flags are all settings, and the function that runs it.
struct Command {
  const char* name;
  const char* help;
  std::vector<Setting> settings;
  bool has_config;  ///< takes --config
  std::function<int(const Settings&, Words)> run;
  std::vector<Setting> only_in_file{};  ///< further settings that --config may hold
};

/// The flags that a command was given, as text. Settings decides what they mean.
struct Given {
  std::vector<std::pair<std::string, std::string>> flags;
  std::string config;

  Settings settings(const Command& command) const {
    Settings settings(command.settings, command.only_in_file);
    for (const auto& [name, text] : flags) settings.apply_flag(name, text);
    if (!config.empty()) settings.apply_file(config);
    return settings;
  }
};

/// Adds the flags of `command`, which put their texts into `given`. Both must outlive the parsing.
void add_flags(CLI::App& app, const Command& command, Given& given) {
  for (const Setting& setting : command.settings) {
    const std::string flag = "--" + dashed(setting.name);
    const auto take = [&given, &setting](const std::string& text) {
      given.flags.emplace_back(setting.name, text);
    };
    if (setting.kind == SettingKind::kSwitch) {
      app.add_flag_callback(
          flag, [take] { take("true"); }, setting.help);
      continue;
    }
    app.add_option_function<std::string>(flag, take, setting.help)
        ->type_name(setting.values)
        ->default_str(setting.default_text)
        ->take_last();
  }
  if (!command.has_config) return;
  app.add_option(
         "--config", given.config,
         "JSON file with the same settings, or a DeepSpeed configuration; flags override the file")
      ->type_name("FILE");
}

/// Calls `run` if there is one rank, or if a launcher made this process one of the ranks. Otherwise
/// this process becomes the launcher of `ranks` processes that run this program with these
/// arguments.
int run_as_ranks(int ranks, Words arguments, const std::function<int()>& run) {
  if (ranks <= 1 || rank_options().world_size > 1) return run();
  LaunchCommand command;
  command.ranks = ranks;
  command.arguments.emplace_back("/proc/self/exe");
  command.arguments.insert(command.arguments.end(), arguments.begin() + 1, arguments.end());
  command.own_ranks = true;
  return launch(command);
}

/// Writes the line to standard error. A failure is ignored, because nobody may be reading.
void complain_line(const std::string& line) { std::fputs((line + "\n").c_str(), stderr); }

/// Prints the notes, such as those about settings that change nothing.
void say_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes)
    complain_line(fmt::format("ziggurat: note: {}", one_line(in_flags(note))));
}

int run_sample(const Settings& settings, Words) { return sample(read_sample(settings)); }

int run_export(const Settings& settings, Words) { return export_model(read_export(settings)); }

int run_train(const Settings& settings, Words arguments) {
  const TrainOptions options = read_train_options(settings);
  if (options.collectives == Collectives::kMpi && options.nproc > 1 &&
      rank_options().world_size == 1) {
    throw UsageError(
        "--collectives mpi: MPI's own launcher must start the ranks; run `mpirun -n N ziggurat "
        "train ...` without --nproc");
  }
  return run_as_ranks(options.nproc, arguments, [&] {
    if (rank_options().rank == 0) say_notes(notes_of(settings, options));
    return train(options);
  });
}

int run_schedule(const Settings& settings, Words) {
  say_notes(settings.notes());
  return show_schedule(read_show_schedule(settings));
}

int run_plan(const Settings& settings, Words) {
  say_notes(settings.notes());
  if (settings.given("machine")) return plan_strategies(read_strategies_plan(settings));
  return plan(read_plan(settings));
}

int run_simulate(const Settings& settings, Words) {
  say_notes(settings.notes());
  return simulate(read_simulate(settings));
}

int run_config(const Settings& settings, Words) {
  say_notes(notes_of(settings, read_run_options(settings)));
  return show_config(settings);
}

std::vector<Command> commands() {
  return {
      {"train",
       "train a GPT-2 on the bytes of a text; if the store exists, go on from its last step",
       names_of(train_table()), true, run_train},
      {"schedule", "show the learning rates that `train` with the same flags would use",
       names_of(train_table()), true, run_schedule},
      {"config",
       "show every setting that `train` with the same flags would use, and where it comes from",
       names_of(train_table()), true, run_config},
      {"plan",
       "show what each rank would hold on device, host and NVMe, and what it would send, without "
       "running anything; with --machine, which strategy fits a model of any kind there",
       names_of(plan_settings()), true, run_plan, names_of(train_table())},
      {"simulate",
       "play the engine in virtual time on a machine of any size, and show each step's time, what "
       "bound it, peaks and bytes, beside the plan's figures",
       names_of(simulate_settings()), true, run_simulate, names_of(train_table())},
      {"sample", "let a stored model write text", names_of(sample_settings()), false, run_sample},
      {"export", "write a stored model's weights as a safetensors file",
       names_of(export_settings()), false, run_export}};
}

std::vector<Command> bench_commands() {
  return {{"optimizer",
           "measure how near the optimizer's step comes to the speed of memory, in every format of "
           "state",
           names_of(bench_optimizer_settings()), false,
           [](const Settings& settings, Words) {
             return bench_optimizer(read_bench_optimizer(settings));
           }},
          {"collectives",
           "measure how fast ranks exchange data: each operation and size, compared with plain "
           "sockets and plain copies",
           names_of(bench_collectives_settings()), false, [](const Settings& settings, Words) {
             return bench_collectives(read_bench_collectives(settings));
           }}};
}

void complain(const std::string& message) {
  complain_line(fmt::format("ziggurat: error: {}", one_line(in_flags(message))));
}

/// Returns our own words for an error that CLI11 found, with the flag or command that was probably
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
    if (rest.empty() && known.empty()) return fmt::format("{}; {}", error.what(), help);
    if (rest.empty()) {
      return chosen != &app
                 ? fmt::format("a command is missing; choose {}; {}", fmt::join(known, " or "),
                               help)
                 : fmt::format(
                       "a command is missing; choose bench, ckpt, config, doctor, "
                       "export, launch, plan, profile, sample, schedule, simulate or train; {}",
                       help);
    }
    for (const CLI::Option* option : chosen->get_options()) known.push_back(option->get_name());
    // A word after an unknown flag is most likely the flag's value, so the message names the flag.
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

/// The program's command line. Parsing it sets `action_`, which runs the chosen command.
class CommandLine {
 public:
  explicit CommandLine(Words words) : words_(words) {
    app_.set_version_flag("--version", ZIGGURAT_VERSION);
    app_.require_subcommand(1);
    app_.failure_message([](const CLI::App*, const CLI::Error&) { return std::string(); });
    for (Command& command : commands()) add(app_, std::move(command));
    CLI::App* bench = app_.add_subcommand("bench", "measure this machine for training");
    bench->require_subcommand(1);
    add_bench_io(*bench);
    for (Command& command : bench_commands()) add(*bench, std::move(command));
    add_ckpt();
    add_launch();
    add_profile();
    add_doctor();
  }

  int run(int argc, char** argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return app_.exit(error);  // --help, --version
      complain(usage_message(app_, error));
      return kExitUsage;
    }
    return action_();
  }

 private:
  CLI::App* add(CLI::App& to, Command its) {
    // Both stay on the heap, because flags refer to them until the program ends.
    Command& command = *commands_.emplace_back(std::make_unique<Command>(std::move(its)));
    Given& given = *given_.emplace_back(std::make_unique<Given>());
    CLI::App* app = to.add_subcommand(command.name, command.help);
    add_flags(*app, command, given);
    app->callback([this, &command, &given] {
      action_ = [this, &command, &given] { return command.run(given.settings(command), words_); };
    });
    return app;
  }

  void add_bench_io(CLI::App& bench) {
    std::vector<std::string>& paths = *paths_.emplace_back(std::make_unique<Paths>());
    add(bench, {"io",
                "measure how fast a drive serves training: streams, the optimizer's sweep and "
                "deadlines, also beside AdamW and compared with fio; says how much it will write, "
                "and touches no files but its own",
                names_of(bench_io_settings()), false,
                [&paths](const Settings& settings, Words) {
                  return bench_io(read_bench_io(settings, paths));
                }})
        ->add_option("--path", paths, "folders to measure in (default: .)")
        ->type_name("DIR");
  }

  struct Positional {
    const char* name;
    const char* help;
  };
  /// Adds a command of `ckpt`, whose positional arguments become ckpt_.paths in order.
  CLI::App* add_ckpt(CLI::App& ckpt, const char* name, const char* help,
                     int (*act)(const CkptCommand&), std::vector<Positional> positionals) {
    CLI::App* app = ckpt.add_subcommand(name, help);
    for (const Positional& its : positionals) {
      app->add_option_function<std::string>(
             its.name, [this](const std::string& path) { ckpt_.paths.push_back(path); }, its.help)
          ->type_name("DIR")
          ->required();
    }
    app->callback([this, act] { action_ = [this, act] { return act(ckpt_); }; });
    return app;
  }

  void add_ckpt() {
    CLI::App* ckpt =
        app_.add_subcommand("ckpt", "inspect, verify, compare, convert and remove checkpoints");
    ckpt->require_subcommand(1);
    const char* const any =
        "a checkpoint, a folder of checkpoints (the newest is used), or a store";
    const char* const folder =
        "the folder to put the checkpoint into; it is made if it does not exist";
    add_ckpt(*ckpt, "inspect", "show what a checkpoint holds, from its manifest", ckpt_inspect,
             {{"checkpoint", any}});
    add_ckpt(*ckpt, "verify", "read every byte of a checkpoint and compare it with its hash",
             ckpt_verify, {{"checkpoint", any}});
    add_ckpt(*ckpt, "diff",
             "name the tensors in which two checkpoints differ; exit code 1 if any does", ckpt_diff,
             {{"one", any}, {"other", any}});
    add_ckpt(*ckpt, "save", "copy a store, which may be in use, into a checkpoint", ckpt_save,
             {{"store", "the store"}, {"folder", folder}});
    CLI::App* to_hf =
        add_ckpt(*ckpt, "to-hf",
                 "write a checkpoint's weights as a directory that transformers loads", ckpt_to_hf,
                 {{"checkpoint", any},
                  {"directory", "the directory to write to; it is made if it does not exist"}});
    to_hf
        ->add_option_function<std::string>(
            "--dtype", [this](const std::string& name) { ckpt_.dtype = *parse_dtype(name); },
            "fp32 writes the masters exactly, as without --dtype; bf16 and fp16 round them to half "
            "the size")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    to_hf->add_flag("--force", ckpt_.force, "replace files that exist");
    add_ckpt(*ckpt, "from-hf", "turn weights that transformers saved into a checkpoint",
             ckpt_from_hf,
             {{"weights", "the directory that save_pretrained() wrote, or a .safetensors file"},
              {"folder", folder}});
    add_reshard(*ckpt);
    CLI::App* prune = add_ckpt(*ckpt, "prune", "remove old checkpoints of a folder", ckpt_prune,
                               {{"folder", "the folder of checkpoints"}});
    prune->add_option("--keep-last", ckpt_.keep_last, "keep the newest N checkpoints")
        ->type_name("N");
    prune
        ->add_option("--keep-every", ckpt_.keep_every,
                     "also keep the checkpoints of steps that are multiples of N")
        ->type_name("N");
    prune->add_flag("--keep-best", ckpt_.keep_best,
                    "also keep the checkpoint that the newest one names as the best");
    prune
        ->add_option(
            "--line", ckpt_.line,
            "remove only checkpoints of this line of history, which `ckpt inspect` shows; \"none\" "
            "stands for checkpoints without a line; with --keep-last 0 the whole line is removed")
        ->type_name("ID");
  }

  void add_reshard(CLI::App& ckpt) {
    std::vector<std::string>& paths = *paths_.emplace_back(std::make_unique<Paths>());
    add(ckpt, {"reshard",
               "divide a store again, in place, for other ranks or another format of state; this "
               "needs neither the old ranks nor the training data",
               names_of(reshard_settings()), false,
               [&paths](const Settings& settings, Words) {
                 return ckpt_reshard(read_reshard(settings, paths.at(0)));
               }})
        ->add_option("store", paths, "the store")
        ->type_name("DIR[,DIR..]")
        ->expected(1)
        ->required();
  }

  void add_launch() {
    CLI::App* app = app_.add_subcommand(
        "launch", "start the ranks of a job on this machine: launch --nproc N -- COMMAND...");
    app->add_option("--nproc", launch_.ranks, "ranks on this machine")
        ->check(CLI::Range(1, 1024))
        ->required();
    app->add_option("--nnodes", launch_.nodes, "number of machines, each with --nproc ranks")
        ->check(CLI::Range(1, 10'000));
    app->add_option("--node-rank", launch_.node, "number of this machine, from 0");
    app->add_option("--rendezvous", launch_.rendezvous,
                    "address where rank 0 listens until all ranks have connected (default: "
                    "loopback, for one machine)")
        ->type_name("HOST:PORT");
    app->add_option("command", launch_.arguments, "the command that each rank runs, after --")
        ->required();
    app->callback([this] { action_ = [this] { return launch(launch_); }; });
  }

  void add_profile() {
    CLI::App* app =
        app_.add_subcommand("profile",
                            "show what was measured of this machine, by --measure or `bench io`; "
                            "`plan --machine this` reads it");
    app->add_flag("--measure", profile_.measure,
                  "measure first: products, passes and copies of the cores, and the drive; takes "
                  "less than a minute");
    app->add_option("--path", profile_.path,
                    "show only the drive of this folder; with --measure, measure it instead of the "
                    "current folder's")
        ->type_name("DIR");
    app->add_option("--seconds", profile_.seconds, "with --measure: seconds for each figure")
        ->check(CLI::Range(0.05, 60.0));
    app->add_option("--size", profile_.size_bytes, "with --measure: size of the file on the drive")
        ->transform(CLI::AsSizeValue(false));
    app->add_option("--file", profile_.file, "the profile")
        ->type_name("FILE")
        ->default_str("~/.config/ziggurat/profile.json");
    app->callback([this] { action_ = [this] { return profile(profile_); }; });
  }

  void add_doctor() {
    std::vector<std::string>& paths = *paths_.emplace_back(std::make_unique<Paths>());
    CLI::App* app = app_.add_subcommand(
        "doctor",
        "show what this machine offers, what Ziggurat uses of it, and why it does not use more");
    app->add_option("--path", paths, "folders where a store may go")
        ->type_name("DIR")
        ->default_str(".");
    app->add_flag("--train", trains_,
                  "train a small model with PyTorch on every device that PyTorch finds, and "
                  "compare the result with torch.optim; this needs PyTorch and the Python package");
    app->callback([this, &paths] {
      action_ = [this, &paths] {
        return trains_ ? doctor_train(paths) : doctor(paths.empty() ? Paths{"."} : paths);
      };
    });
  }

  using Paths = std::vector<std::string>;

  Words words_;
  CLI::App app_{
      "Trains models whose state does not fit into memory, with parameters, gradients and "
      "optimizer state on device, host and NVMe.\nExit codes: 0 for success; 1 for an error "
      "outside the command line (file, disk, budget, store), and for a run that finished except "
      "for its last checkpoint or a report (--json, --trace); 2 for an error in the command line "
      "or the settings file; 130 for Ctrl-C, SIGTERM or SIGHUP (the step is finished first; "
      "another signal, after a second, ends the run at once).",
      "ziggurat"};
  std::vector<std::unique_ptr<Command>> commands_;
  std::vector<std::unique_ptr<Given>> given_;
  std::vector<std::unique_ptr<Paths>> paths_;
  CkptCommand ckpt_;
  LaunchCommand launch_;
  ProfileCommand profile_;
  bool trains_ = false;  // doctor
  std::function<int()> action_;
};

}  // namespace
}  // namespace ziggurat::cli

int main(int argc, char** argv) {
  using namespace ziggurat;
  if (!cli::open_standard_streams()) return cli::kExitWorld;
  cli::take_signals();
  try {
    return cli::CommandLine({argv, static_cast<std::size_t>(argc)}).run(argc, argv);
  } catch (const cli::UsageError& error) {
    cli::complain(error.what());
    return cli::kExitUsage;
  } catch (const cli::AdvisedError& error) {
    cli::complain(error.what());
    for (const std::string& line : error.advice())
      cli::complain_line(fmt::format("  {}", cli::one_line(cli::in_flags(line))));
  } catch (const std::exception& error) {
    cli::complain(error.what());
  }
  return cli::kExitWorld;
}
