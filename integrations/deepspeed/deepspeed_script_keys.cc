// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/deepspeed_script_keys.cc: the keys that mean something else to a training
// script: those that it honours itself, and those with another note.
#include "integrations/deepspeed/deepspeed_keys.h"

namespace ziggurat {
namespace {

using enum DeepSpeedKey::Use;

constexpr std::string_view kByUnits =
    "changes nothing: parameters are brought one unit at a time, in pieces that the engine chooses";
constexpr std::string_view kScriptBudgets =
    "changes nothing: `host_memory` decides how large buffers are";
constexpr std::string_view kNotMeasured = "changes nothing: Ziggurat does not measure this";
constexpr std::string_view kScripts = "changes nothing: the script does this itself";
constexpr std::string_view kAlways = "changes nothing: Ziggurat always does this in its own way";
constexpr std::string_view kRecomputed =
    "changes nothing: checkpointed activations are computed again, as by torch.utils.checkpoint";
constexpr std::string_view kOwnIo =
    "changes nothing: the engine's own I/O finds the best value; `ziggurat bench io` shows how "
    "fast the drive is";
constexpr std::string_view kSavedSo =
    "changes nothing: checkpoints are always written in the same way";
constexpr std::string_view kAsWhole =
    "changes nothing: every gradient is exchanged as a whole, in pieces that the engine chooses";

constexpr DeepSpeedKey kScript[] = {
    // The next keys are handed to the script, which honours them itself.
    {"steps_per_print", kNumber, "null"},
    {"wall_clock_breakdown", kSwitch, "false"},
    {"memory_breakdown", kSwitch, "false"},
    {"dump_state", kSwitch, "false"},
    {"dataloader_drop_last", kSwitch, "false"},
    {"flops_profiler.enabled", kSwitch, "false",
     "has the effect of `wall_clock_breakdown`: true; operations are not counted"},
    {"tensorboard.enabled", kSwitch, "false"},
    {"tensorboard.output_path", kText, "\"\""},
    {"tensorboard.job_name", kText, "\"DeepSpeedJobName\""},
    {"csv_monitor.enabled", kSwitch, "false"},
    {"csv_monitor.output_path", kText, "\"\""},
    {"csv_monitor.job_name", kText, "\"DeepSpeedJobName\""},
    {"wandb.enabled", kSwitch, "false"},
    {"wandb.group", kText, "null"},
    {"wandb.team", kText, "null"},
    {"wandb.project", kText, "\"deepspeed\""},
    {"torch_autocast.enabled", kSwitch, "false"},
    {"torch_autocast.dtype", kText, "null"},
    {"checkpoint.tag_validation", kText, "\"Warn\""},
    {"checkpoint.use_node_local_storage", kSwitch, "false"},
    {"fp16.auto_cast", kSwitch, "false"},
    {"bf16.check_grad_overflow", kSwitch, "true"},
    {"bfloat16.check_grad_overflow", kSwitch, "true"},
    {"optimizer.params.nesterov", kSwitch, "false"},
    {"optimizer.params.maximize", kSwitch, "false"},
    {"optimizer.params.dampening", kNumber, "0"},
    {"optimizer.params.lr_decay", kNumber, "0"},
    {"optimizer.params.initial_accumulator_value", kNumber, "0"},
    {"zero_optimization.offload_param.pin_memory", kSwitch, "true",
     "changes nothing: host copies of accelerator memory are always pinned"},
    {"zero_optimization.offload_optimizer.pin_memory", kSwitch, "true",
     "changes nothing: host copies of accelerator memory are always pinned"},
    {"aio.block_size", kWhole, "1048576", kOwnIo},
    {"aio.queue_depth", kWhole, "8", kOwnIo},
    {"aio.intra_op_parallelism", kWhole, "1", kOwnIo},
    {"aio.single_submit", kSwitch, "false", kOwnIo},
    {"aio.overlap_events", kSwitch, "true", kOwnIo},
    {"aio.use_gds", kSwitch, "false",
     "changes nothing: transfers from drive to GPU are not supported yet, and state is updated on "
     "the CPU"},
    {"scheduler.params.last_batch_iteration", kWhole, "-1"},
    // The next keys have another meaning or another note for a script.
    {"bf16.bf16_master_weights_and_grads", kInBf16, "state_format"},
    {"bf16.bf16_optimizer_states", kInBf16, "state_format"},
    {"zero_optimization.mics_shard_size", kRemoved, "",
     "DeepSpeed has removed this key and refuses it; leave it out"},
    {"zero_optimization.elastic_checkpoint", kNoted, "", kSavedSo},
    {"optimizer.params.capturable", kNoted, "", kAlways},
    {"optimizer.params.differentiable", kOnlyAs, "false",
     "this value is not supported; leave the key out"},
    {"aio.thread_count", kNoted, "",
     "changes nothing, as in DeepSpeed, which reads `intra_op_parallelism` instead"},
    {"log_level", kNoted, "", kScripts},
    {"timers", kNoted, "", kNotMeasured},
    {"vocabulary_size", kNoted, "", kNotMeasured},
    {"comms_logger", kNoted, "", kNotMeasured},
    {"flops_profiler.recompute_fwd_factor", kNoted, "", kNotMeasured},
    {"flops_profiler.profile_step", kNoted, "", kNotMeasured},
    {"flops_profiler.module_depth", kNoted, "", kNotMeasured},
    {"flops_profiler.top_modules", kNoted, "", kNotMeasured},
    {"flops_profiler.detailed", kNoted, "", kNotMeasured},
    {"flops_profiler.output_file", kNoted, "", kNotMeasured},
    {"comet", kNoted, "", "changes nothing: use `tensorboard`, `csv_monitor` or `wandb` instead"},
    {"pipeline", kNoted, "", "changes nothing: the model is one pipeline stage"},
    {"compile", kNoted, "", "changes nothing: call torch.compile() in the script"},
    {"datastates_ckpt", kNoted, "", kSavedSo},
    {"checkpoint.load_universal", kOnlyAs, "false",
     "load_checkpoint() reads no universal checkpoints; leave the key out, and call "
     "ziggurat.torch.load_foreign_checkpoint()"},
    {"checkpoint.parallel_write.pipeline_stage", kNoted, "", kSavedSo},
    {"checkpoint.checkpoint_serialization", kNoted, "", kSavedSo},
    {"checkpoint.writer", kNoted, "", kSavedSo},
    {"allgather_size", kNoted, "", kByUnits},
    {"tensor_parallel.autotp_size", kOnlyAs, "[0, 1]",
     "the layers of a script's model cannot be divided; leave the key out"},
    {"torch_autocast.lower_precision_safe_modules", kNoted, "",
     "changes nothing: `communication_data_type` sets the type in which gradients are exchanged"},
    {"zero_optimization.reduce_bucket_size", kAs, "reduce_bucket_size", kAsWhole},
    {"zero_optimization.model_persistence_threshold", kNumber, "9223372036854775807"},
    {"zero_optimization.zero_hpz_partition_size", kWhole, "1"},
    {"zero_optimization.zero_quantized_weights", kSwitch, "false"},
    {"zero_optimization.zero_quantized_nontrainable_weights", kSwitch, "false"},
    {"zero_optimization.zero_quantized_gradients", kSwitch, "false"},
    {"zero_optimization.allgather_bucket_size", kNoted, "", kByUnits},
    {"zero_optimization.allgather_sequential", kNoted, "", kByUnits},
    {"zero_optimization.use_all_reduce_for_fetch_params", kNoted, "", kByUnits},
    {"zero_optimization.module_granularity_threshold", kNoted, "",
     "changes nothing: units are whole blocks, however many modules they have"},
    // The script reads this section itself.
    {"zero_optimization.leaf_module", kNoted, "", ""},
    {"zero_optimization.log_trace_cache_warnings", kNoted, "",
     "changes nothing: a forward may use units in another order than the one before"},
    {"zero_optimization.gather_16bit_weights_on_model_save", kNoted, "",
     "changes nothing: weights are always saved whole"},
    {"zero_optimization.gather_fp16_weights_on_model_save", kNoted, "",
     "changes nothing: weights are always saved whole"},
    {"zero_optimization.sub_group_size", kNoted, "",
     "changes nothing: the engine moves each parameter's state in chunks of its own"},
    {"zero_optimization.offload_param.buffer_count", kWhole, "5"},
    {"zero_optimization.offload_param.buffer_size", kWhole, "100000000"},
    {"zero_optimization.offload_param.max_in_cpu", kWhole, "1000000000"},
    {"zero_optimization.offload_optimizer.buffer_count", kNoted, "", kScriptBudgets},
    {"zero_optimization.offload_optimizer.ratio", kNoted, "",
     "changes nothing: all optimizer state is off the device"},
    {"zero_optimization.offload_optimizer.super_offload", kNoted, "", kAlways},
    {"activation_checkpointing.partition_activations", kNoted, "", kRecomputed},
    {"activation_checkpointing.cpu_checkpointing", kNoted, "",
     "changes nothing: of a checkpointed block its inputs are kept, where the model computes; "
     "activations are computed again"},
    {"activation_checkpointing.contiguous_memory_optimization", kNoted, "", kRecomputed},
    {"activation_checkpointing.number_checkpoints", kNoted, "", kRecomputed},
    {"activation_checkpointing.synchronize_checkpoint_boundary", kNoted, "", kRecomputed},
    {"activation_checkpointing.profile", kNoted, "", kNotMeasured},
};

constexpr std::string_view kScriptSections[] = {
    "tensorboard",   "csv_monitor", "wandb", "checkpoint", "checkpoint.parallel_write",
    "flops_profiler"};

}  // namespace

std::span<const DeepSpeedKey> deepspeed_script_keys() { return kScript; }

std::span<const std::string_view> deepspeed_script_sections() { return kScriptSections; }

}  // namespace ziggurat
