// SPDX-License-Identifier: Apache-2.0
// integrations/cli/memory_advice.cc: describes a run to core/plan, and finds what each remedy saves
// by planning again with it.
#include "integrations/cli/memory_advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/bytes.h"
#include "base/disk_full.h"
#include "base/memory_exhausted.h"
#include "core/engine/engine_config.h"
#include "core/plan/auto_placement.h"

namespace ziggurat::cli {
namespace {

/// Returns the bytes of the records of `count` elements.
std::uint64_t record_bytes(const TrainOptions& options, std::uint64_t count) {
  return count * record_format(options.engine.optimizer.state).tile_bytes() / kTileElements;
}
std::uint64_t value_bytes(const gpt::ModelConfig& model) {
  return gpt::make_spec(model).count() * size_bytes(model.dtype);
}

/// Returns one rank's share of the parameters' bytes.
std::uint64_t params_share(std::uint64_t whole_bytes, const Strategy& strategy) {
  return whole_bytes / static_cast<std::uint64_t>(strategy.param_shards());
}
/// Returns one rank's share of the bytes of the gradients or the records.
std::uint64_t updates_share(std::uint64_t whole_bytes, const Strategy& strategy) {
  return whole_bytes / static_cast<std::uint64_t>(strategy.update_shards());
}

/// Finds by how much each change of a setting lowers the smallest budget.
class Remedies {
 public:
  Remedies(const TrainOptions& options, std::size_t threads, const Strategy& strategy,
           MemoryBudget budget)
      : options_(options), threads_(threads), strategy_(strategy), budget_(budget) {
    now_bytes_ = smallest(options);
  }

  void consider(const std::string& text, const std::function<void(TrainOptions&)>& change) {
    TrainOptions changed = options_;
    change(changed);
    const std::uint64_t then_bytes = smallest(changed);
    if (then_bytes < now_bytes_) remedies_.push_back({text, now_bytes_ - then_bytes});
  }
  /// Considers moving one class of state to the tier `to`, if it is on `from`.
  void move(const char* name, Tier Placement::*where, Tier from, Tier to) {
    consider(fmt::format("--placement {}={}", name, to_string(to)), [&](TrainOptions& changed) {
      Tier& tier = changed.engine.placement.*where;
      if (tier == from) tier = to;
    });
  }

  std::vector<std::string> ranked() {
    std::ranges::stable_sort(remedies_, std::ranges::greater(), &Remedy::saved_bytes);
    std::vector<std::string> lines;
    for (const Remedy& remedy : remedies_)
      lines.push_back(fmt::format("{}: {} less", remedy.text, format_bytes(remedy.saved_bytes)));
    return lines;
  }

 private:
  struct Remedy {
    std::string text;
    std::uint64_t saved_bytes;
  };
  std::uint64_t smallest(const TrainOptions& options) const {
    const Budgets budgets = smallest_budgets(run_request(options, threads_, strategy_));
    return budget_ == MemoryBudget::kDevice ? budgets.device_bytes : budgets.host_bytes;
  }

  const TrainOptions& options_;
  std::size_t threads_;
  const Strategy& strategy_;
  MemoryBudget budget_;
  std::uint64_t now_bytes_ = 0;
  std::vector<Remedy> remedies_;
};

void consider_device(Remedies& remedies, const gpt::RunShape& shape) {
  remedies.consider("--activation-checkpointing block", [](TrainOptions& changed) {
    changed.shape.checkpointing = gpt::ActivationCheckpointing::kBlock;
  });
  const auto halve = [&](const char* flag, std::int64_t gpt::RunShape::*number) {
    const std::int64_t half = std::max<std::int64_t>(1, shape.*number / 2);
    remedies.consider(fmt::format("{} {}", flag, half),
                      [&](TrainOptions& changed) { changed.shape.*number = half; });
  };
  halve("--batch", &gpt::RunShape::batch);
  halve("--accumulate", &gpt::RunShape::accumulate);
  halve("--context", &gpt::RunShape::context);
  remedies.move("optimizer", &Placement::optimizer, Tier::kDevice, Tier::kHost);
  remedies.move("params", &Placement::params, Tier::kDevice, Tier::kHost);
  remedies.move("grads", &Placement::grads, Tier::kDevice, Tier::kHost);
}

void consider_host(Remedies& remedies) {
  remedies.move("optimizer", &Placement::optimizer, Tier::kHost, Tier::kNvme);
  remedies.move("grads", &Placement::grads, Tier::kHost, Tier::kNvme);
  remedies.move("params", &Placement::params, Tier::kHost, Tier::kNvme);
}

std::vector<std::string> memory_advice(const MemoryShortage& shortage, const TrainOptions& options,
                                       std::size_t threads, const Strategy& strategy) {
  Remedies remedies(options, threads, strategy, shortage.budget);
  const bool device = shortage.budget == MemoryBudget::kDevice;
  if (device)
    consider_device(remedies, options.shape);
  else
    consider_host(remedies);
  std::vector<std::string> lines = remedies.ranked();
  const char* const flag = device ? "--device-memory" : "--host-memory";
  if (shortage.smallest_bytes > shortage.had_bytes) {
    lines.insert(lines.begin(), fmt::format("{} {}MiB: this is the smallest for these settings",
                                            flag, round_up(shortage.smallest_bytes, kMiB) / kMiB));
  } else {
    lines.push_back(fmt::format("a larger {}", flag));
  }
  return lines;
}

bool is_of_store(const std::string& path, const TrainOptions& options) {
  return std::ranges::any_of(options.engine.store, [&](const StoreDirectory& directory) {
    return path.starts_with(directory.path + "/");
  });
}

std::vector<std::string> space_advice(const TrainOptions& options) {
  std::vector<std::string> lines;
  if (options.engine.slots == 2)
    lines.emplace_back(
        "--slots 1 with a new --store takes half the space, but a kill within a step loses the "
        "run");
  lines.emplace_back("choose a --store on a filesystem with more space");
  return lines;
}

}  // namespace

RunRequest run_request(const TrainOptions& options, std::size_t threads, const Strategy& strategy) {
  const EngineConfig& engine = options.engine;
  const int parts = engine.tensor_parallel;
  gpt::ModelConfig part = options.model;
  part.part = {.rank = 0, .ranks = parts};
  RunRequest request{.model = gpt::make_spec(part),
                     .state = engine.optimizer.state,
                     .sharding = Sharding::of(strategy, 0),
                     .placement = engine.placement,
                     .reduction = {.dtype = engine.reduce_dtype.value_or(part.dtype),
                                   .bucket_elements = engine.reduce_bucket_elements},
                     .device = {.trainer = gpt::Trainer::need(part, options.shape, threads),
                                .keep_gathered = strategy.keeps_params_to_backward},
                     .slots = engine.slots,
                     .saves = engine.checkpoint.saves,
                     .budgets = {options.device_bytes, engine.host_budget_bytes}};
  request.outstanding_bytes = most_outstanding_bytes(engine.store);
  request.sharding.quantization = engine.quantization;
  request.sharding.ranks_per_node = engine.ranks_per_node / parts;
  request.sharding.tensor = part.part;
  return request;
}

std::uint64_t training_state_bytes(const TrainOptions& options) {
  const gpt::ModelConfig whole = options.model.whole();
  return 2 * value_bytes(whole) + record_bytes(options, gpt::make_spec(whole).count());
}

namespace {

/// Returns the placement that open() will choose, if it is free to choose and the budgets are
/// known; otherwise the placement that was asked for. A state that does not fit is no error,
/// because open() reports it.
Placement expected_placement(const TrainOptions& options, const Strategy& strategy) {
  const RunRequest request = run_request(options, /*threads=*/1, strategy);
  const bool chosen = request.placement.automatic && request.budgets.device_bytes > 0 &&
                      request.budgets.host_bytes > 0;
  if (!chosen) return request.placement;
  try {
    return choose_placement(request).placement;
  } catch (const MemoryExhausted&) {
    return request.placement;
  }
}

}  // namespace

WritePlan write_plan(const TrainOptions& options, const Strategy& strategy) {
  const Placement placement = expected_placement(options, strategy);
  const std::uint64_t values_bytes = value_bytes(options.model);
  const std::uint64_t all_records = record_bytes(options, gpt::make_spec(options.model).count());
  const std::uint64_t records = updates_share(all_records, strategy);
  const std::uint64_t params = params_share(values_bytes, strategy);
  const std::uint64_t grads = updates_share(values_bytes, strategy);
  WritePlan plan;
  plan.first_bytes = records;
  if (placement.optimizer == Tier::kNvme) {
    plan.per_step_bytes += records;
  } else {
    plan.at_end_bytes += records;
  }
  if (placement.params == Tier::kNvme) {
    plan.first_bytes += 2 * params;
    plan.per_step_bytes += params;
  }
  if (placement.grads == Tier::kNvme) {
    plan.first_bytes += grads;
    plan.per_step_bytes += grads;
  }
  return plan;
}

std::vector<std::string> advice(const Error& error, const TrainOptions& options,
                                std::size_t threads, const Strategy& strategy) {
  if (const auto* const full = dynamic_cast<const DiskFull*>(&error); full != nullptr)
    return is_of_store(full->path(), options) ? space_advice(options) : std::vector<std::string>();
  const auto* const exhausted = dynamic_cast<const MemoryExhausted*>(&error);
  if (exhausted == nullptr) return {};
  return memory_advice(exhausted->shortage(), options, threads, strategy);
}

}  // namespace ziggurat::cli
