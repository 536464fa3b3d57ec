// SPDX-License-Identifier: Apache-2.0
// integrations/cli/bench.cc: `ziggurat bench io`, which measures how fast a drive serves training
// and records the result in the machine profile.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "aio/direct_file.h"
#include "base/bytes.h"
#include "core/plan/machine_profile.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/flag_words.h"
#include "integrations/cli/interrupt.h"
#include "integrations/cli/output_file.h"
#include "integrations/gpt/model.h"
#include "integrations/measure/html_report.h"
#include "integrations/measure/result_json.h"
#include "integrations/measure/suite.h"
#include "integrations/measure/table.h"

namespace ziggurat::cli {

std::span<const Setting> bench_io_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"file", kText, "", "FILE",
       "read this existing file instead of making one; it is never written"},
      {"size", kSize, "", "SIZE",
       "size of the file made in each folder (4GiB if not given); with --file, how much of that "
       "file to read (all of it if not given)"},
      {"seconds", kNumber, "5", "S",
       "seconds to measure each row for; fewer than 5 cannot show a steady state"},
      {"rounds", kInteger, "1", "N",
       "how often to measure all rows; figures are medians of these rounds, and a published figure "
       "needs at least 5"},
      {"rows", kText, "", "LIST",
       "measure only these rows, separated by commas: read, write, mix, sweep, sweep_adam, "
       "prefetch (needs read), read_beside_adam, ...; the machine profile is then not updated"},
      {"depth", kInteger, "0", "N",
       "transfers in flight at once; 0 tries several depths first and uses the one of the fastest "
       "that costs least processor time, for reads, for writes and for their mix"},
      {"block", kSize, "4MiB", "SIZE", "size of a transfer, at most 4MiB"},
      {"model", kText, "1.5B", "NAME|PARAMS",
       "model whose units are prefetched and whose step is predicted: gpt2-small, 7B, 350M, ..."},
      {"tune", kSwitch, "false", "", "also search for the best block size and depth"},
      {"tune-seconds", kNumber, "30", "S", "seconds to spend on the search of --tune"},
      {"json", kText, "", "FILE",
       "write all figures to FILE as JSON: series, histograms and every round"},
      {"report", kText, "", "FILE.html",
       "write one page with plots, which any browser shows offline"},
      {"profile", kText, "", "FILE", "the machine profile to update (see ziggurat profile)"},
      {"no-profile", kSwitch, "false", "", "do not update the machine profile"},
      {"no-fio", kSwitch, "false", "", "do not run fio for comparison, even if it is installed"},
      {"allow-raw-device", kSwitch, "false", "",
       "allow --file to be a block device, which is only read"},
  };
  return table;
}

namespace {

constexpr std::uint64_t kSizeDefault = 4 * kGiB;
constexpr double kBenchParamsMax = 1e15;
constexpr double kAspect = 128;  // width divided by layers, about as in large models

/// Returns the shape of the model that the setting `model` names. A plain count of parameters
/// stands for a model of the usual shape, with 12 x layers x width^2 parameters and a width of 128
/// x layers.
measure::ModelShape read_model(const Settings& settings) {
  const std::string text = settings.text("model");
  if (const std::optional<double> params = parse_count(text)) {
    if (!(*params >= 1e6) || *params > kBenchParamsMax)
      throw UsageError(fmt::format("{}: the count of parameters must be between 1M and 1000T",
                                   settings.described("model")));
    const double layers = std::cbrt(*params / (12 * kAspect * kAspect));
    return {text, *params, static_cast<std::uint32_t>(std::max(1.0, std::round(layers)))};
  }
  try {
    const gpt::ModelConfig config = gpt::parse_model(text);
    const ModelSpec spec = gpt::make_spec(config);
    double params = 0;
    for (const UnitSpec& unit : spec.units) params += static_cast<double>(unit.count());
    return {text, params, static_cast<std::uint32_t>(config.layers)};
  } catch (const Error& error) {
    throw UsageError(
        fmt::format("{} is neither a count of parameters (7B, 350M) nor the name of a model: {}",
                    settings.described("model"), error.what()));
  }
}

std::vector<measure::Workload> read_rows(const Settings& settings) {
  std::vector<measure::Workload> rows;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < measure::kWorkloads; ++i)
    keys.push_back(measure::key_of(static_cast<measure::Workload>(i)));
  std::istringstream words(settings.text("rows"));
  for (std::string word; std::getline(words, word, ',');) {
    const auto found = std::find(keys.begin(), keys.end(), word);
    if (found == keys.end())
      throw UsageError(fmt::format("{}: \"{}\" is not a row; the rows are {}",
                                   settings.described("rows"), word, fmt::join(keys, ", ")));
    rows.push_back(static_cast<measure::Workload>(found - keys.begin()));
  }
  const auto named = [&](measure::Workload row) {
    return std::ranges::find(rows, row) != rows.end();
  };
  using enum measure::Workload;
  if ((named(kPrefetch) || named(kPrefetchBesideAdam)) && !named(kRead))
    throw UsageError(fmt::format(
        "{}: the prefetch rows need the speed that the row `read` measures; add read to the list",
        settings.described("rows")));
  return rows;
}

}  // namespace

BenchIoCommand read_bench_io(const Settings& settings, std::vector<std::string> paths) {
  BenchIoCommand command;
  measure::BenchOptions& options = command.options;
  options.file = settings.text("file");
  if (!options.file.empty() && !paths.empty())
    throw UsageError(
        "give --path to measure with new files in a folder, or --file to read an existing file, "
        "but not both");
  if (options.file.empty() && paths.empty()) paths = {"."};
  options.paths = std::move(paths);
  options.size_bytes = options.file.empty() ? kSizeDefault : 0;
  if (!settings.text("size").empty())
    options.size_bytes = settings.size("size", measure::kSmallestFileBytes) / kMiB * kMiB;
  options.seconds = settings.number("seconds", {.min = 0.05, .max = 3600});
  options.rounds = static_cast<std::uint32_t>(settings.integer("rounds", {.min = 1, .max = 100}));
  options.depth = static_cast<std::uint32_t>(settings.integer("depth", {.min = 0, .max = 256}));
  options.block_bytes = static_cast<std::uint32_t>(settings.size("block", measure::kPageBytes));
  if (options.block_bytes > DirectFile::kBlockBytes ||
      options.block_bytes % measure::kPageBytes != 0) {
    throw UsageError(fmt::format(
        "{}: give a multiple of {} bytes that is at most {}; larger transfers are split into "
        "blocks of that size",
        settings.described("block"), measure::kPageBytes, format_bytes(DirectFile::kBlockBytes)));
  }
  options.rows = read_rows(settings);
  options.model = read_model(settings);
  options.tune = settings.on("tune");
  options.tune_seconds = settings.number("tune-seconds", {.min = 0.5, .max = 3600});
  options.with_fio = !settings.on("no-fio");
  options.allow_raw_device = settings.on("allow-raw-device");
  command.json_path = settings.text("json");
  command.report_path = settings.text("report");
  if (!settings.on("no-profile") && options.rows.empty()) {
    command.profile_path = settings.text("profile");
    if (command.profile_path.empty()) command.profile_path = default_profile_path();
  }
  return command;
}

namespace {

void on_signal(int) {
  static constexpr std::string_view kText =
      "\nziggurat: the benchmark was interrupted; it leaves no files behind\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(kExitInterrupted);
}

void print_fragment(Console& console, const measure::BenchResult& result,
                    const MachineProfile& profile) {
  const bool tuned =
      std::any_of(result.sets.begin(), result.sets.end(),
                  [](const measure::SetResult& set) { return set.tune.has_value(); });
  if (!tuned) return;
  for (const measure::SetResult& set : result.sets) {
    if (!set.tune) continue;
    const auto say = [&](const char* what, const measure::TuneChoice& choice) {
      if (choice.depth == 0) return;
      console.line(
          fmt::format("tuned {} for {}: {} transfers of {} ({} in flight) reach {:.2f} GB/s",
                      set.label, what, choice.depth, format_bytes(choice.block_bytes),
                      format_bytes(choice.outstanding_bytes()), choice.gb_per_s));
    };
    say("read", set.tune->read);
    say("write", set.tune->write);
    say("mix", set.tune->mix);
  }
  console.line(
      "Ziggurat reads this fragment as a machine profile; DeepSpeed reads it as a configuration "
      "and uses its \"aio\":");
  std::string text = to_json_text(profile);
  text.pop_back();
  console.line(text);
}

}  // namespace

// Nothing needs to be cleaned up, because files without a name and fio end with the process.
void end_at_signals() {
  struct sigaction action {};
  action.sa_handler = &on_signal;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

int bench_io(const BenchIoCommand& command) {
  end_at_signals();
  Console console;
  MachineProfile profile;
  if (!command.profile_path
           .empty())  // an unreadable profile is an error now, not after two minutes
    profile = read_profile(command.profile_path).value_or(MachineProfile{});
  require_writable(command.json_path);
  require_writable(command.report_path);
  const measure::Progress progress{[&](const std::string& text) { console.line(text); },
                                   [&](const std::string& text) { console.live(text); }};
  const measure::BenchResult result = measure::run_bench(command.options, progress);
  for (const std::string& line : measure::table(result)) console.line(in_flags(line));
  for (const std::string& mode : result.degraded) console.line("degraded: " + mode);
  profile = measure::updated_profile(std::move(profile), result);
  print_fragment(console, result, profile);
  write_output(command.json_path, measure::to_json(result).dump(1) + "\n");
  write_output(command.report_path, measure::html_report(result));
  bool any_refused = false;
  for (const measure::SetResult& set : result.sets) {
    for (const measure::Row& row : set.rows) any_refused |= measure::refused(row.flags());
  }
  if (any_refused) {
    throw Error(ErrorCode::kDataLoss,
                "some figures were refused, because they do not show the drive's speed; the flags "
                "in the table say why");
  }
  if (!command.profile_path.empty()) {
    write_profile(profile, command.profile_path);
    console.line("profile: " + command.profile_path);
  }
  return 0;
}

}  // namespace ziggurat::cli
