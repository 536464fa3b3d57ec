// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan.cc: `ziggurat plan`, which shows what a model would need on each rank and
// node, as a table or JSON.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "core/plan/auto_placement.h"
#include "core/plan/machine_profile.h"
#include "core/plan/strategies/words.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/plan_options.h"

namespace ziggurat::cli {
namespace {

constexpr std::array kTiers{Tier::kDevice, Tier::kHost, Tier::kNvme};
constexpr std::array kExchanges{
    Exchange::kForwardGather, Exchange::kBackwardGather, Exchange::kGradients,
    Exchange::kReplicas,      Exchange::kUpdateGather,   Exchange::kTensorForward,
    Exchange::kTensorAgain,   Exchange::kTensorBackward, Exchange::kTensorShared};
constexpr std::array kClasses{
    StateClass::kParams,     StateClass::kSecondaryParams, StateClass::kGradients,
    StateClass::kMasters,    StateClass::kMoments,         StateClass::kSecondSlot,
    StateClass::kCheckpoint, StateClass::kStoreTables,     StateClass::kActivations,
    StateClass::kLiveParams, StateClass::kAccumulator,     StateClass::kNormSums,
    StateClass::kBucket,     StateClass::kQuantizedParams, StateClass::kKeptRecords,
    StateClass::kWorkItems,  StateClass::kSaveBuffers,     StateClass::kGaps};

/// Prints a table of bytes in one decimal unit, chosen for the largest value.
class ByteTable {
 public:
  explicit ByteTable(std::uint64_t largest) {
    if (largest >= 1'000'000'000) return;
    unit_ = 1e6;
    unit_text_ = "MB (1e6 bytes)";
  }

  const char* unit() const noexcept { return unit_text_; }

  void head(std::string_view tier, const std::vector<std::string>& names) const {
    print("", tier, names);
  }
  /// Prints a row, or nothing if every column is zero.
  void row(std::string_view name, std::string_view tier, const std::vector<std::uint64_t>& bytes) {
    if (std::ranges::all_of(bytes, [](std::uint64_t b) { return b == 0; })) return;
    std::vector<std::string> cells;
    for (const std::uint64_t value : bytes)
      cells.push_back(value == 0 ? "-" : fmt::format("{:.3f}", static_cast<double>(value) / unit_));
    print(name, tier, cells);
  }

 private:
  static void print(std::string_view name, std::string_view tier,
                    const std::vector<std::string>& cells) {
    fmt::print("{:<30} {:<7}", name, tier);
    for (const std::string& cell : cells)
      fmt::print(" {:>{}}", cell, std::max<std::size_t>(12, cell.size()));
    fmt::print("\n");
  }

  double unit_ = 1e9;
  const char* unit_text_ = "GB (1e9 bytes)";
};

/// Returns the most bytes in flight with which one of this machine's measured drives is fastest:
/// on which of them the store is going to be, a plan is not told.
std::uint64_t most_in_flight() {
  std::uint64_t most = 0;
  for (const DriveProfile& drive : read_default_profile().value_or(MachineProfile{}).drives)
    most = std::max(most, drive.outstanding_bytes());
  return most;
}

PlannedStrategy planned(const PlanCommand& command, const Strategy& strategy,
                        std::uint64_t in_flight_bytes) {
  PlannedStrategy column{.strategy = strategy, .memory = {}, .run = {}, .refusal = {}};
  MemoryRequest at_rest{.model = command.model.size,
                        .recipe = command.recipe,
                        .strategy = strategy,
                        .placement = command.placement,
                        .slots = command.slots};
  if (command.model.config) {
    try {
      RunRequest request = run_request(command.run, command.run.threads, strategy);
      request.outstanding_bytes = in_flight_bytes;
      const bool budgets = request.budgets.device_bytes > 0 && request.budgets.host_bytes > 0;
      if (request.placement.automatic && budgets)  // as the engine chooses it
        at_rest.placement = request.placement = choose_placement(request).placement;
      column.run = plan_run(request);
      at_rest.chunk_tiles_max = column.run->chunk_tiles;
    } catch (const MemoryExhausted& exhausted) {
      if (command.strategies.size() == 1) throw;
      column.refusal = exhausted.what();
    }
  }
  column.memory = rank_memory(at_rest);
  if (column.run) add_in_use(column.memory, *column.run);
  return column;
}

std::vector<PlannedStrategy> planned(const PlanCommand& command) {
  std::vector<PlannedStrategy> all;
  const std::uint64_t in_flight_bytes = command.model.config ? most_in_flight() : 0;
  for (const Strategy& strategy : command.strategies)
    all.push_back(planned(command, strategy, in_flight_bytes));
  return all;
}

template <class Column, class Value>
std::vector<std::uint64_t> each(const std::vector<Column>& columns, const Value& value) {
  std::vector<std::uint64_t> values;
  for (const Column& column : columns) values.push_back(value(column));
  return values;
}

std::vector<std::string> names_of(const PlanCommand& command) {
  std::vector<std::string> names;
  for (const Strategy& strategy : command.strategies)
    names.push_back(strategy.dp == 1 ? "one rank" : to_string(strategy));
  return names;
}

/// Returns the types and the bytes of a parameter, its gradient and its optimizer state, such as "2
/// + 2 + 12".
std::string recipe_text(const Recipe& recipe) {
  const std::size_t element = size_bytes(recipe.dtype);
  return fmt::format("{}, {}: {} + {} + {:.4g} bytes a parameter", to_string(recipe.dtype),
                     to_string(recipe.state), element, element,
                     state_traffic(recipe.state, /*param_elsewhere=*/false).written);
}

void print_opening(const PlanCommand& command) {
  const PlannedModel& model = command.model;
  fmt::print("{}: {} parameters{}; {}\n", model.name, grouped(model.size.model_count),
             model.config
                 ? fmt::format(" ({} layers of width {}, vocabulary {})", model.config->layers,
                               model.config->width, grouped(model.config->vocabulary))
                 : "",
             recipe_text(command.recipe));
  fmt::print("{} rank{} as {}, {} to a node\n", grouped(command.world.ranks),
             command.world.ranks == 1 ? "" : "s", to_string(command.mesh),
             command.world.ranks_per_node);
  if (!command.warning.empty()) fmt::print("warning: {}\n", command.warning);
}

/// Prints the budgets of each strategy and what the engine would do with them, or why it would
/// refuse them.
void print_budgets(const std::vector<PlannedStrategy>& columns) {
  for (const PlannedStrategy& column : columns) {
    const std::string name =
        columns.size() == 1 ? "" : fmt::format("{}: ", to_string(column.strategy));
    if (!column.refusal.empty()) fmt::print("\n{}{}\n", name, column.refusal);
    if (!column.run) continue;
    const RunPlan& run = *column.run;
    const auto mib = [](std::uint64_t size_bytes) { return round_up(size_bytes, kMiB) / kMiB; };
    fmt::print(
        "\n{}device_memory is {} MiB and must be at least {} MiB; host_memory is {} MiB and must "
        "be at least {} MiB\n",
        name, mib(run.budgets.device_bytes), mib(run.smallest.device_bytes),
        mib(run.budgets.host_bytes), mib(run.smallest.host_bytes));
    fmt::print(
        "  each chunk has at most {} parameters; there are {} chunks, {}; memory for {} "
        "accumulator{} is set aside\n",
        grouped(run.chunk_tiles * kTileElements), grouped(run.chunk_count),
        run.host.item_bytes == 0
            ? "which are updated where they are"
            : fmt::format("of which {} are in host memory at once and {} stay there",
                          run.host.items, run.host.kept_item_bytes.size()),
        run.device.accumulators, run.device.accumulators == 1 ? "" : "s");
  }
}

void print_memory(const PlanCommand& command, const std::vector<RankMemory>& columns) {
  const int per_node = command.world.ranks_per_node;
  std::uint64_t largest = 0;
  for (const RankMemory& column : columns) {
    for (const Tier tier : kTiers) largest = std::max(largest, column.bytes(tier));
  }
  ByteTable table(largest);
  fmt::print("\nBytes of a rank, in {}\n", table.unit());
  table.head("on", names_of(command));
  for (const bool resting : {true, false}) {
    for (const StateClass kind : kClasses) {
      if (at_rest(kind) != resting) continue;
      for (const Tier tier : kTiers) {
        table.row(to_string(kind), to_string(tier), each(columns, [&](const RankMemory& column) {
                    return column.bytes(kind, tier);
                  }));
      }
    }
  }
  table.row("  padding in the above", "",
            each(columns, [](const RankMemory& column) { return column.padding_bytes; }));
  table.row("  model states, one copy", "",
            each(columns, [](const RankMemory& column) { return column.model_state_bytes(); }));
  std::vector<std::uint64_t> published;
  for (const Strategy& strategy : command.strategies) {
    published.push_back(static_cast<std::uint64_t>(
        published_state_bytes(command.model.size, command.recipe, strategy)));
  }
  table.row("  by the ZeRO papers' formula", "", published);
  for (const int ranks : {1, per_node}) {
    fmt::print("\n");
    for (const Tier tier : kTiers) {
      table.row(ranks == 1 ? "sum of a rank" : fmt::format("sum of a node ({} ranks)", ranks),
                to_string(tier), each(columns, [&](const RankMemory& column) {
                  return column.bytes(tier) * static_cast<std::uint64_t>(ranks);
                }));
    }
    if (per_node == 1) break;
  }
}

std::vector<StepTraffic> traffics(const PlanCommand& command, int passes) {
  std::vector<StepTraffic> all;
  for (const Strategy& strategy : command.strategies) {
    TrafficRequest request = traffic_request(command, strategy, command.quantization);
    request.passes = passes;
    all.push_back(step_traffic(request));
  }
  return all;
}

void print_traffic(const PlanCommand& command) {
  const std::vector<StepTraffic> columns = traffics(command, 1);
  const std::vector<std::uint64_t> sent =
      each(columns, [](const StepTraffic& column) { return column.sent().total(); });
  ByteTable table(std::ranges::max(sent));
  fmt::print("\nBytes that a rank sends in a step, in {}\n", table.unit());
  table.head("", names_of(command));
  for (const Exchange exchange : kExchanges) {
    table.row(to_string(exchange), "", each(columns, [&](const StepTraffic& column) {
                return column.sent(exchange).total();
              }));
  }
  table.row("sum", "", sent);
  table.row("  within its node", "",
            each(columns, [](const StepTraffic& column) { return column.sent().same_node; }));
  table.row("  to other nodes", "",
            each(columns, [](const StepTraffic& column) { return column.sent().other_nodes; }));
  if (command.mesh.tp > 1 && !command.model.config) {
    fmt::print(
        "The sum leaves out what tensor-parallel ranks exchange in every layer, because a mere "
        "count of parameters has no layers; give LAYERSxWIDTHxHEADS to include it.\n");
  }
  if (command.accumulate == 1 || command.mesh.dp == 1) return;
  table.row(fmt::format("sum, {} passes over the model", command.accumulate), "",
            each(traffics(command, command.accumulate),
                 [](const StepTraffic& column) { return column.sent().total(); }));
  fmt::print(
      "The {} micro-batches of a unit run one after the other before those of the next unit; a "
      "loop that runs each micro-batch through the whole model would make {} passes.\n",
      command.accumulate, command.accumulate);
}

void print_limits(const PlanCommand& command) {
  const bool stage_1 = std::ranges::any_of(
      command.strategies, [](const Strategy& strategy) { return strategy.zero_stage == 1; });
  if (stage_1 && command.mesh.dp > 1) {
    fmt::print(
        "\nStage 1 keeps what stage 2 keeps, because a gradient is whole only while its unit is in "
        "backward. ZeRO's formula counts whole gradients.");
  }
  if (command.model.config) return;
  fmt::print(
      "\nThe table leaves out activations and the trainer's workspace, what a step uses beside the "
      "state at rest, and padding, because a mere count of parameters has no units; give "
      "LAYERSxWIDTHxHEADS to include them.\n");
}

nlohmann::json json_of(const RunPlan& run) {
  const auto budgets = [](const Budgets& of) -> nlohmann::json {
    return {{"device_bytes", of.device_bytes}, {"host_bytes", of.host_bytes}};
  };
  return {{"budgets", budgets(run.budgets)},
          {"smallest", budgets(run.smallest)},
          {"chunk_parameters", run.chunk_tiles * kTileElements},
          {"chunks", run.chunk_count},
          {"work_items", run.host.items},
          {"kept_records", run.host.kept_item_bytes.size()},
          {"accumulators", run.device.accumulators}};
}

nlohmann::json json_of(const PlanCommand& command, const PlannedStrategy& column) {
  const Strategy& strategy = column.strategy;
  const RankMemory& memory = column.memory;
  nlohmann::json items = nlohmann::json::array();
  for (const MemoryItem& item : memory.items) {
    items.push_back({{"class", to_string(item.kind)},
                     {"tier", to_string(item.tier)},
                     {"bytes", item.size_bytes}});
  }
  const StepTraffic traffic =
      step_traffic(traffic_request(command, strategy, command.quantization));
  nlohmann::json exchanges = nlohmann::json::array();
  for (const TrafficItem& item : traffic.items) {
    exchanges.push_back({{"exchange", to_string(item.exchange)},
                         {"same_node_bytes", item.sent.same_node},
                         {"other_nodes_bytes", item.sent.other_nodes}});
  }
  nlohmann::json rank;
  nlohmann::json node;
  for (const Tier tier : kTiers) {
    rank[std::string(to_string(tier))] = memory.bytes(tier);
    node[std::string(to_string(tier))] =
        memory.bytes(tier) * static_cast<std::uint64_t>(command.world.ranks_per_node);
  }
  nlohmann::json object{{"strategy", to_string(strategy)},
                        {"zero_stage", strategy.zero_stage},
                        {"shard_group", strategy.shard_group},
                        {"hpz", strategy.hpz},
                        {"model_state_bytes", memory.model_state_bytes()},
                        {"published_state_bytes",
                         published_state_bytes(command.model.size, command.recipe, strategy)},
                        {"padding_bytes", memory.padding_bytes},
                        {"rank_bytes", std::move(rank)},
                        {"node_bytes", std::move(node)},
                        {"items", std::move(items)},
                        {"sent_bytes", traffic.sent().total()},
                        {"sent", std::move(exchanges)}};
  if (column.run) object["run"] = json_of(*column.run);
  if (!column.refusal.empty()) object["refusal"] = column.refusal;
  return object;
}

void write_json(const PlanCommand& command, const std::vector<PlannedStrategy>& columns) {
  nlohmann::json strategies = nlohmann::json::array();
  for (const PlannedStrategy& column : columns) strategies.push_back(json_of(command, column));
  const nlohmann::json report{
      {"model", command.model.name},
      {"parameters", command.model.size.model_count},
      {"ranks", command.world.ranks},
      {"ranks_per_node", command.world.ranks_per_node},
      {"mesh", {{"dp", command.mesh.dp}, {"tp", command.mesh.tp}, {"pp", 1}, {"cp", 1}}},
      {"dtype", to_string(command.recipe.dtype)},
      {"optimizer", to_string(command.recipe.state.optimizer)},
      {"state_format", to_string(command.recipe.state.format)},
      {"placement", to_string(command.placement)},
      {"strategies", std::move(strategies)}};
  write_output(command.json_path, report.dump(2) + "\n");
}

}  // namespace

int plan(const PlanCommand& command) {
  const std::vector<PlannedStrategy> columns = planned(command);
  if (!command.json_path.empty()) {
    write_json(command, columns);
    return 0;
  }
  print_opening(command);
  if (command.memory) {
    std::vector<RankMemory> memories;
    for (const PlannedStrategy& column : columns) memories.push_back(column.memory);
    print_memory(command, memories);
    print_budgets(columns);
    print_limits(command);
  }
  if (command.traffic && command.world.ranks > 1) print_traffic(command);
  return 0;
}

}  // namespace ziggurat::cli
