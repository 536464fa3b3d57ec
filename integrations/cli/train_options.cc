// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_options.cc: the table of a run's settings, and the check that they fit
// together.
#include "integrations/cli/train_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "core/engine/engine_settings.h"
#include "integrations/cli/store_paths.h"

namespace ziggurat::cli {
namespace {

using In = SettingsIn<TrainOptions>;
using T = TrainOptions;
using Table = std::vector<SettingOf<TrainOptions>>;
using enum SettingKind;

constexpr IntegerRange kPieces{.min = 1, .max = 65'536};
constexpr std::array<std::string_view, 2> kCheckpointings{"block", "off"};
constexpr std::array<std::string_view, 4> kCollectives{"auto", "tcp", "mpi", "nccl"};

/// Returns the name of the model, or its shape if it has no name.
std::string model_text(const gpt::ModelConfig& model) {
  for (const char* name : {"gpt2-small", "gpt2-medium"}) {
    if (to_string(gpt::parse_model(name)) == to_string(model)) return name;
  }
  return to_string(model);
}

Table run_table() {
  return {
      In::custom(
          "model", kText,
          [](const T& options) -> SettingValue { return model_text(options.model); },
          [](T& options, const SettingValue& value) {
            const DType dtype = options.model.dtype;
            try {
              options.model = gpt::parse_model(std::get<std::string>(value));
            } catch (const std::exception& error) {
              complain_of_value(error);
            }
            options.model.dtype = dtype;
          },
          {.values = "NAME",
           .help = "gpt2-small, gpt2-medium or LAYERSxWIDTHxHEADS",
           .at_resume = AtResume::kFixed}),
      In::parsed(
          "dtype", [](auto& o) -> auto& { return o.model.dtype; }, named_dtype,
          [](DType dtype) { return to_string(dtype); },
          {.values = "bf16|fp16|fp32",
           .help = "type of parameters, gradients and activations; masters and sums are fp32. fp16 "
                   "comes with a loss scale",
           .at_resume = AtResume::kFixed}),
      In::text("data", &T::data,
               {.values = "PATH",
                .help = "text to learn: a file, or a folder of files (required)",
                .at_resume = AtResume::kFixed}),
      In::text("store", &T::store,
               {.values = "DIR[,DIR..]",
                .help = "folder of the training state (required); several folders, on different "
                        "drives, share the state",
                .at_resume = AtResume::kSilent}),
      In::integer("steps", &T::steps, {.min = 1, .max = 1'000'000'000},
                  {.values = "N",
                   .help = "number of steps in total; a resumed run makes the remaining ones"}),
      In::integer(
          "batch", [](auto& o) -> auto& { return o.shape.batch; }, kPieces,
          {.values = "B", .help = "sequences in a micro-batch", .at_resume = AtResume::kFixed}),
      In::integer(
          "accumulate", [](auto& o) -> auto& { return o.shape.accumulate; }, kPieces,
          {.values = "K", .help = "micro-batches in a step", .at_resume = AtResume::kFixed}),
      In::integer("context", [](auto& o) -> auto& { return o.shape.context; },
                  {.min = 1, .max = 1 << 20},
                  {.values = "T", .help = "bytes in a sequence", .at_resume = AtResume::kFixed}),
      In::integer("seed", &T::seed, {},
                  {.values = "S",
                   .help = "seed of the initial values and the batches",
                   .at_resume = AtResume::kFixed}),
      In::integer("eval_every", &T::eval_every, {},
                  {.values = "N",
                   .help = "measure held-out loss every N steps; 0 measures it only at the end"}),
      In::word("activation_checkpointing", [](auto& o) -> auto& { return o.shape.checkpointing; },
               kCheckpointings,
               {.values = "block|off",
                .help = "block keeps only the input of each block; off keeps all activations"}),
  };
}

Table machine_table() {
  return {
      In::size_or_auto("device_memory", &T::device_bytes, kMiB,
                       {.values = "SIZE|auto",
                        .help = "budget of device memory; auto: chosen as that of host memory is",
                        .among_ranks = AmongRanks::kOwn}),
      In::integer("threads", &T::threads, {.min = 0, .max = 1024},
                  {.values = "N", .help = "number of workers; 0 means one for each physical core"}),
      In::integer("nproc", &T::nproc, {.min = 1, .max = 1024},
                  {.values = "N",
                   .help = "number of ranks on this machine, each with these budgets, a slice of "
                           "the state and --accumulate micro-batches of its own; this command "
                           "starts them unless a launcher did",
                   .at_resume = AtResume::kFixed}),
      In::truth("sp", kSwitch, [](auto& o) -> auto& { return o.shape.sequence_parallel; },
                {.help = "sequence parallelism: tensor-parallel ranks also divide the rows between "
                         "layers"}),
      In::word("collectives", &T::collectives, kCollectives,
               {.values = "auto|tcp|mpi|nccl",
                .help = "how ranks exchange data: auto reads each other's memory within a machine "
                        "and uses sockets between machines; tcp uses sockets; mpi uses the MPI "
                        "whose mpirun or srun started the ranks; nccl uses NCCL between GPUs"}),
  };
}

Table output_table() {
  return {
      In::text("trace", &T::trace_path,
               {.values = "FILE",
                .help = "write a trace of the run (Chrome format, for ui.perfetto.dev)",
                .at_resume = AtResume::kSilent}),
      In::text("json", &T::json_path,
               {.values = "FILE",
                .help = "write the figures of every step and of the whole run to FILE as JSON",
                .at_resume = AtResume::kSilent}),
      In::truth("per_rank", kSwitch, &T::per_rank,
                {.help = "print a line for each rank in the table at the end",
                 .at_resume = AtResume::kSilent}),
      In::truth(
          "print_loss_bits", kSwitch, &T::print_loss_bits,
          {.help = "print the bits of every step's fp32 loss", .at_resume = AtResume::kSilent}),
  };
}

/// Checks the strategy for the ranks that --nproc starts. A launcher may have started another
/// number of ranks, for which the strategy is checked later.
void check_strategy(const Settings& settings, const TrainOptions& options) {
  if (options.nproc > 1) {
    if (options.nproc % options.engine.tensor_parallel != 0) {
      throw UsageError(fmt::format(
          "{} does not divide {}, because {} would be left over; choose another number of ranks",
          settings.described("tp"), settings.described("nproc"),
          options.nproc % options.engine.tensor_parallel));
    }
    try {
      static_cast<void>(strategy_of(options.engine, options.nproc));
    } catch (const Error& error) {
      throw UsageError(error.what());
    }
  }
  const int bits = options.engine.quantization.gradient_bits;
  if (bits != 4 && bits != 8 && bits != 16)
    throw UsageError(settings.described("quantized_gradients") + ": give 4 or 8");
  if (options.engine.ranks_per_node > 0 && !options.engine.quantization.any()) {
    throw UsageError(
        fmt::format("{} has no effect without --quantized-weights or --quantized-gradients; give "
                    "one of them too",
                    settings.described("ranks_per_node")));
  }
}

/// Returns the number of data-parallel ranks, as far as it is known before the ranks are connected.
int data_ranks(const TrainOptions& options) {
  const int ranks = std::max(options.nproc, rank_options().world_size);
  return std::max(1, ranks / options.engine.tensor_parallel);
}

/// Checks that tensor-parallel ranks can divide the model and the rows. Whether they divide the
/// ranks of the run is checked once the ranks are connected.
void check_tensor_parallel(const Settings& settings, const TrainOptions& options) {
  const int ranks = options.engine.tensor_parallel;
  read_with(settings, "tp",
            [&](const std::string&) { gpt::require_divisible(options.model, ranks); });
  if (!options.shape.sequence_parallel) return;
  if (ranks == 1) throw UsageError("--sp divides rows among tensor-parallel ranks; give --tp too");
  const std::int64_t rows = options.shape.rows();
  if (rows % ranks != 0) {
    throw UsageError(fmt::format(
        "--sp: {} x {} = {} rows, which {} ranks cannot divide evenly: {} "
        "would be left over",
        settings.described("batch"), settings.described("context"), rows, ranks, rows % ranks));
  }
}

void check_model(const Settings& settings, const TrainOptions& options) {
  if (options.shape.context > options.model.context_max) {
    throw UsageError(
        fmt::format("{} is longer than the model's {} positions; give at most that many",
                    settings.described("context"), options.model.context_max));
  }
  read_with(settings, "state_format", [&](const std::string&) {
    require_compatible(options.engine.optimizer.state.format,
                       options.engine.optimizer.param_rounding.value_or(Rounding::kNearest),
                       options.model.dtype == DType::kBFloat16);
  });
  read_with(settings, "param_groups", [&](const std::string&) {
    ModelSpec spec = gpt::make_spec(options.model);
    assign_groups(spec, options.engine.param_groups);
  });
}

}  // namespace

std::span<const SettingOf<TrainOptions>> train_table() {
  static const Table table = [] {
    Table all;
    for (const Table& part :
         {run_table(),
          settings_within(settings_within(schedule_settings(), &ScheduleOptions::given),
                          &T::schedule),
          settings_within(settings_within(loss_scale_settings(), &LossScaleOptions::given),
                          &T::loss_scale),
          settings_within(engine_settings(), &T::engine),
          settings_within(checkpoint_settings(), &T::checkpoint), machine_table(), output_table()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return table;
}

std::span<const Setting> train_settings() {
  static const std::vector<Setting> names = names_of(train_table());
  return names;
}

TrainOptions read_train_options(const Settings& settings) {
  settings.required("data", "a text file or a folder of text files");
  settings.required("store", "the folder where the training state is or will be");
  TrainOptions options = read_run_options(settings);
  options.engine.store = parse_store(options.store);
  return options;
}

TrainOptions read_run_options(const Settings& settings) {
  TrainOptions options;
  settings.write_to(options, train_table());
  options.engine.optimizer.rounding_seed = options.seed;
  make_schedule(options.schedule, settings, options.steps);
  make_loss_scale(options.loss_scale, settings, options.model.dtype);
  check_model(settings, options);
  check_tensor_parallel(settings, options);
  check_strategy(settings, options);
  check_checkpoints(settings, options.checkpoint);
  options.engine.checkpoint = {.saves = !options.checkpoint.directory.empty(),
                               .bandwidth_bytes_per_s = options.checkpoint.bandwidth_bytes_per_s,
                               .stall_max_s = options.checkpoint.stall_max_s};
  return options;
}

std::vector<std::string> notes_of(const Settings& settings, const TrainOptions& options) {
  std::vector<std::string> notes = settings.notes();
  const auto say = [&](std::span<const std::string_view> names, std::string_view why) {
    for (const std::string_view name : names) {
      if (settings.given(name))
        notes.push_back(fmt::format("{} changes nothing {}", settings.described(name), why));
    }
  };
  static constexpr std::string_view kOfRanks[] = {"reduce_dtype", "reduce_bucket_size"};
  static constexpr std::string_view kOfSeveral[] = {"collectives", "per_rank"};
  static constexpr std::string_view kOfLoading[] = {"prefetch_bucket_size", "max_live_parameters",
                                                    "max_reuse_distance",
                                                    "param_persistence_threshold"};
  const int ranks = data_ranks(options);
  if (ranks == 1) say(kOfRanks, "with one data-parallel rank");
  if (ranks * options.engine.tensor_parallel == 1) say(kOfSeveral, "with one rank");
  const bool gathered =
      ranks > 1 &&
      strategy_of(options.engine, ranks * options.engine.tensor_parallel).param_shards() > 1;
  if (options.engine.placement.params == Tier::kDevice && !gathered)
    say(kOfLoading, "where parameters are on the device");
  return notes;
}

std::map<std::string, std::string> changeable_settings(const TrainOptions& options,
                                                       std::size_t threads) {
  TrainOptions in_force = options;
  in_force.threads = threads;
  std::map<std::string, std::string> settings;
  for (const SettingOf<TrainOptions>& setting : train_table()) {
    if (setting.at_resume == AtResume::kReported)
      settings[dashed(setting.name)] = to_report(setting.kind, setting.read(in_force));
  }
  return settings;
}

}  // namespace ziggurat::cli
