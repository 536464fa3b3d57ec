#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_deepspeed_peers_test.py: `ziggurat config` beside DeepSpeed's own reading of the same files.
"""    python3 cli_deepspeed_peers_test.py BINARY

Configurations in the shapes that trainers publish (LLaMA-Factory, Axolotl, Accelerate, Transformers, LLaVA, Alpaca, trlx,
DeepSpeed's examples and tests), each as it is and with each of its keys left out, on one and on several ranks. Every value
that both sides have is the same; what DeepSpeed refuses is refused here. Exits with 77, saying why, where DeepSpeed cannot
be imported.
"""
import copy
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile

SKIPPED = 77
STEPS = 100
TOLERANCE = 1e-12  # of a learning rate: a logarithm and a cosine of our own

# "auto" is what Transformers fills in from its arguments; here the test does, for both sides.
FILLED = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.7,
          "lr": 2e-5, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.05, "warmup_min_lr": 0, "warmup_max_lr": 2e-5,
          "warmup_num_steps": 10, "total_num_steps": 90, "reduce_bucket_size": 1048576, "stage3_prefetch_bucket_size": 943718,
          "stage3_param_persistence_threshold": 10240, "stage3_max_live_parameters": 2e9, "buffer_size": 1e8}
SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                                                "total_num_steps": "auto"}}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
BATCHES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
           "gradient_clipping": "auto"}
CPU = {"device": "cpu", "pin_memory": True}
STAGE3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
          "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
          "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
          "stage3_gather_16bit_weights_on_model_save": True}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 1}

CONFIGS = {
    "llama-factory z3 offload": {
        **BATCHES, "zero_allow_untested_optimizer": True, "fp16": {**FP16, "enabled": False}, "bf16": {"enabled": True},
        "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU}},
    "llama-factory z2 offload": {
        **BATCHES, "zero_allow_untested_optimizer": True, "fp16": FP16,
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU, "allgather_partitions": True, "allgather_bucket_size": 5e8,
                              "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 5e8,
                              "contiguous_gradients": True, "round_robin_gradients": True}},
    "axolotl z3 all offloaded": {
        **BATCHES, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": True,
                              "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
                              "stage3_prefetch_bucket_size": "auto", "max_live_parameters": 0, "max_reuse_distance": 0,
                              "gather_16bit_weights_on_model_save": True}, "wall_clock_breakdown": False},
    "axolotl z3 params offloaded": {
        **BATCHES, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": CPU, "overlap_comm": True, "reduce_bucket_size": "auto",
                              "max_live_parameters": 0, "max_reuse_distance": 0}},
    "accelerate z3 offload": {
        **BATCHES, "fp16": FP16, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": SCHEDULER, "steps_per_print": float("inf"),
        "zero_optimization": {**STAGE3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    "transformers z3": {
        **BATCHES, "fp16": FP16, "optimizer": OPTIMIZER,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {**STAGE3, "sub_group_size": 1e14, "stage3_prefetch_bucket_size": 0,
                              "stage3_param_persistence_threshold": 0, "offload_optimizer": CPU, "offload_param": CPU}},
    "llava z3 offload": {
        **BATCHES, "bf16": {"enabled": True}, "optimizer": OPTIMIZER, "scheduler": SCHEDULER, "steps_per_print": 1e5,
        "wall_clock_breakdown": False, "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU}},
    "alpaca z3 offload": {
        **BATCHES, "bf16": {"enabled": True}, "optimizer": OPTIMIZER, "scheduler": SCHEDULER, "steps_per_print": 5,
        "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU}},
    "trlx z2 with params offloaded": {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "fp16": FP16,
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
                              "allgather_partitions": True, "reduce_bucket_size": 500000000}},
    "examples z3 params on nvme": {
        "train_batch_size": 16, "bf16": {"enabled": True},
        "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8, "single_submit": False,
                "overlap_events": True, "use_gds": False},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto",
                              "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": "auto", "pin_memory": True}}},
    "z3 optimizer on nvme": {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "aio": {"block_size": 1048576, "queue_depth": 16, "thread_count": 4},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False},
                              "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme/ds", "pin_memory": False,
                                                    "buffer_count": 4, "fast_init": False}}},
    "z3 all on nvme, a key that DeepSpeed does not know": {
        "_description": "all on NVMe", "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1e8},
                              "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1e9}}},
    "zenflow finetuning without zenflow": {
        "train_batch_size": 8, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
    "bf16 z3": {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10,
        "communication_data_type": "fp32", "torch_autocast": {"enabled": False},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 80, "warmup_num_steps": 20, "warmup_min_ratio": 0.1}},
        "zero_optimization": {"stage": 3}},
    "megatron func z2 offload": {
        "train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_print": 1, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7000000, "allgather_bucket_size": 7000000,
                              "reduce_scatter": True, "cpu_offload": True},
        "fp16": FP16, "optimizer": {"type": "Adam", "params": {"lr": 0.00015}}},
    "accelerate yaml z3": {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}},
    "zero++": {
        "train_batch_size": 32, "gradient_accumulation_steps": 2, "fp16": FP16, "communication_data_type": "fp16",
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 30}},
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
                              "zero_quantized_gradients": True}},
    "z1 sgd": {
        "train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 20, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 1}},
    "z2 adagrad, range test": {
        "train_batch_size": 8, "optimizer": {"type": "Adagrad", "params": {}},
        "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 9}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "three batch sizes that disagree": {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
    "no batch size": {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
    "a batch that does not divide": {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
    "two types": {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
    "a removed key": {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}},
    "another removed key": {"train_batch_size": 8, "elasticity": {"enabled": False}},
    "an unknown key": {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": True}},
    "an unknown device": {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
    "an unknown sum": {"train_batch_size": 8, "gradient_allreduce_op": "max"},
}


def filled(value, key=None):
    """With a value in place of every "auto"."""
    if isinstance(value, dict):
        return {k: filled(v, k) for k, v in value.items()}
    return FILLED[key] if value == "auto" else value


def left_out(config, path=()):
    """The config with each key left out, one at a time."""
    for key, value in config.items():
        without = {k: v for k, v in config.items() if k != key}
        yield "without " + ".".join((*path, key)), without
        if isinstance(value, dict):
            for name, inner in left_out(value, (*path, key)):
                yield name, {**config, key: inner}


class Refused(Exception):
    pass


class Different(Exception):
    pass


def ours(binary, config, ranks, folder):
    """The settings in force, by name, and the learning rates."""
    file = os.path.join(folder, "ds.json")
    with open(file, "w") as out:
        json.dump(config, out)  # Infinity as Accelerate writes it
    arguments = ["--config", file, "--nproc", str(ranks), "--steps", str(STEPS)]
    results = []
    for command in ("config", "schedule"):
        report = os.path.join(folder, command + ".json")
        run = subprocess.run([binary, command, *arguments, "--json", report], capture_output=True, text=True)
        if run.returncode == 2:
            raise Refused(run.stderr.strip())
        if run.returncode != 0:
            sys.exit(f"{command} {config}: exit code {run.returncode}: {run.stderr}")
        with open(report) as result:
            results.append(json.load(result))
    values = {name: setting["value"] for name, setting in results[0]["settings"].items()}
    return values, [step["learning_rate"] for step in results[1]["steps"]], results[0]["notes"]


def deepspeeds(modules, config, ranks):
    modules.world_size = ranks
    try:
        return modules.config.DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:  # assertions, validation errors, its own
        raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def optimizer_values(modules, config):
    """What its engine would construct the optimizer with: what is not given is its class's default."""
    name = config.optimizer_name
    params = dict(config.optimizer_params or {})
    offloaded = config.zero_config.offload_optimizer is not None and config.zero_config.offload_optimizer.device != "none"
    if name in ("adam", "adamw"):
        cls = modules.optim.AdamW if params.get("torch_adam") else modules.cpu_adam if offloaded else modules.fused_adam
    elif name == "lion":
        cls = modules.cpu_lion if offloaded else modules.fused_lion
    elif name == "adagrad":
        cls = modules.cpu_adagrad if offloaded else modules.optim.Adagrad
    else:
        cls = getattr(modules.optim, name)
    values = {key: parameter.default for key, parameter in inspect.signature(cls.__init__).parameters.items()}
    values.update(params)
    return values


def rates(modules, config):
    """Of each step, as its engine moves a scheduler: after the step."""
    params = dict(config.scheduler_params or {})
    optimizer = modules.optim.SGD([modules.torch.zeros(1, requires_grad=True)], lr=optimizer_values(modules, config)["lr"], momentum=0.5)
    if config.scheduler_name is None:
        return [optimizer.param_groups[0]["lr"]] * STEPS
    if params.get("cycle_momentum", True) and config.scheduler_name == "OneCycle":
        params["cycle_momentum"] = False  # SGD has no betas; the rate is the same
    scheduler = getattr(modules.schedules, config.scheduler_name)(optimizer, **params)
    result = []
    for _ in range(STEPS):
        result.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return result


def expected(modules, config, ranks):
    """Their values by our names; those that both sides have."""
    zero = config.zero_config
    tier = {"none": "device", "cpu": "host", "nvme": "nvme"}
    param = zero.offload_param.device if zero.offload_param else "none"
    state = zero.offload_optimizer.device if zero.offload_optimizer else "none"
    values = {
        "batch": config.train_micro_batch_size_per_gpu, "accumulate": config.gradient_accumulation_steps,
        "clip": config.gradient_clipping,
        "dtype": "fp16" if config.float16_config.enabled else "bf16" if config.bfloat16_config.enabled else "fp32",
        "zero_stage": int(zero.stage), "reduce_bucket_size": zero.reduce_bucket_size,
        "max_live_parameters": zero.max_live_parameters, "max_reuse_distance": zero.max_reuse_distance,
        "prefetch_bucket_size": zero.prefetch_bucket_size, "param_persistence_threshold": zero.param_persistence_threshold,
        "placement": f"params={tier[param]},grads={'host' if state != 'none' else 'device'},optimizer={tier[state]}"}
    for offload in (zero.offload_param, zero.offload_optimizer):
        if offload and offload.device == "nvme" and offload.nvme_path:
            values["store"] = str(offload.nvme_path)
    if config.float16_config.enabled:
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"):
            values[name] = getattr(config.float16_config, name)
    if ranks > 1:
        three = int(zero.stage) == 3  # elsewhere its engine does not read them
        values["quantized_weights"] = three and zero.zero_quantized_weights
        values["quantized_gradients"] = 4 if three and zero.zero_quantized_gradients else 16
        values["hpz"] = zero.zero_hpz_partition_size if three and 1 < zero.zero_hpz_partition_size < ranks else 0
        if config.communication_data_type is not None and values["quantized_gradients"] == 16:
            values["reduce_dtype"] = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}[
                str(config.communication_data_type)]
    if config.optimizer_name is not None:
        theirs = optimizer_values(modules, config)
        values["weight_decay"] = theirs["weight_decay"]
        for name in ("eps", "betas"):
            if name in theirs:
                values[name] = list(theirs[name]) if name == "betas" else theirs[name]
        if "momentum" in theirs:
            values["betas"] = [theirs["momentum"], 0.999]
    return values


def same(a, b):
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, bool) or isinstance(b, bool) or isinstance(a, str):
        return a == b
    return abs(a - b) <= 1e-7 * max(abs(a), abs(b))  # ours may be an fp32


def compare(binary, modules, name, config, ranks, folder):
    try:
        theirs = deepspeeds(modules, config, ranks)
    except Refused as refusal:
        try:
            ours(binary, config, ranks, folder)
        except Refused:
            return "refused by both"
        raise Different(f"{name}, {ranks} ranks: DeepSpeed refuses it ({refusal}) and ziggurat does not: {json.dumps(config)}")
    try:
        values, our_rates, notes = ours(binary, config, ranks, folder)
    except Refused as refusal:
        scheduler_lacks = theirs.scheduler_name is not None and "is missing" in str(refusal)  # its constructor refuses
        if scheduler_lacks or "scheduler.type" in str(refusal):
            return "refused by DeepSpeed's scheduler too"
        raise Different(f"{name}, {ranks} ranks: DeepSpeed takes it and ziggurat does not: {refusal}\n{json.dumps(config)}")
    for key, value in expected(modules, theirs, ranks).items():
        if not same(values[key], value):
            raise Different(f"{name}, {ranks} ranks: {key} is {values[key]!r} here and {value!r} in DeepSpeed: {json.dumps(config)}\n"
                     + "\n".join(notes))
    if theirs.optimizer_name is not None:
        for step, (rate, their_rate) in enumerate(zip(our_rates, rates(modules, theirs))):
            if abs(rate - their_rate) > TOLERANCE * max(map(abs, our_rates)) + 1e-18:
                raise Different(f"{name}, {ranks} ranks: step {step} has rate {rate!r} here and {their_rate!r} in DeepSpeed: {json.dumps(config)}")
    return "the same"


class Modules:
    """DeepSpeed's, under a world of as many ranks as are wanted."""

    def __init__(self):
        self.torch = importlib.import_module("torch")
        self.optim = self.torch.optim
        self.config = importlib.import_module("deepspeed.runtime.config")
        self.schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
        self.cpu_adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        self.fused_adam = importlib.import_module("deepspeed.ops.adam").FusedAdam
        self.cpu_lion = importlib.import_module("deepspeed.ops.lion").DeepSpeedCPULion
        self.fused_lion = importlib.import_module("deepspeed.ops.lion").FusedLion
        self.cpu_adagrad = importlib.import_module("deepspeed.ops.adagrad").DeepSpeedCPUAdagrad
        self.world_size = 1
        self.config.dist.get_rank = lambda *_: 0
        self.config.dist.get_world_size = lambda *_: self.world_size
        logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)


def main():
    binary = sys.argv[1]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        modules = Modules()
    except Exception as error:  # whatever importing it runs into is a reason to do without
        print(f"skipped: {error}")
        return SKIPPED
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            config = filled(config)
            for variant, changed in [("whole", config), *left_out(config)]:
                several = 4 if name == "zero++" else 2
                for ranks in ((1, 2, several) if variant == "whole" else (several,)):
                    try:
                        outcome = compare(binary, modules, f"{name}, {variant}", changed, ranks, folder)
                    except Different as difference:
                        print(difference)
                        outcome = "different"
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
            print(f"{name}: compared", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    if "different" in outcomes:
        return 1
    if outcomes.get("the same", 0) < 100 or outcomes.get("refused by both", 0) < 10:
        sys.exit("too few were compared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
