// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/deepspeed_keys.cc: the table.
#include "integrations/deepspeed/deepspeed_keys.h"

#include <algorithm>
#include <array>

namespace ziggurat {
namespace {

using enum DeepSpeedKey::Use;

constexpr std::string_view kOwnWay = "changes nothing: it is done so always";
constexpr std::string_view kBudgets =
    "changes nothing: buffers come out of --host-memory and --device-memory";
constexpr std::string_view kReports =
    "changes nothing: see the run's own lines, --json and --trace";
constexpr std::string_view kNotBuilt = "it is not built; leave it out";
constexpr std::string_view kNoSuchState =
    "choose how state is kept with \"state-format\" in place of it";

constexpr DeepSpeedKey kTop[] = {
    {"train_micro_batch_size_per_gpu", kAs, "batch"},
    {"gradient_accumulation_steps", kAs, "accumulate"},
    {"train_batch_size", kNoted, "",
     "changes nothing: it is micro-batch x accumulation x ranks, and those are read"},
    {"gradient_clipping", kAs, "clip"},
    {"communication_data_type", kAs, "reduce-dtype"},
    {"tensor_parallel.autotp_size", kUnlessOne, "tp"},
    {"steps_per_print", kNoted, "", kReports},
    {"wall_clock_breakdown", kNoted, "", kReports},
    {"memory_breakdown", kNoted, "", kReports},
    {"dump_state", kNoted, "", kReports},
    {"zero_allow_untested_optimizer", kNoted, "", kOwnWay},
    {"zero_force_ds_cpu_optimizer", kNoted, "", kOwnWay},
    {"tensorboard", kNoted, "", kReports},
    {"wandb", kNoted, "", kReports},
    {"csv_monitor", kNoted, "", kReports},
    {"flops_profiler", kNoted, "", kReports},
    {"comms_logger", kNoted, "", kReports},
    {"activation_checkpointing", kNoted, "",
     "changes nothing: \"activation-checkpointing\" is block or off"},
    {"checkpoint", kNoted, "", "changes nothing: every finished step is durable in the store"},
    {"prescale_gradients", kOnlyAs, "false", kNotBuilt},
    {"gradient_predivide_factor", kOnlyAs, "1", kNotBuilt},
    {"sparse_gradients", kOnlyAs, "false", kNotBuilt},
};

constexpr DeepSpeedKey kZero[] = {
    {"zero_optimization.stage", kAs, "zero-stage"},
    {"zero_optimization.reduce_bucket_size", kAs, "reduce-bucket-size"},
    {"zero_optimization.prefetch_bucket_size", kAs, "prefetch-bucket-size"},
    {"zero_optimization.zero_hpz_partition_size", kUnlessOne, "hpz"},
    {"zero_optimization.zero_quantized_weights", kWhereTrue, "quantized-weights", "true"},
    {"zero_optimization.zero_quantized_gradients", kWhereTrue, "quantized-gradients", "4"},
    {"zero_optimization.zero_quantized_nontrainable_weights", kOnlyAs, "false", kNotBuilt},
    {"zero_optimization.mics_shard_size", kOnlyAs, "-1", kNotBuilt},
    {"zero_optimization.contiguous_gradients", kNoted, "", kOwnWay},
    {"zero_optimization.reduce_scatter", kNoted, "", kOwnWay},
    {"zero_optimization.overlap_comm", kNoted, "", kOwnWay},
    {"zero_optimization.round_robin_gradients", kNoted, "", kOwnWay},
    {"zero_optimization.allgather_partitions", kNoted, "", kOwnWay},
    {"zero_optimization.allgather_bucket_size", kNoted, "",
     "changes nothing: parameters are gathered a unit at a time"},
    {"zero_optimization.load_from_fp32_weights", kNoted, "", kOwnWay},
    {"zero_optimization.ignore_unused_parameters", kNoted, "", kOwnWay},
    {"zero_optimization.param_persistence_threshold", kNoted, "",
     "changes nothing: small parameters travel with their unit"},
    {"zero_optimization.model_persistence_threshold", kNoted, "",
     "changes nothing: small parameters travel with their unit"},
    {"zero_optimization.max_live_parameters", kNoted, "",
     "changes nothing: what stays on the device follows from --device-memory"},
    {"zero_optimization.max_reuse_distance", kNoted, "",
     "changes nothing: what stays on the device follows from --device-memory"},
    {"zero_optimization.sub_group_size", kNoted, "",
     "changes nothing: chunks are as large as --host-memory lets twelve of them be"},
    {"zero_optimization.gather_16bit_weights_on_model_save", kNoted, "",
     "changes nothing: `ziggurat export` writes weights"},
    {"zero_optimization.elastic_checkpoint", kOnlyAs, "false", kNotBuilt},
};

constexpr DeepSpeedKey kOffload[] = {
    {"zero_optimization.offload_param.device", kDevice},
    {"zero_optimization.offload_param.nvme_path", kNoted, "",
     "changes nothing: all that is on NVMe is where --store says"},
    {"zero_optimization.offload_param.buffer_count", kNoted, "", kBudgets},
    {"zero_optimization.offload_param.buffer_size", kNoted, "", kBudgets},
    {"zero_optimization.offload_param.max_in_cpu", kNoted, "", kBudgets},
    {"zero_optimization.offload_param.pin_memory", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.device", kDevice},
    {"zero_optimization.offload_optimizer.nvme_path", kNoted, "",
     "changes nothing: all that is on NVMe is where --store says"},
    {"zero_optimization.offload_optimizer.buffer_count", kNoted, "", kBudgets},
    {"zero_optimization.offload_optimizer.pin_memory", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.pipeline_read", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.pipeline_write", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.fast_init", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.ratio", kOnlyAs, "1", kNotBuilt},
};

constexpr DeepSpeedKey kTypes[] = {
    {"fp16.enabled", kEnabled},
    {"fp16.auto_cast", kNoted, "", "changes nothing: the model is in fp16"},
    {"fp16.loss_scale", kAs, "loss-scale"},
    {"fp16.initial_scale_power", kAs, "initial-scale-power"},
    {"fp16.loss_scale_window", kAs, "loss-scale-window"},
    {"fp16.hysteresis", kAs, "hysteresis"},
    {"fp16.consecutive_hysteresis", kAs, "consecutive-hysteresis"},
    {"fp16.min_loss_scale", kAs, "min-loss-scale"},
    {"fp16.fp16_master_weights_and_grads", kOnlyAs, "false", kNoSuchState},
    {"bf16.enabled", kEnabled},
    {"bf16.immediate_grad_update", kNoted, "", kOwnWay},
    {"bf16.check_grad_overflow", kNoted, "", kOwnWay},
    {"bf16.bf16_master_weights_and_grads", kOnlyAs, "false", kNoSuchState},
    {"bf16.bf16_optimizer_states", kOnlyAs, "false", kNoSuchState},
    {"bfloat16.enabled", kEnabled},
};

constexpr DeepSpeedKey kOptimizerKeys[] = {
    {"optimizer.type", kOptimizer},
    {"optimizer.params.lr", kAs, "lr"},
    {"optimizer.params.betas", kAs, "betas"},
    {"optimizer.params.weight_decay", kAs, "weight-decay"},
    {"optimizer.params.eps", kOnlyAs, "1e-8", "it is 1e-8; other values go by \"param-groups\""},
    {"optimizer.params.bias_correction", kOnlyAs, "true", kNotBuilt},
    {"optimizer.params.adam_w_mode", kOnlyAs, "true",
     "Adam with decay in the gradient is \"optimizer\": \"adam\""},
    {"optimizer.params.torch_adam", kNoted, "", kOwnWay},
    {"optimizer.params.fp32_optimizer_states", kOnlyAs, "true", kNoSuchState},
};

constexpr DeepSpeedKey kScheduler[] = {
    {"scheduler.type", kAs, "schedule"},
    {"scheduler.params.total_num_steps", kAs, "total-num-steps"},
    {"scheduler.params.warmup_min_lr", kAs, "warmup-min-lr"},
    {"scheduler.params.warmup_max_lr", kAs, "warmup-max-lr"},
    {"scheduler.params.warmup_num_steps", kAs, "warmup-num-steps"},
    {"scheduler.params.warmup_type", kAs, "warmup-type"},
    {"scheduler.params.warmup_min_ratio", kAs, "warmup-min-ratio"},
    {"scheduler.params.cos_min_ratio", kAs, "cos-min-ratio"},
    {"scheduler.params.cycle_min_lr", kAs, "cycle-min-lr"},
    {"scheduler.params.cycle_max_lr", kAs, "cycle-max-lr"},
    {"scheduler.params.decay_lr_rate", kAs, "decay-lr-rate"},
    {"scheduler.params.cycle_first_step_size", kAs, "cycle-first-step-size"},
    {"scheduler.params.cycle_second_step_size", kAs, "cycle-second-step-size"},
    {"scheduler.params.cycle_first_stair_count", kAs, "cycle-first-stair-count"},
    {"scheduler.params.cycle_second_stair_count", kAs, "cycle-second-stair-count"},
    {"scheduler.params.decay_step_size", kAs, "decay-step-size"},
    {"scheduler.params.cycle_momentum", kAs, "cycle-momentum"},
    {"scheduler.params.cycle_min_mom", kAs, "cycle-min-mom"},
    {"scheduler.params.cycle_max_mom", kAs, "cycle-max-mom"},
    {"scheduler.params.decay_mom_rate", kAs, "decay-mom-rate"},
    {"scheduler.params.lr_range_test_min_lr", kAs, "lr-range-test-min-lr"},
    {"scheduler.params.lr_range_test_step_size", kAs, "lr-range-test-step-size"},
    {"scheduler.params.lr_range_test_step_rate", kAs, "lr-range-test-step-rate"},
    {"scheduler.params.lr_range_test_staircase", kAs, "lr-range-test-staircase"},
    {"scheduler.params.last_batch_iteration", kOnlyAs, "-1",
     "a resumed run goes on by itself; leave it out"},
};

constexpr DeepSpeedKey kAio[] = {
    {"aio.block_size", kNoted, "", "changes nothing: `ziggurat bench io --tune` finds it"},
    {"aio.queue_depth", kNoted, "", "changes nothing: `ziggurat bench io --tune` finds it"},
    {"aio.intra_op_parallelism", kNoted, "",
     "changes nothing: `ziggurat bench io --tune` finds it"},
    {"aio.thread_count", kNoted, "", "changes nothing: `ziggurat bench io --tune` finds it"},
    {"aio.single_submit", kNoted, "", kOwnWay},
    {"aio.overlap_events", kNoted, "", kOwnWay},
    {"aio.use_gds", kNoted, "", "changes nothing: there is no path from drive to GPU yet"},
};

constexpr std::string_view kSections[] = {
    "tensor_parallel",
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "fp16",
    "bf16",
    "bfloat16",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "aio",
};

/// `visit(key)` for each, until it says true.
template <class Visit>
void each_key(const Visit& visit) {
  const auto in = [&](const auto& table) { return std::ranges::any_of(table, visit); };
  static_cast<void>(in(kTop) || in(kZero) || in(kOffload) || in(kTypes) || in(kOptimizerKeys) ||
                    in(kScheduler) || in(kAio));
}

}  // namespace

const DeepSpeedKey* find_deepspeed_key(std::string_view path) {
  constexpr std::string_view kPrefix = "zero_optimization.stage3_";
  std::string without;
  if (path.starts_with(kPrefix)) {
    without = "zero_optimization." + std::string(path.substr(kPrefix.size()));
    path = without;
  }
  const DeepSpeedKey* found = nullptr;
  each_key([&](const DeepSpeedKey& key) {
    if (key.path != path) return false;
    found = &key;
    return true;
  });
  return found;
}

bool is_deepspeed_section(std::string_view path, bool is_object) {
  return std::ranges::find(kSections, path) != std::end(kSections) &&
         (is_object || path != "optimizer");
}

std::vector<std::string> deepspeed_keys_in(std::string_view section) {
  std::vector<std::string> keys;
  each_key([&](const DeepSpeedKey& key) {
    const std::size_t dot = key.path.rfind('.');
    if (dot != std::string_view::npos && key.path.substr(0, dot) == section)
      keys.emplace_back(key.path.substr(dot + 1));
    return false;
  });
  return keys;
}

}  // namespace ziggurat
