# SPDX-License-Identifier: Apache-2.0
"""What the tests of configs share: DeepSpeed's reading, Transformers', Accelerate's and ours, by a
script and by `ziggurat train`."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import deepspeed_operations
import transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ziggurat.deepspeed.auto import from_accelerate
from ziggurat.deepspeed._config import Config

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "deepspeed_configs"
#: A config a case, and what it means (deepspeed_config_test.cc).
CASES = json.loads((HERE.parent / "deepspeed_cases.json").read_text())
MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
STEPS = 90  # of training, for schedules
RATES = 100  # steps whose learning rates are compared


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
    environment |= {"MASTER_ADDR": "127.0.0.1"} | deepspeed_operations.ENVIRONMENT
    deepspeed_operations.build("CPUAdam", "ShareMemComm")
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


#: What deepspeed_values.py answers beside the values of a config.
NOT_A_VALUE = ("optimizer", "scheduler", "quantized", "made_with", "rates", "no_rates")


def assert_alike(name, config, found, ranks=1):
    ours = Config(config, world_size=ranks)
    values = values_of(ours)
    expected = {k: v for k, v in found.items() if k not in NOT_A_VALUE}
    if never_printed(config):
        expected["steps_per_print"] = None
    for those in (values, expected):  # a section that names no device offloads nothing
        for key in ("offload_param", "offload_optimizer"):
            if those[key] and those[key]["device"] == "none":
                those[key] = None
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


class Refused(Exception):
    """The command takes no such config."""


def by_command(arguments, config, folder):
    """What a command of ours says of it, as JSON."""
    file, report = folder / "ds.json", folder / "report.json"
    file.write_text(json.dumps(config))  # Infinity as Accelerate writes it
    command = [os.environ["ZIGGURAT_COMMAND"], *arguments, "--config", file, "--json", report]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2:
        raise Refused(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


def commands_values(found, ranks):
    """DeepSpeed's values by the names of `ziggurat train`; those that both have."""
    tier = {"none": "device", "cpu": "host", "nvme": "nvme"}
    offload = {name: found[f"offload_{name}"] or {} for name in ("param", "optimizer")}
    param, state = (offload[name].get("device", "none") for name in ("param", "optimizer"))
    grads = "host" if state != "none" else "device"
    values = {
        "batch": found["train_micro_batch_size_per_gpu"],
        "accumulate": found["gradient_accumulation_steps"],
        "clip": found["gradient_clipping"],
        "dtype": "fp16" if found["fp16"] else "bf16" if found["bf16_enabled"] else "fp32",
        "zero_stage": found["zero_stage"],
        "placement": f"params={tier[param]},grads={grads},optimizer={tier[state]}",
        **found["zero_sizes"],
    }
    for its in offload.values():
        if its.get("device") == "nvme" and its["nvme_path"]:
            values["store"] = its["nvme_path"]
    if found["fp16"]:
        values |= {name: value for name, value in found["fp16"].items() if name != "auto_cast"}
    if ranks > 1:
        stage3 = found["zero_stage"] == 3  # elsewhere its engine does not read them
        weights, gradients, group = (stage3 and its for its in found["quantized"].values())
        values["quantized_weights"] = weights
        values["quantized_gradients"] = 4 if gradients else 16
        values["hpz"] = group if 1 < group < ranks else 0
        if found["communication_data_type"] is not None and not gradients:
            values["reduce_dtype"] = found["communication_data_type"]
    if "made_with" in found:
        made = dict(found["made_with"])
        if "momentum" in made:
            made["betas"] = [made.pop("momentum"), 0.999]
        values |= {name: made[name] for name in ("weight_decay", "eps", "betas") if name in made}
        if found["scheduler_name"] is None:
            values["lr"] = made["lr"]
    return values


def same(a, b):
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool | str) or isinstance(b, bool | str):
        return a == b
    return abs(a - b) <= 1e-7 * max(abs(a), abs(b))  # ours may be an fp32


def assert_command_alike(name, config, found, ranks, folder):
    arguments = ["--nproc", str(ranks), "--steps", str(RATES)]
    settings = by_command(["config", *arguments], config, folder)["settings"]
    for key, value in commands_values(found, ranks).items():
        assert same(settings[key]["value"], value), (name, ranks, key, config)
    if found["scheduler_name"] is None or "rates" not in found:
        return
    steps = by_command(["schedule", *arguments], config, folder)["steps"]
    ours = [step["learning_rate"] for step in steps]
    # A logarithm and a cosine of our own.
    most = 1e-12 * max(map(abs, ours)) + 1e-18
    for step, (mine, theirs) in enumerate(zip(ours, found["rates"], strict=True)):
        assert abs(mine - theirs) <= most, (name, ranks, step, mine, theirs, config)
