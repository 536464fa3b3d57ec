# SPDX-License-Identifier: Apache-2.0
"""ziggurat.deepspeed's reading of configs beside DeepSpeed's own, Transformers' and Accelerate's.

The configs are in deepspeed_configs/, in the shapes in which people have them. Run by pytest; as a
script it exits with 77 where PyTorch, DeepSpeed, transformers, accelerate or pytest is missing.
"""

import importlib.util
import json
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from deepspeed_peers import (
        FOLDER,
        MODEL,
        arguments,
        assert_alike,
        by_accelerate,
        by_transformers,
        deepspeeds,
        ours_of_accelerate,
        steps_of,
    )

    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("no deepspeed")
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.deepspeed as deepspeed
from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed.auto import fill_auto

torch.set_num_threads(1)

# Whose files they are, by number: Transformers' Trainer fills them in, Accelerate does, or nobody.
BY_TRANSFORMERS = (1, 2, 3, 4, 6, 7, 8, 11, 12)
BY_ACCELERATE = (5, 9, 16)

# What DeepSpeed refuses, and the words of ours that say what is wrong.
REFUSED_BY_BOTH = {
    "06_stage3_fp16_older": '"train_micro_batch_size_per_gpu" is missing',
    "12_stage3_all_on_nvme_unknown_keys": '"zero_optimization.offload_optimizer.buffer_size" is not a key',
}
# What DeepSpeed takes and ours does not: it would change what is trained, and is not built.
REFUSED_BY_OURS = {
    "13_stage2_zenflow": '"zero_optimization.zenflow"',
}
# DeepSpeed has this for CUDA alone; ours says that it changes nothing.
REFUSED_ON_A_CPU = {"10_stage3_params_on_nvme_gds": '"aio.use_gds" changes nothing'}
# DeepSpeed's engine has no fp16 on a CPU: its values are those of its config, and the optimizer and
# the schedule those of its engine with fp16 off.
FP16 = ("05_stage3_fp16_template", "15_stage2_cpu_offload_as_it_was")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Name, ranks and the config of each, with no "auto" left that its trainer would fill in."""
    folder = tmp_path_factory.mktemp("configs")
    all_of_them = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER)
        for path in sorted(FOLDER.glob("*.json")):
            number, config = int(path.name[:2]), json.loads(path.read_text())
            if number in BY_TRANSFORMERS:
                fp16 = config.get("fp16", {}).get("enabled") is True
                args = arguments(folder, bf16=not fp16)
                args.fp16 = fp16  # not its constructor: it refuses fp16 without a GPU
                if fp16 and "optimizer" in config:
                    args = agreeing(args, config)
                filled = by_transformers(config, args)
                assert fill_auto(config, args, MODEL, steps_of(config)) == filled
            elif number in BY_ACCELERATE:
                settings = {"deepspeed_config": {"deepspeed_config_file": path.name}}
                with pytest.MonkeyPatch.context() as inner:
                    filled = by_accelerate(settings, inner, 1)
                assert ours_of_accelerate(settings, 1) == filled
            else:
                filled = config
            all_of_them[path.stem] = filled
    return all_of_them


def agreeing(args, config):
    """The arguments that a config without "auto" has to agree with."""
    params, schedule = config["optimizer"]["params"], config["scheduler"]["params"]
    args.learning_rate, args.weight_decay = params["lr"], params["weight_decay"]
    args.adam_beta1, args.adam_beta2 = params["betas"]
    args.adam_epsilon = params["eps"]
    args.warmup_steps = schedule["warmup_num_steps"]
    args.max_grad_norm = config.get("gradient_clipping", 1.0)
    args.gradient_accumulation_steps = config.get("gradient_accumulation_steps", 1)
    return args


@pytest.fixture(scope="module")
def theirs(configs):
    jobs = []
    for name, config in configs.items():
        # 10 trains nothing; 14 would compile DeepSpeed's FusedAdam, for minutes.
        configured_only = name.startswith(("10_", "14_")) or name in (*FP16, *REFUSED_BY_OURS)
        runs = not configured_only
        jobs.append({"config": config, "world_size": 1, "run": runs})
    # The optimizer and the schedule of fp16 runs, by an engine in fp32.
    for name in FP16:
        config = json.loads(json.dumps(configs[name]))
        config["fp16"]["enabled"] = False
        jobs.append({"config": config, "world_size": 1, "run": "optimizer" in config})
    answers = deepspeeds(jobs)
    found = dict(zip(configs, answers, strict=False))
    for name, without in zip(FP16, answers[len(configs) :], strict=True):
        found[name] |= {k: v for k, v in without.items() if k in ("optimizer", "scheduler")}
    return found


ENGINE_ANSWERS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
)
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def test_there_are_sixteen_numbers():
    assert {int(name[:2]) for name in NAMES} == set(range(1, 17))


@pytest.mark.parametrize("name", NAMES)
def test_effective_values_are_deepspeeds(name, configs, theirs):
    found = theirs[name]
    if name in REFUSED_BY_BOTH:
        assert "refused" in found
        with pytest.raises(InvalidArgument) as refusal:
            Config(configs[name], world_size=1)
        assert REFUSED_BY_BOTH[name] in str(refusal.value)
    elif name in REFUSED_BY_OURS:
        assert "refused" not in found
        with pytest.raises(InvalidArgument) as refusal:
            Config(configs[name], world_size=1)
        assert REFUSED_BY_OURS[name] in str(refusal.value)
    elif name in REFUSED_ON_A_CPU:
        assert "GDS" in found["refused"]
        notes = Config(configs[name], world_size=1).notes
        assert any(REFUSED_ON_A_CPU[name] in note for note in notes)
    else:
        assert "refused" not in found, found
        assert_alike(name, configs[name], found)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in (*REFUSED_BY_BOTH, *REFUSED_BY_OURS)]
)
def test_the_engine_of_initialize_answers_as_deepspeeds(name, configs, theirs, tmp_path):
    """fp16 trains here without a GPU; state on NVMe is in a folder of this test."""
    config, found = json.loads(json.dumps(configs[name])), theirs[name]
    for section in ("offload_optimizer", "offload_param"):
        offload = config["zero_optimization"].get(section, {})
        if offload.get("nvme_path"):
            offload["nvme_path"] = str(tmp_path)
    model = torch.nn.Linear(8, 8)
    client = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=None if client else model.parameters(),
        optimizer=client,
        config=config,
    )
    if "refused" in found:
        assert name in REFUSED_ON_A_CPU
        return
    for key in ENGINE_ANSWERS:
        mine = getattr(engine, key)()
        assert mine == found[key] or (key, mine) == ("steps_per_print", None), (name, key)
    assert engine.fp16_enabled() == (found["fp16"] is not None)
    assert engine.zero_optimization_stage() == found["zero_stage"]
    assert engine.bfloat16_enabled() == found["bf16_enabled"]
    if "optimizer" in found:
        group = optimizer.param_groups[0]
        assert list(group["betas"]) == found["optimizer"]["betas"]
        assert group["weight_decay"] == found["optimizer"]["weight_decay"]
    if "scheduler" in found:
        assert type(scheduler).__name__ == found["scheduler"]["class"]
    engine.destroy()


@pytest.mark.parametrize(("file", "ranks"), [("16_names_a_file.yaml", 2), ("16_inline.yaml", 8)])
def test_a_yaml_file_of_accelerates_is_read_as_accelerate_does(file, ranks, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(FOLDER)
    filled = by_accelerate(yaml.safe_load(Path(file).read_text()), monkeypatch, ranks)
    assert ours_of_accelerate(file, ranks) == filled
    (found,) = deepspeeds([{"config": filled, "world_size": ranks}])
    assert_alike(file, filled, found, ranks)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
