// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/deepspeed_keys.cc: the tables of DeepSpeed's keys.
#include "integrations/deepspeed/deepspeed_keys.h"

#include <algorithm>
#include <array>

namespace ziggurat {
namespace {

using enum DeepSpeedKey::Use;

constexpr std::string_view kOwnWay = "changes nothing: Ziggurat always does this in its own way";
constexpr std::string_view kBudgets =
    "changes nothing: `host_memory` and `device_memory` decide how large buffers are";
constexpr std::string_view kReports =
    "changes nothing: the run reports in its own lines, `json` and `trace`";
constexpr std::string_view kNotBuilt = "this value is not supported; leave the key out";
constexpr std::string_view kNoSuchState = "choose how state is kept with `state_format` instead";
constexpr std::string_view kChanges =
    "this value would change what is trained and is not supported; leave the key out";
constexpr std::string_view kBlocks =
    "changes nothing: `activation_checkpointing` can only be block or off";

constexpr std::string_view kDivided =
    "changes nothing: `tp` divides every layer in one way, in the model's own type";

constexpr DeepSpeedKey kTop[] = {
    {"train_micro_batch_size_per_gpu", kBatch, "batch"},
    {"gradient_accumulation_steps", kBatch, "accumulate"},
    {"train_batch_size", kBatch},
    {"gradient_clipping", kAs, "clip"},
    {"communication_data_type", kSumType, "reduce_dtype"},
    {"seq_parallel_communication_data_type", kNoted, "",
     "changes nothing: sequence parallelism across attention heads is not supported"},
    {"tensor_parallel.autotp_size", kUnlessOne, "tp"},
    {"tensor_parallel.tp_overlap_comm", kNoted, "", kOwnWay},
    {"tensor_parallel.dtype", kNoted, "", kDivided},
    {"tensor_parallel.vocab_parallel_lm_head", kNoted, "", kDivided},
    {"tensor_parallel.vocab_parallel_ce_backend", kNoted, "", kDivided},
    {"tensor_parallel.tensor_parallel", kNoted, "", kDivided},
    {"tensor_parallel.tp", kNoted, "", kDivided},
    {"tensor_parallel.injection_policy_tuple", kNoted, "", kDivided},
    {"tensor_parallel.partition_config", kNoted, "", kDivided},
    {"tensor_parallel.preset_model", kNoted, "", kDivided},
    {"tensor_parallel.keep_module_on_host", kNoted, "", kDivided},
    {"tensor_parallel.replace_with_kernel_inject", kNoted, "", kDivided},
    {"tensor_parallel.kernel_inject", kNoted, "", kDivided},
    {"steps_per_print", kNoted, "", kReports},
    {"wall_clock_breakdown", kNoted, "", kReports},
    {"memory_breakdown", kNoted, "", kReports},
    {"dump_state", kNoted, "", kReports},
    {"log_level", kNoted, "", kReports},
    {"timers", kNoted, "", kReports},
    {"disable_python_gc", kNoted, "", kOwnWay},
    {"managed_gradient_accumulation", kOnlyAs, "true", kNotBuilt},
    {"zero_allow_untested_optimizer", kNoted, "", kOwnWay},
    {"zero_force_ds_cpu_optimizer", kNoted, "", kOwnWay},
    {"disable_allgather", kNoted, "", kOwnWay},
    {"dataloader_drop_last", kNoted, "", kOwnWay},
    {"vocabulary_size", kNoted, "", kReports},
    {"tensorboard", kNoted, "", kReports},
    {"wandb", kNoted, "", kReports},
    {"comet", kNoted, "", kReports},
    {"csv_monitor", kNoted, "", kReports},
    {"flops_profiler", kNoted, "", kReports},
    {"comms_logger", kNoted, "", kReports},
    {"autotuning", kNoted, "", "changes nothing: `ziggurat plan` shows what fits"},
    {"hybrid_engine", kNoted, "", "changes nothing: generation between steps is not supported"},
    {"pipeline", kNoted, "", "changes nothing: all layers are in one pipeline stage"},
    {"compile", kNoted, "", "changes nothing: the model is not compiled at run time"},
    {"checkpoint", kNoted, "", "changes nothing: every finished step is durable in the store"},
    {"datastates_ckpt", kNoted, "", "changes nothing: every finished step is durable in the store"},
    {"prescale_gradients", kOnlyAs, "false", kNotBuilt},
    {"gradient_predivide_factor", kOnlyAs, "1", kNotBuilt},
    {"gradient_allreduce_op", kOnlyAs, "\"mean\"", kNotBuilt},
    {"data_efficiency", kOnlyAs, "{\"enabled\": false}", kChanges},
    {"torch_autocast.enabled", kOnlyAs, "false", "choose the type with `dtype` instead"},
    {"torch_autocast.dtype", kNoted, "", kOwnWay},
    {"torch_autocast.lower_precision_safe_modules", kNoted, "", kOwnWay},
    {"data_types.grad_accum_dtype", kOnlyAs, "\"fp32\"",
     "gradients are always summed in fp32; leave the key out"},
    {"data_types.param_dtype", kParamType},
    {"data_types.buffer_dtype", kOnlyAs, "null",
     "buffers keep the type that they have; leave the key out"},
    {"data_types.keep_in_fp32_modules", kOnlyAs, "\"auto\"",
     "buffers keep the type that they have; leave the key out"},
    {"sequence_parallel_size", kOnlyAs, "1", kNotBuilt},
    {"use_data_before_expert_parallelism", kNoted, "",
     "changes nothing: experts on ranks of their own are not supported"},
    {"allgather_size", kNoted, "", "changes nothing: parameters are gathered one unit at a time"},
    {"expert_parallel", kOnlyAs, "{\"enabled\": false}", kNotBuilt},
    {"weight_quantization", kOnlyAs, "null", kChanges},
};

constexpr std::string_view kGone = "DeepSpeed has removed this key and refuses it; leave it out";
constexpr DeepSpeedKey kRemovedKeys[] = {
    {"nebula", kRemoved, "", kGone},
    {"compression_training", kRemoved, "", kGone},
    {"amp", kRemoved, "", "DeepSpeed has removed this key and refuses it; give fp16 or bf16"},
    {"quantize_training", kRemoved, "", kGone},
    {"sparse_gradients", kRemoved, "", kGone},
    {"eigenvalue", kRemoved, "", kGone},
    {"sparse_attention", kRemoved, "", kGone},
    {"elasticity", kRemoved, "",
     "DeepSpeed has removed this key and refuses it; give the batch sizes"},
    {"graph_harvesting", kRemoved, "", kGone},
    {"curriculum_learning", kRemoved, "", kGone},
    {"progressive_layer_drop", kRemoved, "", kGone},
    {"zero_optimization.mics_shard_size", kRemoved, "",
     "DeepSpeed has removed this key and refuses it; give `strategy=hybrid` and `shard_group`"},
    {"zero_optimization.mics_hierarchical_params_gather", kRemoved, "", kGone},
    {"zero_optimization.zeropp_loco_param", kRemoved, "", kGone},
};

constexpr DeepSpeedKey kZero[] = {
    {"zero_optimization.stage", kAs, "zero_stage"},
    {"zero_optimization.reduce_bucket_size", kAs, "reduce_bucket_size"},
    {"zero_optimization.prefetch_bucket_size", kAs, "prefetch_bucket_size"},
    {"zero_optimization.max_live_parameters", kAs, "max_live_parameters"},
    {"zero_optimization.max_reuse_distance", kAs, "max_reuse_distance"},
    {"zero_optimization.param_persistence_threshold", kAs, "param_persistence_threshold"},
    {"zero_optimization.model_persistence_threshold", kNoted, "",
     "changes nothing: `device_memory` limits which parameters stay on the device"},
    {"zero_optimization.zero_hpz_partition_size", kUnlessOne, "hpz"},
    {"zero_optimization.zero_quantized_weights", kWhereTrue, "quantized_weights", "true"},
    {"zero_optimization.zero_quantized_gradients", kWhereTrue, "quantized_gradients", "4"},
    {"zero_optimization.zero_quantized_nontrainable_weights", kOnlyAs, "false", kNotBuilt},
    {"zero_optimization.cpu_offload", kOffload, "offload_optimizer"},
    {"zero_optimization.cpu_offload_param", kOffload, "offload_param"},
    {"zero_optimization.cpu_offload_use_pin_memory", kNoted, "", kOwnWay},
    {"zero_optimization.zenflow", kOnlyAs, "null", kChanges},
    {"zero_optimization.contiguous_gradients", kNoted, "", kOwnWay},
    {"zero_optimization.reduce_scatter", kNoted, "", kOwnWay},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kNoted, "", kOwnWay},
    {"zero_optimization.overlap_comm", kNoted, "", kOwnWay},
    {"zero_optimization.compute_grad_norm", kNoted, "", kOwnWay},
    {"zero_optimization.round_robin_gradients", kNoted, "", kOwnWay},
    {"zero_optimization.parameter_alignment", kNoted, "", kOwnWay},
    {"zero_optimization.allgather_partitions", kNoted, "", kOwnWay},
    {"zero_optimization.allgather_bucket_size", kNoted, "",
     "changes nothing: parameters are gathered one unit at a time"},
    {"zero_optimization.allgather_sequential", kNoted, "",
     "changes nothing: parameters are gathered one unit at a time"},
    {"zero_optimization.use_all_reduce_for_fetch_params", kNoted, "",
     "changes nothing: parameters are gathered one unit at a time"},
    {"zero_optimization.module_granularity_threshold", kNoted, "",
     "changes nothing: parameters are gathered one unit at a time"},
    {"zero_optimization.leaf_module", kNoted, "",
     "changes nothing: parameters are gathered one unit at a time"},
    {"zero_optimization.load_from_fp32_weights", kNoted, "", kOwnWay},
    {"zero_optimization.ignore_unused_parameters", kNoted, "", kOwnWay},
    {"zero_optimization.legacy_stage1", kNoted, "", kOwnWay},
    {"zero_optimization.memory_efficient_linear", kNoted, "", kOwnWay},
    {"zero_optimization.pipeline_loading_checkpoint", kNoted, "", kOwnWay},
    {"zero_optimization.override_module_apply", kNoted, "", kOwnWay},
    {"zero_optimization.log_trace_cache_warnings", kNoted, "", kReports},
    {"zero_optimization.enable_sanity_checks", kNoted, "", kOwnWay},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kNoted, "", kOwnWay},
    {"zero_optimization.sub_group_size", kNoted, "",
     "changes nothing: chunks are as large as possible while `host_memory` holds twelve of them"},
    {"zero_optimization.gather_16bit_weights_on_model_save", kNoted, "",
     "changes nothing: `ziggurat export` writes weights"},
    {"zero_optimization.gather_fp16_weights_on_model_save", kNoted, "",
     "changes nothing: `ziggurat export` writes weights"},
    {"zero_optimization.elastic_checkpoint", kOnlyAs, "false", kNotBuilt},
};

constexpr DeepSpeedKey kOffloadKeys[] = {
    {"zero_optimization.offload_param.device", kDevice},
    {"zero_optimization.offload_param.nvme_path", kNvmePath},
    {"zero_optimization.offload_param.buffer_count", kNoted, "", kBudgets},
    {"zero_optimization.offload_param.buffer_size", kNoted, "", kBudgets},
    {"zero_optimization.offload_param.max_in_cpu", kNoted, "", kBudgets},
    {"zero_optimization.offload_param.pin_memory", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.device", kDevice},
    {"zero_optimization.offload_optimizer.nvme_path", kNvmePath},
    {"zero_optimization.offload_optimizer.buffer_count", kNoted, "", kBudgets},
    {"zero_optimization.offload_optimizer.pin_memory", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.pipeline_read", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.pipeline_write", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.fast_init", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.ratio", kOnlyAs, "1", kNotBuilt},
    {"zero_optimization.offload_optimizer.super_offload", kNoted, "", kOwnWay},
    {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kNoted, "",
     "changes nothing: `threads` sets how many cores work"},
};

constexpr DeepSpeedKey kTypes[] = {
    {"fp16.enabled", kEnabled, "dtype"},
    {"fp16.auto_cast", kNoted, "", "changes nothing: the whole model is in fp16"},
    {"fp16.loss_scale", kAs, "loss_scale"},
    {"fp16.initial_scale_power", kAs, "initial_scale_power"},
    {"fp16.loss_scale_window", kAs, "loss_scale_window"},
    {"fp16.hysteresis", kAs, "hysteresis"},
    {"fp16.consecutive_hysteresis", kAs, "consecutive_hysteresis"},
    {"fp16.min_loss_scale", kAs, "min_loss_scale"},
    {"fp16.fp16_master_weights_and_grads", kOnlyAs, "false", kNoSuchState},
    {"bf16.enabled", kEnabled, "dtype"},
    {"bf16.immediate_grad_update", kNoted, "", kOwnWay},
    {"bf16.check_grad_overflow", kNoted, "", kOwnWay},
    {"bf16.bf16_master_weights_and_grads", kOnlyAs, "false", kNoSuchState},
    {"bf16.bf16_optimizer_states", kOnlyAs, "false", kNoSuchState},
    {"bfloat16.enabled", kEnabled, "dtype"},
    {"bfloat16.immediate_grad_update", kNoted, "", kOwnWay},
    {"bfloat16.check_grad_overflow", kNoted, "", kOwnWay},
    {"bfloat16.bf16_master_weights_and_grads", kOnlyAs, "false", kNoSuchState},
    {"bfloat16.bf16_optimizer_states", kOnlyAs, "false", kNoSuchState},
};

constexpr DeepSpeedKey kOptimizerKeys[] = {
    {"optimizer.type", kOptimizer, "optimizer"},
    {"optimizer.legacy_fusion", kNoted, "", kOwnWay},
    {"optimizer.params.lr", kRate, "lr"},
    {"optimizer.params.betas", kAs, "betas"},
    {"optimizer.params.momentum", kMomentum, "betas"},
    {"optimizer.params.weight_decay", kAs, "weight_decay"},
    {"optimizer.params.eps", kAs, "eps"},
    {"optimizer.params.bias_correction", kOnlyAs, "true", kNotBuilt},
    {"optimizer.params.amsgrad", kOnlyAs, "false", kNotBuilt},
    {"optimizer.params.maximize", kOnlyAs, "false", kNotBuilt},
    {"optimizer.params.nesterov", kOnlyAs, "false", kNotBuilt},
    {"optimizer.params.dampening", kOnlyAs, "0", kNotBuilt},
    {"optimizer.params.lr_decay", kOnlyAs, "0", kNotBuilt},
    {"optimizer.params.initial_accumulator_value", kOnlyAs, "0", kNotBuilt},
    // This key is read together with the optimizer's type.
    {"optimizer.params.adam_w_mode", kNoted, "", ""},
    {"optimizer.params.torch_adam", kNoted, "", kOwnWay},
    {"optimizer.params.foreach", kNoted, "", kOwnWay},
    {"optimizer.params.fused", kNoted, "", kOwnWay},
    {"optimizer.params.set_grad_none", kNoted, "", kOwnWay},
    {"optimizer.params.fp32_optimizer_states", kOnlyAs, "true", kNoSuchState},
    {"optimizer.params.max_grad_norm", kRemoved, "",
     "DeepSpeed refuses this key; give \"gradient_clipping\" instead"},
};

constexpr DeepSpeedKey kActivations[] = {
    {"activation_checkpointing.partition_activations", kNoted, "", kBlocks},
    {"activation_checkpointing.cpu_checkpointing", kNoted, "", kBlocks},
    {"activation_checkpointing.contiguous_memory_optimization", kNoted, "", kBlocks},
    {"activation_checkpointing.number_checkpoints", kNoted, "", kBlocks},
    {"activation_checkpointing.synchronize_checkpoint_boundary", kNoted, "", kBlocks},
    {"activation_checkpointing.profile", kNoted, "", kReports},
};

constexpr DeepSpeedKey kScheduler[] = {
    {"scheduler.type", kSchedule, "schedule"},
    {"scheduler.params.total_num_steps", kAs, "total_num_steps"},
    {"scheduler.params.warmup_min_lr", kAs, "warmup_min_lr"},
    {"scheduler.params.warmup_max_lr", kPeakRate, "warmup_max_lr"},
    {"scheduler.params.warmup_num_steps", kAs, "warmup_num_steps"},
    {"scheduler.params.warmup_type", kAs, "warmup_type"},
    {"scheduler.params.warmup_min_ratio", kAs, "warmup_min_ratio"},
    {"scheduler.params.cos_min_ratio", kAs, "cos_min_ratio"},
    {"scheduler.params.cycle_min_lr", kAs, "cycle_min_lr"},
    {"scheduler.params.cycle_max_lr", kAs, "cycle_max_lr"},
    {"scheduler.params.decay_lr_rate", kAs, "decay_lr_rate"},
    {"scheduler.params.cycle_first_step_size", kAs, "cycle_first_step_size"},
    {"scheduler.params.cycle_second_step_size", kAs, "cycle_second_step_size"},
    {"scheduler.params.cycle_first_stair_count", kAs, "cycle_first_stair_count"},
    {"scheduler.params.cycle_second_stair_count", kAs, "cycle_second_stair_count"},
    {"scheduler.params.decay_step_size", kAs, "decay_step_size"},
    {"scheduler.params.cycle_momentum", kAs, "cycle_momentum"},
    {"scheduler.params.cycle_min_mom", kAs, "cycle_min_mom"},
    {"scheduler.params.cycle_max_mom", kAs, "cycle_max_mom"},
    {"scheduler.params.decay_mom_rate", kAs, "decay_mom_rate"},
    {"scheduler.params.lr_range_test_min_lr", kAs, "lr_range_test_min_lr"},
    {"scheduler.params.lr_range_test_step_size", kAs, "lr_range_test_step_size"},
    {"scheduler.params.lr_range_test_step_rate", kAs, "lr_range_test_step_rate"},
    {"scheduler.params.lr_range_test_staircase", kAs, "lr_range_test_staircase"},
    {"scheduler.params.last_batch_iteration", kOnlyAs, "-1",
     "a resumed run goes on from its last step by itself; leave the key out"},
};

constexpr DeepSpeedKey kAio[] = {
    {"aio.block_size", kNoted, "",
     "changes nothing: `ziggurat bench io` finds the best value (`tune`)"},
    {"aio.queue_depth", kNoted, "",
     "changes nothing: `ziggurat bench io` finds the best value (`tune`)"},
    {"aio.intra_op_parallelism", kNoted, "",
     "changes nothing: `ziggurat bench io` finds the best value (`tune`)"},
    {"aio.thread_count", kNoted, "",
     "changes nothing: `ziggurat bench io` finds the best value (`tune`)"},
    {"aio.single_submit", kNoted, "", kOwnWay},
    {"aio.overlap_events", kNoted, "", kOwnWay},
    {"aio.use_gds", kNoted, "",
     "changes nothing: transfers from drive to GPU are not supported yet"},
};

constexpr std::string_view kSections[] = {
    "activation_checkpointing",
    "data_types",
    "tensor_parallel",
    "torch_autocast",
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

constexpr std::string_view kLenient[] = {"activation_checkpointing",
                                         "aio",
                                         "checkpoint",
                                         "checkpoint.parallel_write",
                                         "data_types",
                                         "flops_profiler",
                                         "optimizer",
                                         "scheduler",
                                         "torch_autocast"};

/// Calls `visit` for each key until it returns true.
template <class Visit>
void each_key(bool script, const Visit& visit) {
  const auto in = [&](const auto& table) { return std::ranges::any_of(table, visit); };
  static_cast<void>((script && in(deepspeed_script_keys())) || in(kTop) || in(kRemovedKeys) ||
                    in(kActivations) || in(kZero) || in(kOffloadKeys) || in(kTypes) ||
                    in(kOptimizerKeys) || in(kScheduler) || in(kAio));
}

}  // namespace

const DeepSpeedKey* DeepSpeedKeys::find(std::string_view path) const {
  constexpr std::string_view kPrefix = "zero_optimization.stage3_";
  std::string without;
  if (path.starts_with(kPrefix)) {
    without = "zero_optimization." + std::string(path.substr(kPrefix.size()));
    path = without;
  }
  const DeepSpeedKey* found = nullptr;
  each_key(script_, [&](const DeepSpeedKey& key) {
    if (key.path != path) return false;
    found = &key;
    return true;
  });
  return found;
}

bool DeepSpeedKeys::is_section(std::string_view path, bool is_object) const {
  const auto among = [&](const auto& all) { return std::ranges::find(all, path) != std::end(all); };
  if (!is_object && path == "optimizer" && !script_) return false;
  return among(kSections) || (script_ && among(deepspeed_script_sections()));
}

bool DeepSpeedKeys::is_lenient(std::string_view section) {
  return std::ranges::find(kLenient, section) != std::end(kLenient);
}

bool DeepSpeedKeys::drops_auto(std::string_view path) {
  const std::size_t dot = path.find('.');
  return dot != std::string_view::npos && !is_lenient(path.substr(0, dot));
}

std::vector<std::string> DeepSpeedKeys::in(std::string_view section) const {
  std::vector<std::string> keys;
  each_key(script_, [&](const DeepSpeedKey& key) {
    const std::size_t dot = key.path.rfind('.');
    if (dot != std::string_view::npos && key.path.substr(0, dot) == section)
      keys.emplace_back(key.path.substr(dot + 1));
    return false;
  });
  return keys;
}

}  // namespace ziggurat
