// SPDX-License-Identifier: Apache-2.0
// integrations/cli/memory_advice.cc: sums over the model's units, and each remedy's saving by
// summing again without it.
#include "integrations/cli/memory_advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "base/bytes.h"

namespace ziggurat::cli {
namespace {

// Buffers on the device are aligned and freed in another order than they came; what that costs at
// most, as seen in tests.
constexpr std::uint64_t kFragmentationBytes = kMiB;

struct ModelSizes {
  std::uint64_t count = 0;         // elements
  std::uint64_t values_bytes = 0;  // of their parameters, and of their gradients
  std::uint64_t embedding =
      0;  // of unit 0, in use through the whole backward: its matrix is tied to the head
  std::uint64_t largest_block = 0;  // of the other units
};

ModelSizes sizes_of(const gpt::ModelConfig& model) {
  ModelSizes sizes;
  const ModelSpec spec = gpt::make_spec(model);
  sizes.count = spec.count();
  sizes.values_bytes = sizes.count * size_bytes(model.dtype);
  for (std::size_t i = 0; i < spec.units.size(); ++i) {
    std::uint64_t& place = i == gpt::kEmbeddingUnit ? sizes.embedding : sizes.largest_block;
    place = std::max(place, spec.units[i].count());
  }
  return sizes;
}

/// Of `count` elements' records.
std::uint64_t record_bytes(const TrainOptions& options, std::uint64_t count) {
  return count * record_format(options.engine.optimizer.state).tile_bytes() / kTileElements;
}

/// What one rank has of the parameters' bytes.
std::uint64_t params_share(std::uint64_t whole_bytes, const Strategy& strategy) {
  return whole_bytes / static_cast<std::uint64_t>(strategy.param_shards());
}
/// And of the gradients' or records'.
std::uint64_t updates_share(std::uint64_t whole_bytes, const Strategy& strategy) {
  return whole_bytes / static_cast<std::uint64_t>(strategy.update_shards());
}

struct Remedy {
  std::string text;
  std::uint64_t saved_bytes;
};

std::vector<std::string> ranked(std::vector<Remedy> remedies) {
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const Remedy& a, const Remedy& b) { return a.saved_bytes > b.saved_bytes; });
  std::vector<std::string> lines;
  for (const Remedy& remedy : remedies) {
    if (remedy.saved_bytes > 0)
      lines.push_back(fmt::format("{}: {} less", remedy.text, format_bytes(remedy.saved_bytes)));
  }
  return lines;
}

std::vector<std::string> device_advice(const TrainOptions& options, std::size_t threads,
                                       const Strategy& strategy) {
  const std::uint64_t now = device_need(options, threads, strategy).total_bytes();
  std::vector<Remedy> remedies;
  const auto consider = [&](std::string text, const TrainOptions& changed) {
    const std::uint64_t then = device_need(changed, threads, strategy).total_bytes();
    remedies.push_back({std::move(text), now - std::min(now, then)});
  };
  const auto change = [&](auto&& edit) {
    TrainOptions changed = options;
    edit(changed);
    return changed;
  };
  consider("--activation-checkpointing block", change([](TrainOptions& o) {
             o.shape.checkpointing = gpt::ActivationCheckpointing::kBlock;
           }));
  const std::int64_t batch = std::max<std::int64_t>(1, options.shape.batch / 2);
  consider(fmt::format("--batch {}", batch),
           change([&](TrainOptions& o) { o.shape.batch = batch; }));
  const std::int64_t accumulate = std::max<std::int64_t>(1, options.shape.accumulate / 2);
  consider(fmt::format("--accumulate {}", accumulate),
           change([&](TrainOptions& o) { o.shape.accumulate = accumulate; }));
  const std::int64_t context = std::max<std::int64_t>(1, options.shape.context / 2);
  consider(fmt::format("--context {}", context),
           change([&](TrainOptions& o) { o.shape.context = context; }));
  consider("--placement optimizer=host", change([](TrainOptions& o) {
             if (o.engine.placement.optimizer == Tier::kDevice)
               o.engine.placement.optimizer = Tier::kHost;
           }));
  consider("--placement params=host", change([](TrainOptions& o) {
             if (o.engine.placement.params == Tier::kDevice)
               o.engine.placement.params = Tier::kHost;
           }));
  consider("--placement grads=host", change([](TrainOptions& o) {
             if (o.engine.placement.grads == Tier::kDevice) o.engine.placement.grads = Tier::kHost;
           }));
  std::vector<std::string> lines = ranked(std::move(remedies));
  if (now > options.device_bytes) {
    lines.insert(lines.begin(),
                 fmt::format("--device-memory {}MiB: the smallest for these settings",
                             round_up(now, kMiB) / kMiB));
  } else {
    lines.push_back("a larger --device-memory");
  }
  return lines;
}

std::vector<std::string> host_advice(const TrainOptions& options, const Strategy& strategy) {
  const ModelSizes sizes = sizes_of(options.model);
  std::vector<Remedy> remedies;
  if (options.engine.placement.optimizer == Tier::kHost)
    remedies.push_back({"--placement optimizer=nvme",
                        updates_share(record_bytes(options, sizes.count), strategy)});
  if (options.engine.placement.grads == Tier::kHost)
    remedies.push_back({"--placement grads=nvme", updates_share(sizes.values_bytes, strategy)});
  if (options.engine.placement.params == Tier::kHost)
    remedies.push_back({"--placement params=nvme", params_share(sizes.values_bytes, strategy)});
  std::vector<std::string> lines = ranked(std::move(remedies));
  lines.push_back("a larger --host-memory");
  return lines;
}

}  // namespace

std::string DeviceNeed::text() const {
  std::string list =
      fmt::format("activations {}, params {}, gradients {}", format_bytes(workspace_bytes),
                  format_bytes(params_bytes), format_bytes(gradient_bytes));
  if (optimizer_bytes > 0) list += fmt::format(", optimizer {}", format_bytes(optimizer_bytes));
  return list;
}

DeviceNeed device_need(const TrainOptions& options, std::size_t threads, const Strategy& strategy) {
  const ModelSizes sizes = sizes_of(options.model);
  const std::uint64_t in_use = sizes.embedding + sizes.largest_block;
  DeviceNeed need;
  need.workspace_bytes = gpt::Trainer::workspace_bytes(options.model, options.shape, threads);
  const std::uint64_t in_use_bytes = in_use * size_bytes(options.model.dtype);
  // Where slices are at home, whole units are gathered beside them.
  const bool here = options.engine.placement.params == Tier::kDevice;
  const bool gathered = !here || strategy.param_shards() > 1;
  need.params_bytes =
      (here ? params_share(sizes.values_bytes, strategy) : 0) +
      (gathered ? (strategy.keeps_params_to_backward ? sizes.values_bytes : in_use_bytes) : 0) +
      kFragmentationBytes;
  need.gradient_bytes = 4 * in_use + (options.engine.placement.grads == Tier::kDevice
                                          ? updates_share(sizes.values_bytes, strategy)
                                          : 0);
  if (options.engine.placement.optimizer == Tier::kDevice)
    need.optimizer_bytes = updates_share(record_bytes(options, sizes.count), strategy);
  return need;
}

void require_device_budget(const TrainOptions& options, std::size_t threads,
                           const Strategy& strategy) {
  const DeviceNeed need = device_need(options, threads, strategy);
  if (need.total_bytes() <= options.device_bytes) return;
  throw Error(
      ErrorCode::kResourceExhausted,
      fmt::format("--device-memory {} is too small; the smallest for these settings is {}: {}",
                  format_bytes(options.device_bytes), format_bytes(need.total_bytes()),
                  need.text()));
}

std::uint64_t training_state_bytes(const TrainOptions& options) {
  const ModelSizes sizes = sizes_of(options.model.whole());
  return 2 * sizes.values_bytes + record_bytes(options, sizes.count);
}

WritePlan write_plan(const TrainOptions& options, const Strategy& strategy) {
  const ModelSizes sizes = sizes_of(options.model);
  const std::uint64_t records = updates_share(record_bytes(options, sizes.count), strategy);
  const std::uint64_t params = params_share(sizes.values_bytes, strategy);
  const std::uint64_t grads = updates_share(sizes.values_bytes, strategy);
  WritePlan plan;
  plan.fill_bytes = (static_cast<std::uint64_t>(options.engine.slots) + 1) * records;
  if (options.engine.placement.optimizer == Tier::kNvme) {
    plan.per_step_bytes += records;
  } else {
    plan.at_end_bytes += records;
  }
  if (options.engine.placement.params == Tier::kNvme) {
    plan.fill_bytes += 2 * params;
    plan.per_step_bytes += params;
  }
  if (options.engine.placement.grads == Tier::kNvme) {
    plan.fill_bytes += grads;
    plan.per_step_bytes += grads;
  }
  return plan;
}

std::vector<std::string> advice(const Error& error, const TrainOptions& options,
                                std::size_t threads, const Strategy& strategy) {
  if (error.code() != ErrorCode::kResourceExhausted) return {};
  const std::string_view message = error.what();
  if (error.native() == ENOSPC || error.native() == EDQUOT || error.native() == EFBIG) {
    std::vector<std::string> lines;
    if (options.engine.slots == 2)
      lines.emplace_back(
          "--slots 1 with a new --store: half the space; a kill within a step loses the run");
    lines.emplace_back("a --store on a filesystem with more space");
    return lines;
  }
  if (message.find("device") != std::string_view::npos)
    return device_advice(options, threads, strategy);
  return host_advice(options, strategy);
}

}  // namespace ziggurat::cli
