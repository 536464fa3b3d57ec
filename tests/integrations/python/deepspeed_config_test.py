# SPDX-License-Identifier: Apache-2.0
"""Our two readings of configs, by ziggurat.deepspeed and by `ziggurat train`, beside DeepSpeed's own,
Transformers' and Accelerate's.

The configs are in deepspeed_configs/, in the shapes in which people have them, and in
deepspeed_cases.json. Each key of the larger ones is left out, too. Run by pytest; as a script it exits
with 77 where PyTorch, DeepSpeed, transformers, accelerate or pytest is missing.
"""

import importlib.util
import json
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from deepspeed_peers import (
        CASES,
        FOLDER,
        MODEL,
        RATES,
        Refused,
        arguments,
        assert_alike,
        assert_command_alike,
        by_accelerate,
        by_command,
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


def config_of(case):
    return case["config"] if "config" in case else {"train_micro_batch_size_per_gpu": 2, **case["more"]}


def left_out(config, path=()):
    """Name and config with each key left out, one at a time."""
    for key in config:
        yield ".".join((*path, key)), {k: v for k, v in config.items() if k != key}
        if isinstance(config[key], dict):
            for name, inner in left_out(config[key], (*path, key)):
                yield name, {**config, key: inner}


def ours(reader, name, config, found, ranks, folder):
    """Why one of our readers refuses it; None where its values are those that DeepSpeed found."""
    try:
        if reader == "script":
            read = Config(config, world_size=ranks)
        else:
            read = by_command(["config", "--nproc", str(ranks)], config, folder)
    except (InvalidArgument, Refused) as refusal:
        return str(refusal)
    assert read is not None and "refused" not in found, (reader, name, ranks, config, found)
    if reader == "script":
        assert_alike(name, config, found, ranks)
    else:
        assert_command_alike(name, config, found, ranks, folder)
    return None


LARGE = [name for name in NAMES if name not in REFUSED_ON_A_CPU]
LARGE += [case["what"] for case in CASES if case.get("left_out")]
# By either reader, where DeepSpeed takes it, or does not look at it.
REFUSED_OF = {name: (words,) for name, words in REFUSED_BY_OURS.items()}
REFUSED_OF["14_stage3_state_in_bf16"] = ('"bf16.bf16_', '"torch_autocast.')


def has_auto(config):
    """Leaves something to a flag of the command's."""
    return '"auto"' in json.dumps(config)


@pytest.fixture(scope="module")
def variants(configs):
    """By name: what is left out, ranks, the config and what DeepSpeed makes of it."""
    wanted = [(name, 2, config) for name, config in configs.items() if name in LARGE]
    wanted += [(its["what"], its.get("ranks", 2), config_of(its)) for its in CASES if its.get("left_out")]
    found = {name: [] for name, _, _ in wanted}
    for name, ranks, config in wanted:
        found[name] += [("nothing", 1, config), ("nothing", ranks, config)]
        found[name] += [(left, ranks, without) for left, without in left_out(config)]
    jobs = [
        {"config": config, "world_size": ranks, "rates": RATES}
        for those in found.values()
        for _, ranks, config in those
    ]
    answers = iter(deepspeeds(jobs))
    return {name: [(*its, next(answers)) for its in those] for name, those in found.items()}


@pytest.mark.parametrize("reader", ["script", "command"])
@pytest.mark.parametrize("name", LARGE)
def test_whatever_is_left_out_both_readers_are_as_deepspeed(name, reader, variants, tmp_path):
    for left, ranks, config, found in variants[name]:
        if reader == "command" and has_auto(config):
            continue
        what = f"{name} without {left}"
        why = ours(reader, what, config, found, ranks, tmp_path)
        if why is None or "refused" in found:
            continue
        by_its_schedule = found["scheduler_name"] is not None and "is missing" in why
        not_built = any(words in why for words in REFUSED_OF.get(name, ()))
        assert by_its_schedule or not_built or "scheduler.type" in why, (what, why)


def asked(case):
    """Whether DeepSpeed can be asked: it knows neither our flags nor our names, nor who fills in "auto"."""
    usual = "not asked" if has_auto(config_of(case)) else ""
    return "flags" not in case and case.get("deepspeed", usual) != "not asked"


def test_both_readers_and_deepspeed_agree_on_every_case(tmp_path):
    cases = [case for case in CASES if asked(case)]
    assert len(cases) > 60
    jobs = [
        {"config": config_of(case), "world_size": case.get("ranks", 1), "rates": RATES}
        for case in cases
    ]
    for case, found in zip(cases, deepspeeds(jobs), strict=True):
        what, config, ranks = case["what"], config_of(case), case.get("ranks", 1)
        of_all = [case[key] for key in ("refused", "engine_refuses") if key in case]
        refused = of_all or [case[key] for key in case if key.endswith("_refused")]
        verdict = case.get("deepspeed", "refuses" if refused else "takes")
        assert ("refused" in found) == (verdict == "refuses"), (what, config, found)
        for reader in ("script", "command"):
            words = of_all or [case[key] for key in (f"{reader}_refused",) if key in case]
            said = not refused or reader in case or "both" in case
            if not words and (not said or (reader == "command" and has_auto(config))):
                continue
            why = ours(reader, what, config, found, ranks, tmp_path)
            assert (why is not None) == bool(words), (reader, what, why, config)
            if "engine_refuses" in case and reader == "script":
                assert case["engine_refuses"] in why


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
