// SPDX-License-Identifier: Apache-2.0
// integrations/cli/main.cc: `ziggurat`: commands, flags, and the one place where errors become a
// line and an exit code.
//
// Exit codes: 0 done; 1 the world (a file, a disk, a budget, a store), and a run that is done but
// for its last checkpoint or a report; 2 the command line or the settings file; 130 Ctrl-C.
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
#include "integrations/cli/settings.h"

namespace ziggurat::cli {
namespace {

constexpr int kExitUsage = 2;

/// One line whatever the message holds: a path or a key may have control characters in it.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

using Words = std::span<char*>;

/// A command that is all settings: its flags, and what is done with them.
struct Command {
  const char* name;
  const char* help;
  std::vector<Setting> settings;
  bool has_config;  ///< takes --config
  std::function<int(const Settings&, Words)> run;
  std::vector<Setting> only_in_file{};  ///< what --config may have beside: the rest of a run's
};

/// What a command line gave a command, as text; Settings decides what it means.
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

/// `given` outlives the parsing.
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
  app.add_option("--config", given.config,
                 "JSON file with the same keys, or DeepSpeed's; flags win over it")
      ->type_name("FILE");
}

/// With several ranks this process is their launcher, unless a launcher made it one of them: each
/// rank is this program with these arguments.
int run_as_ranks(int ranks, Words arguments, const std::function<int()>& run) {
  if (ranks <= 1 || rank_options().world_size > 1) return run();
  LaunchCommand command;
  command.ranks = ranks;
  command.arguments.emplace_back("/proc/self/exe");
  command.arguments.insert(command.arguments.end(), arguments.begin() + 1, arguments.end());
  command.own_ranks = true;
  return launch(command);
}

/// On standard error, whether anybody reads it or not.
void complain_line(const std::string& line) { std::fputs((line + "\n").c_str(), stderr); }

/// What was given and changes nothing.
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
        "--collectives mpi: MPI's own launcher starts the ranks: mpirun -n N ziggurat train ..., "
        "without --nproc");
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
  return plan(read_plan(settings));
}

int run_config(const Settings& settings, Words) {
  say_notes(notes_of(settings, read_run_options(settings)));
  return show_config(settings);
}

std::vector<Command> commands() {
  return {
      {"train", "train a GPT-2 on the bytes of a text; goes on where the store stands",
       names_of(train_table()), true, run_train},
      {"schedule", "show the learning rates of the run that `train` with the same flags would be",
       names_of(train_table()), true, run_schedule},
      {"config",
       "show every setting that `train` with the same flags would have, and where it comes from",
       names_of(train_table()), true, run_config},
      {"plan",
       "say what each rank would hold on device, host and NVMe, and send, before anything "
       "runs",
       names_of(plan_settings()), true, run_plan, names_of(train_table())},
      {"sample", "let a stored model write text", names_of(sample_settings()), false, run_sample},
      {"export", "write a stored model's weights as a safetensors file",
       names_of(export_settings()), false, run_export}};
}

std::vector<Command> bench_commands() {
  return {{"optimizer",
           "how near the optimizer's step comes to the speed of memory, in every format of state",
           names_of(bench_optimizer_settings()), false,
           [](const Settings& settings, Words) {
             return bench_optimizer(read_bench_optimizer(settings));
           }},
          {"collectives",
           "how fast ranks exchange: each operation and size, beside plain sockets and plain "
           "copies",
           names_of(bench_collectives_settings()), false, [](const Settings& settings, Words) {
             return bench_collectives(read_bench_collectives(settings));
           }}};
}

void complain(const std::string& message) {
  complain_line(fmt::format("ziggurat: error: {}", one_line(in_flags(message))));
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
    if (rest.empty() && known.empty()) return fmt::format("{}; {}", error.what(), help);
    if (rest.empty()) {
      return chosen != &app
                 ? fmt::format("say what to do: {}; {}", fmt::join(known, " or "), help)
                 : fmt::format(
                       "say what to do: bench, ckpt, config, launch, plan, profile, train, "
                       "sample, export "
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

/// The program's command line. What it was told to do is `action`, once it is parsed.
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
    // On the heap: flags refer to both until the program ends.
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
    add(bench,
        {"io",
         "what a drive gives training: streams, the optimizer's sweep, deadlines, beside AdamW and "
         "against fio; says how much it will write, and touches no file but its own",
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
  /// Its positionals are ckpt_.paths, in order.
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
    CLI::App* ckpt = app_.add_subcommand(
        "ckpt", "look at checkpoints: what they hold, whether they are whole, how they differ");
    ckpt->require_subcommand(1);
    const char* const any = "a checkpoint, a folder of them (the newest there), or a store";
    const char* const folder =
        "the folder that the checkpoint is put into; made where there is none";
    add_ckpt(*ckpt, "inspect", "say what a checkpoint holds, by its manifest", ckpt_inspect,
             {{"checkpoint", any}});
    add_ckpt(*ckpt, "verify",
             "read every byte of a checkpoint and compare it with what was written", ckpt_verify,
             {{"checkpoint", any}});
    add_ckpt(*ckpt, "diff",
             "name the tensors in which two checkpoints differ; exit code 1 if any does", ckpt_diff,
             {{"one", any}, {"other", any}});
    add_ckpt(*ckpt, "save", "copy a store, at rest or in use, into a checkpoint", ckpt_save,
             {{"store", "the store"}, {"folder", folder}});
    CLI::App* to_hf = add_ckpt(
        *ckpt, "to-hf", "write a checkpoint's weights as a directory that transformers loads",
        ckpt_to_hf,
        {{"checkpoint", any}, {"directory", "where they are written; made where there is none"}});
    to_hf
        ->add_option_function<std::string>(
            "--dtype", [this](const std::string& name) { ckpt_.dtype = *parse_dtype(name); },
            "fp32: the masters, every bit, as it is without --dtype; bf16, fp16: rounded, half the "
            "size")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    to_hf->add_flag("--force", ckpt_.force, "replace a file that is there");
    add_ckpt(*ckpt, "from-hf", "keep weights that transformers saved as a checkpoint", ckpt_from_hf,
             {{"weights", "the directory that save_pretrained() wrote, or a .safetensors file"},
              {"folder", folder}});
    add_reshard(*ckpt);
    CLI::App* prune = add_ckpt(*ckpt, "prune", "remove old checkpoints of a folder", ckpt_prune,
                               {{"folder", "the folder of checkpoints"}});
    prune->add_option("--keep-last", ckpt_.keep_last, "keep the newest N checkpoints")
        ->type_name("N");
    prune
        ->add_option("--keep-every", ckpt_.keep_every,
                     "keep the checkpoints of steps that N divides too")
        ->type_name("N");
    prune->add_flag("--keep-best", ckpt_.keep_best,
                    "keep the checkpoint that the newest one calls the best too");
    prune
        ->add_option("--line", ckpt_.line,
                     "remove checkpoints of this line of history only (`ckpt inspect` says a "
                     "checkpoint's line), or of \"none\": those made before lines were kept; with "
                     "--keep-last 0 the whole line goes")
        ->type_name("ID");
  }

  void add_reshard(CLI::App& ckpt) {
    std::vector<std::string>& paths = *paths_.emplace_back(std::make_unique<Paths>());
    add(ckpt, {"reshard",
               "cut a store anew in its own place, for other ranks or another format of state; "
               "neither its ranks nor its data are needed",
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
    app->add_option("--nnodes", launch_.nodes, "number of machines, each with as many ranks")
        ->check(CLI::Range(1, 10'000));
    app->add_option("--node-rank", launch_.node, "which of the machines this is, from 0");
    app->add_option("--rendezvous", launch_.rendezvous,
                    "where rank 0 listens until all have come (default: loopback, one machine)")
        ->type_name("HOST:PORT");
    app->add_option("command", launch_.arguments, "what each rank runs, after --")->required();
    app->callback([this] { action_ = [this] { return launch(launch_); }; });
  }

  void add_profile() {
    CLI::App* app =
        app_.add_subcommand("profile", "show what `bench io` wrote down of this machine");
    app->add_option("--path", profile_.path, "show only the drive of this folder")
        ->type_name("DIR");
    app->add_option("--file", profile_.file, "the profile")
        ->type_name("FILE")
        ->default_str("~/.config/ziggurat/profile.json");
    app->callback([this] { action_ = [this] { return profile(profile_); }; });
  }

  void add_doctor() {
    std::vector<std::string>& paths = *paths_.emplace_back(std::make_unique<Paths>(Paths{"."}));
    CLI::App* app = app_.add_subcommand(
        "doctor", "say what this machine offers, what is in force, and why not more");
    app->add_option("--path", paths, "folders where a store may go")
        ->type_name("DIR")
        ->default_str(".");
    app->add_flag("--train", trains_,
                  "train a small model with PyTorch on every device that it has, and compare with "
                  "torch.optim; needs PyTorch and the Python package");
    app->callback([this, &paths] {
      action_ = [this, &paths] { return trains_ ? doctor_train(paths) : doctor(paths); };
    });
  }

  using Paths = std::vector<std::string>;

  Words words_;
  CLI::App app_{
      "Trains models whose state does not fit memory: parameters, gradients and optimizer state on "
      "device, host and NVMe.\n"
      "Exit codes: 0 done, 1 the world (file, disk, budget, store), and a run that is done but for "
      "its last checkpoint or a report (--json, --trace), 2 the command, 130 Ctrl-C, SIGTERM or "
      "SIGHUP (the step is finished first; a second one, after a second, ends it at once).",
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
