# SPDX-License-Identifier: Apache-2.0
"""What the tests of configs share: DeepSpeed's reading, Transformers', Accelerate's and ours."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ziggurat.deepspeed.auto import from_accelerate
from ziggurat.deepspeed._config import Config

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "deepspeed_configs"
MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
STEPS = 90  # of training, for schedules


def arguments(folder, **more):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        weight_decay=0.05,
        adam_beta2=0.98,
        adam_epsilon=1e-7,
        max_grad_norm=0.7,
        warmup_steps=7,
        **more,
    )


def steps_of(config):
    """As the config has them, where it says so."""
    said = config.get("scheduler", {}).get("params", {}).get("total_num_steps")
    return said if isinstance(said, int) else STEPS


def by_transformers(config, args):
    """As Transformers' own code fills it in, at both of its moments."""
    theirs = HfTrainerDeepSpeedConfig(config)
    theirs.trainer_config_process(args)
    theirs.trainer_config_finalize(args, MODEL, steps_of(config))
    theirs_of_accelerate = "stage3_gather_16bit_weights_on_model_save"
    if theirs.is_auto(f"zero_optimization.{theirs_of_accelerate}"):
        theirs.config["zero_optimization"][theirs_of_accelerate] = False
    return theirs.config


def environment_of(yaml):
    """What `accelerate launch` tells a script of its YAML file."""
    names = {
        "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    }
    given = yaml["deepspeed_config"]
    fields = [*given, *(["mixed_precision"] if "mixed_precision" in yaml else [])]
    told = {names[key]: str(given[key]).lower() for key in given if key in names}
    if "deepspeed_config_file" in given:
        told["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = given["deepspeed_config_file"]
    return {**told, "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields)}


def by_accelerate(yaml, monkeypatch, ranks):
    """As Accelerate's own plugin and its Accelerator.prepare() fill it in."""
    for name, text in environment_of(yaml).items():
        monkeypatch.setenv(name, text)
    plugin = accelerate.utils.DeepSpeedPlugin()
    plugin.set_mixed_precision(yaml.get("mixed_precision", "no"))
    plugin.fill_match(
        "gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=2
    )
    steps = plugin.get_value("gradient_accumulation_steps")
    plugin.deepspeed_config_process(
        must_match=False,
        **{
            "gradient_clipping": 1.0,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
            "train_micro_batch_size_per_gpu": 3,
            "train_batch_size": 3 * steps * ranks,
            "zero_optimization.reduce_bucket_size": 64 * 64,
            "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
            "zero_optimization.stage3_param_persistence_threshold": 640,
            "optimizer.params.lr": 2e-4,
            "optimizer.params.weight_decay": 0.05,
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": 2e-4,
            "scheduler.params.warmup_num_steps": 7,
            "scheduler.params.total_num_steps": math.ceil(STEPS / ranks),
        },
    )
    return plugin.deepspeed_config


def ours_of_accelerate(settings, ranks):
    return from_accelerate(
        settings,
        micro_batch_size=3,
        world_size=ranks,
        gradient_accumulation_steps=2,
        model=MODEL,
        lr=2e-4,
        weight_decay=0.05,
        warmup_num_steps=7,
        total_num_steps=STEPS,
    )


def deepspeeds(jobs):
    """What DeepSpeed says of each, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29713"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(HERE / "deepspeed_values.py")],
        input=json.dumps(jobs),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def plain(value):
    """As JSON has it: DeepSpeed's answers came as JSON."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return value


def values_of(config):
    """Ours by the same names."""
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "optimizer_name",
        "optimizer_params",
        "scheduler_name",
        "scheduler_params",
        "bf16_enabled",
        "torch_autocast",
        "check_grad_overflow",
        "communication_data_type",
        "fp16",
        "offload_optimizer",
        "offload_param",
        "zero_sizes",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "dataloader_drop_last",
        "use_node_local_storage",
        "tag_validation",
        "aio",
    )
    values = {name: plain(getattr(config, name)) for name in names}
    monitor = config.monitor
    for name in ("tensorboard", "csv_monitor", "wandb"):
        values[name] = plain(getattr(monitor, name))
    return values


def never_printed(config):
    """Infinity, as Accelerate writes it: DeepSpeed never prints, nor do we."""
    return config.get("steps_per_print") == float("inf")


OUR_CLASS = {"DeepSpeedCPUAdam": "AdamW", "FusedAdam": "AdamW", "AdamW": "AdamW"}


def assert_alike(name, config, found, ranks=1):
    ours = Config(config, world_size=ranks)
    values = values_of(ours)
    expected = {k: v for k, v in found.items() if k not in ("optimizer", "scheduler")}
    if never_printed(config):
        expected["steps_per_print"] = None
    assert values == expected, name
    if "optimizer" in found:
        theirs = dict(found["optimizer"])
        assert ours.optimizer_class == OUR_CLASS[theirs.pop("class")]
        for key, value in theirs.items():
            mine = ours.optimizer_arguments[key]
            assert (list(mine) if key == "betas" else mine) == value, (name, key)
    if "scheduler" in found:
        assert ours.scheduler_name == found["scheduler"]["class"]
        assert_schedule(name, ours, found["scheduler"])


def assert_schedule(name, ours, theirs):
    """What its constructor made of the parameters: a rate for each group, and whole steps."""
    given = ours.scheduler_params
    for key, of in (("warmup_min_lr", "min_lrs"), ("warmup_max_lr", "max_lrs")):
        if key in given and of in theirs:
            assert theirs[of] == [given[key]], (name, key)
    for key in ("warmup_num_steps", "total_num_steps"):
        if key in given and key in theirs:
            assert theirs[key] == given[key], (name, key)
