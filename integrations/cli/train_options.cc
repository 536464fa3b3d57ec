// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_options.cc: the table, and what each setting may be.
#include "integrations/cli/train_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/bytes.h"
#include "core/sharding/strategy.h"
#include "integrations/cli/group_options.h"
#include "integrations/cli/store_paths.h"

namespace ziggurat::cli {

std::span<const Setting> train_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table = [] {
    std::vector<Setting> all{
        {"model", kText, "gpt2-small", "NAME", "gpt2-small, gpt2-medium or LAYERSxWIDTHxHEADS"},
        {"dtype", kText, "bf16", "bf16|fp16|fp32",
         "of parameters, gradients and activations; masters and sums are fp32. fp16 comes with a "
         "loss scale"},
        {"data", kText, "", "PATH", "text to learn: a file, or a folder of files (required)"},
        {"store", kText, "", "DIR[,DIR..]",
         "folder of the training state (required); several, on different drives, share it"},
        {"steps", kInteger, "60", "N", "steps in total; a resumed run does the rest"},
        {"batch", kInteger, "2", "B", "sequences in a micro-batch"},
        {"accumulate", kInteger, "4", "K", "micro-batches in a step"},
        {"context", kInteger, "256", "T", "bytes in a sequence"},
    };
    all.insert(all.end(), schedule_settings().begin(), schedule_settings().end());
    all.insert(all.end(), loss_scale_settings().begin(), loss_scale_settings().end());
    all.insert(
        all.end(),
        {
            {"optimizer", kText, "adamw", "NAME", "adamw, adam, lion, adagrad or sgd"},
            {"state-format", kText, "fp32", "NAME",
             "how the optimizer's state is kept: fp32, bf16-moments, 8bit (moments), split (fp32's "
             "bits, fewer bytes read) or bf16"},
            {"rounding", kText, "nearest", "nearest|stochastic",
             "of 16-bit parameters and moments; not stochastic with split"},
            {"betas", kNumbers, "0.9,0.95", "B1,B2",
             "the optimizer's moving averages; the first is sgd's momentum"},
            {"weight-decay", kNumber, "0.1", "X",
             "on matrices only; decoupled in adamw and lion, else added to the gradient"},
            {"param-groups", kGroups, "", "PATTERN:KEY=X,..;..",
             "parameters with their own lr-scale, weight-decay, beta1, beta2, eps, or frozen: the "
             "first group whose pattern (* and ?) is a parameter's name has it; names as in the "
             "exported file"},
            {"clip", kNumber, "1.0", "NORM",
             "largest global 2-norm of the gradient; 0 turns clipping off"},
            {"speculate", kText, "auto", "auto|never|always",
             "start updates before the gradient's norm is known: while that mostly was right, "
             "never, or "
             "always"},
            {"eval-every", kInteger, "0", "N", "held-out loss every N steps; 0: at the end only"},
            {"activation-checkpointing", kText, "block", "block|off",
             "keep each block's input only, or everything"},
            {"slots", kInteger, "2", "1|2",
             "2: every finished step is durable; 1: half the space, and a kill within a step loses "
             "the "
             "run"},
            {"seed", kInteger, "1", "S", "of initial values and batches"},
            {"device-memory", kSize, "160MiB", "SIZE", "budget of the device"},
            {"host-memory", kSize, "384MiB", "SIZE", "budget of pinned host memory"},
            {"placement", kText, "params=host,grads=host,optimizer=nvme", "WHERE",
             "tier (device, host, nvme) of each class of state, or all=TIER"},
            {"threads", kInteger, "0", "N", "workers; 0: one for each physical core"},
            {"nproc", kInteger, "1", "N",
             "ranks on this machine, each with these budgets, a slice of the state and "
             "--accumulate micro-batches of its own; started here unless a launcher did"},
            {"tp", kInteger, "1", "T",
             "tensor-parallel ranks, which divide each layer among them: T neighbours, and nproc / "
             "T "
             "data-parallel ranks of each part, to which all that follows applies"},
            {"sp", kSwitch, "false", "",
             "sequence parallelism: tensor-parallel ranks also divide the rows between layers"},
            {"zero-stage", kInteger, "2", "0|1|2|3",
             "what a rank has a slice of: 0 nothing, 1 and 2 gradients and optimizer state, 3 "
             "parameters too"},
            {"strategy", kText, "", "full|grad-op|none|hybrid",
             "FSDP's names: stage 3; stage 3 with units kept from forward to backward; stage 0; "
             "stage 3 (or 1 or 2) in groups that each have a copy of the state"},
            {"shard-group", kInteger, "0", "G", "ranks of a group, with --strategy hybrid"},
            {"hpz", kInteger, "0", "P",
             "stage 3: each P ranks (of a machine) keep parts of the parameters they have "
             "gathered, "
             "so that backward gathers among them; 2 / P bytes of host memory a parameter"},
            {"quantized-weights", kSwitch, "false", "",
             "stage 3: parameters travel between ranks in 8 bits, each within 0.4 % of its block "
             "of 256's largest"},
            {"quantized-gradients", kInteger, "16", "4|8",
             "stage 3: gradients travel in as many bits, within 7.2 or 0.4 %: summed among the "
             "ranks of a node, and then the nodes' sums"},
            {"ranks-per-node", kInteger, "0", "P",
             "ranks on one machine, for quantized exchanges; 0: as the launcher says"},
            {"collectives", kText, "auto", "auto|tcp|mpi|nccl",
             "what carries what ranks say: each other's memory within a machine and sockets; "
             "sockets; the MPI whose mpirun or srun started them; GPUs, which sum in another "
             "order"},
            {"reduce-dtype", kText, "", "bf16|fp16|fp32",
             "of gradients between ranks (default: --dtype)"},
            {"reduce-bucket-size", kInteger, "4194304", "ELEMENTS",
             "of a gradient that ranks sum at once; three buckets are set aside in host memory"},
            {"prefetch-bucket-size", kInteger, "1000000000000", "ELEMENTS",
             "of parameters loaded, or in stage 3 gathered, ahead of their use, at most two units"},
            {"resume", kText, "auto", "auto|never",
             "go on from the store's last durable step, or replace the store"},
            {"trace", kText, "", "FILE",
             "write a trace of the run (Chrome format, for ui.perfetto.dev)"},
            {"json", kText, "", "FILE", "write the figures of every step and of the whole run"},
            {"per-rank", kSwitch, "false", "", "a line for each rank in the table at the end"},
            {"print-loss-bits", kSwitch, "false", "", "print the bits of every step's fp32 loss"},
        });
    return all;
  }();
  return table;
}

namespace {

constexpr std::uint64_t kBudgetBytesMin = kMiB;
constexpr Settings::IntegerRange kStages{.min = 0, .max = 3};

/// As far as they are known: a launcher may have started others.
void read_strategy(const Settings& settings, TrainOptions& options) {
  options.strategy = strategy_request(settings);
  if (!options.strategy.name)
    options.strategy.zero_stage = static_cast<int>(settings.integer("zero-stage", kStages));
  if (options.nproc == 1) return;
  try {
    static_cast<void>(resolve(options.strategy, options.nproc / options.model.part.ranks));
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void read_exchanges(const Settings& settings, TrainOptions& options) {
  constexpr Settings::IntegerRange kRanks{.min = 0, .max = 1 << 20};
  options.quantization = read_quantization(settings);
  options.ranks_per_node = static_cast<int>(settings.integer("ranks-per-node", kRanks));
  if (options.ranks_per_node > 0 && !options.quantization.any()) {
    throw UsageError(fmt::format("{} is for --quantized-weights and --quantized-gradients",
                                 settings.described("ranks-per-node")));
  }
}

/// How many ranks there are is known once they have met; then it must divide them.
void read_tensor_parallel(const Settings& settings, TrainOptions& options) {
  const auto ranks = static_cast<int>(settings.integer("tp", {.min = 1, .max = 1024}));
  if (options.nproc > 1 && options.nproc % ranks != 0) {
    throw UsageError(fmt::format("{} does not divide {}: {} would be left over",
                                 settings.described("tp"), settings.described("nproc"),
                                 options.nproc % ranks));
  }
  read_with(settings, "tp",
            [&](const std::string&) { gpt::require_divisible(options.model, ranks); });
  options.model.part.ranks = ranks;
  if (!options.shape.sequence_parallel) return;
  if (ranks == 1) throw UsageError("--sp divides rows among tensor-parallel ranks: give --tp too");
  const std::int64_t rows = options.shape.rows();
  if (rows % ranks != 0) {
    throw UsageError(fmt::format(
        "--sp: {} x {} = {} rows, which {} ranks cannot divide evenly: {} "
        "would be left over",
        settings.described("batch"), settings.described("context"), rows, ranks, rows % ranks));
  }
}

void read_ranks(const Settings& settings, TrainOptions& options) {
  options.nproc = static_cast<int>(settings.integer("nproc", {.min = 1, .max = 1024}));
  read_tensor_parallel(settings, options);
  options.collectives = read_with(settings, "collectives", [](const std::string& name) {
    return collectives_of(name, "the name");
  });
  read_strategy(settings, options);
  read_exchanges(settings, options);
  if (settings.given("reduce-dtype"))
    options.reduce_dtype = parse_dtype(settings.choice("reduce-dtype", kDTypeNames));
  constexpr Settings::IntegerRange kElements{.min = 1, .max = std::int64_t{1} << 50};
  options.reduce_bucket_elements =
      static_cast<std::uint64_t>(settings.integer("reduce-bucket-size", kElements));
  options.prefetch_elements =
      static_cast<std::uint64_t>(settings.integer("prefetch-bucket-size", kElements));
}

EngineConfig::Speculation read_speculation(const Settings& settings) {
  using enum EngineConfig::Speculation;
  static constexpr std::array<std::string_view, 3> kWords{"auto", "never", "always"};
  const std::string word = settings.choice("speculate", kWords);
  return word == "never" ? kNever : word == "always" ? kAlways : kAuto;
}

/// One of `names`, which are in the order of the enumerators.
template <class Enum>
Enum read_name(const Settings& settings, const std::string& key,
               std::span<const std::string_view> names) {
  const std::string name = settings.choice(key, names);
  return static_cast<Enum>(std::ranges::find(names, name) - names.begin());
}

OptimizerConfig read_optimizer(const Settings& settings, DType dtype, std::uint64_t seed) {
  static constexpr std::array<std::string_view, 2> kRoundings{"nearest", "stochastic"};
  OptimizerConfig optimizer;
  optimizer.state = {read_name<OptimizerKind>(settings, "optimizer", optimizer_names()),
                     read_name<StateFormat>(settings, "state-format", state_format_names())};
  optimizer.rounding = read_name<Rounding>(settings, "rounding", kRoundings);
  optimizer.rounding_seed = seed;
  const std::vector<double> betas = settings.numbers("betas", 2, {.min = 0, .max = 0.999999});
  optimizer.beta1 = static_cast<float>(betas[0]);
  optimizer.beta2 = static_cast<float>(betas[1]);
  optimizer.weight_decay =
      static_cast<float>(settings.number("weight-decay", {.min = 0, .max = 100}));
  read_with(settings, "state-format", [&](const std::string&) {
    require_compatible(optimizer.state.format, optimizer.rounding, dtype == DType::kBFloat16);
  });
  return optimizer;
}

}  // namespace

gpt::RunShape read_run_shape(const Settings& settings) {
  gpt::RunShape shape;
  shape.batch = settings.integer("batch", {.min = 1, .max = 65'536});
  shape.accumulate = settings.integer("accumulate", {.min = 1, .max = 65'536});
  shape.context = settings.integer("context", {.min = 1, .max = 1 << 20});
  static constexpr std::array<std::string_view, 2> kWords{"block", "off"};
  shape.checkpointing = settings.choice("activation-checkpointing", kWords) == "off"
                            ? gpt::ActivationCheckpointing::kOff
                            : gpt::ActivationCheckpointing::kBlock;
  shape.sequence_parallel = settings.on("sp");
  return shape;
}

Quantization read_quantization(const Settings& settings) {
  constexpr Settings::IntegerRange kBits{.min = 4, .max = 16};
  const Quantization quantization{
      .weights = settings.on("quantized-weights"),
      .gradient_bits = static_cast<int>(settings.integer("quantized-gradients", kBits))};
  if (const int bits = quantization.gradient_bits; bits != 4 && bits != 8 && bits != 16)
    throw UsageError(settings.described("quantized-gradients") + ": give 4 or 8");
  return quantization;
}

StrategyRequest strategy_request(const Settings& settings) {
  constexpr Settings::IntegerRange kRanks{.min = 0, .max = 1 << 20};
  StrategyRequest request{.shard_group = static_cast<int>(settings.integer("shard-group", kRanks)),
                          .hpz = static_cast<int>(settings.integer("hpz", kRanks))};
  if (settings.given("zero-stage"))
    request.zero_stage = static_cast<int>(settings.integer("zero-stage", kStages));
  if (settings.given("strategy"))
    request.name = read_name<StrategyName>(settings, "strategy", kStrategyNames);
  return request;
}

TrainOptions read_train_options(const Settings& settings) {
  TrainOptions options;
  options.model =
      read_with(settings, "model", [](const std::string& text) { return gpt::parse_model(text); });
  options.model.dtype = *parse_dtype(settings.choice("dtype", kDTypeNames));
  options.data = settings.required("data", "a text file or a folder of them");
  options.store = settings.required("store", "the folder where the training state is, or shall be");
  options.store_directories = parse_store(options.store);
  options.steps =
      static_cast<std::uint64_t>(settings.integer("steps", {.min = 1, .max = 1'000'000'000}));
  options.shape = read_run_shape(settings);
  if (options.shape.context > options.model.context_max) {
    throw UsageError(fmt::format("{} is longer than the model's {} positions: give at most that",
                                 settings.described("context"), options.model.context_max));
  }

  options.schedule = read_schedule(settings, options.steps);
  options.loss_scale = read_loss_scale(settings, options.model.dtype);
  options.clip_norm = settings.number("clip", {.min = 0, .max = 1e30});
  options.param_groups = read_param_groups(settings, gpt::make_spec(options.model));
  options.param_groups_text = settings.text("param-groups");

  options.eval_every = static_cast<std::uint64_t>(settings.integer("eval-every", {}));
  options.seed = static_cast<std::uint64_t>(settings.integer("seed", {}));
  options.optimizer = read_optimizer(settings, options.model.dtype, options.seed);
  options.device_bytes = settings.size("device-memory", kBudgetBytesMin);
  options.host_bytes = settings.size("host-memory", kBudgetBytesMin);
  options.placement = read_with(settings, "placement",
                                [](const std::string& text) { return parse_placement(text); });
  options.slots = static_cast<int>(settings.integer("slots", {.min = 1, .max = 2}));
  options.threads = static_cast<std::size_t>(settings.integer("threads", {.min = 0, .max = 1024}));
  read_ranks(settings, options);
  static constexpr std::array<std::string_view, 2> kResume{"auto", "never"};
  options.resume = settings.choice("resume", kResume) == "never" ? EngineConfig::Resume::kNever
                                                                 : EngineConfig::Resume::kAuto;
  options.speculation = read_speculation(settings);
  options.trace_path = settings.text("trace");
  options.json_path = settings.text("json");
  options.print_loss_bits = settings.on("print-loss-bits");
  options.per_rank = settings.on("per-rank");
  return options;
}

}  // namespace ziggurat::cli
