# SPDX-License-Identifier: Apache-2.0
"""What ziggurat.deepspeed takes for a config, refuses, names and gives the engine; and what fills in
"auto". Values and refusals beside DeepSpeed's own.

Run by pytest; as a script it exits with 77 where PyTorch, DeepSpeed, transformers, accelerate or
pytest is missing.
"""

import base64
import importlib.util
import json
import sys
from types import SimpleNamespace

try:
    import pytest
    import torch
    from deepspeed_peers import (
        FOLDER,
        arguments,
        assert_alike,
        by_accelerate,
        by_transformers,
        deepspeeds,
        ours_of_accelerate,
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


def refusal(config, **more):
    with pytest.raises(InvalidArgument) as refused:
        Config(config, world_size=1, **more)
    return str(refused.value)


def test_a_config_may_be_a_dict_a_file_its_text_or_base64(tmp_path):
    text = '{"train_batch_size": 6, /* three */ "gradient_accumulation_steps": 3, }  # Hjson'
    file = tmp_path / "ds.json"
    file.write_text(text)
    plain_text = '{"train_batch_size": 6, "gradient_accumulation_steps": 3}'
    encoded = base64.urlsafe_b64encode(plain_text.encode()).decode()
    args = SimpleNamespace(deepspeed_config=str(file))
    forms = [json.loads(plain_text), file, str(file), text, encoded]
    for given in (*forms, None):
        config = Config(given, world_size=1, args=args)
        assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (6, 2)
    assert "neither a file that exists" in refusal(str(tmp_path / "other.json"))
    assert str(file) in refusal_of_text(file, '{"train_batch_size": "six"}')
    assert "--deepspeed_config" in refusal(None)
    assert "a value that JSON cannot hold" in refusal({"train_batch_size": object()})


def refusal_of_text(file, text):
    file.write_text(text)
    return refusal(file)


def test_a_key_that_is_there_twice_is_refused_as_there():
    assert '"fp16" twice' in refusal('{"train_batch_size": 1, "fp16": {}, "fp16": {}}')


# In one line each: a config, and what ours has against it; DeepSpeed refuses all of them.
REFUSED = [
    ({}, '"train_micro_batch_size_per_gpu" is missing'),
    ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, "2 x 1 x 1 is 2"),
    ({"train_batch_size": "auto"}, '"train_batch_size" is "auto": give a value'),
    ({"gradient_accumulation_steps": "auto"}, '"gradient_accumulation_steps" is "auto"'),
    ({"wall_clock_breakdown": "auto"}, '"wall_clock_breakdown" is "auto"'),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "a model has one type"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, '"fp16.loss_scale_window" is 0'),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, '"fp16.loss_scale" is -1'),
    ({"zero_optimization": {"stage": 4}}, "give 0 to 3"),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, "give 1 to"),
    ({"zero_optimization": {"overlap_com": True}}, 'did you mean "overlap_comm"?'),
    ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "give none, cpu or nvme"),
    ({"zero_optimization": {"mics_shard_size": 2}}, "DeepSpeed has removed this key"),
    ({"tensorboard": {"enabled": True, "path": "x"}}, '"tensorboard.path" is not a key'),
    ({"csv_monitor": {"enabled": "often"}}, '"csv_monitor.enabled" must be true or false'),
    ({"checkpoint": {"tag_validation": "Loud"}}, "Warn, Ignore or Fail"),
    ({"communication_data_type": "int8"}, "give fp32, bf16 or fp16"),
    ({"data_types": {"param_dtype": "bf16"}}, "the model is in fp32"),
    ({"amp": {"enabled": True}}, "give fp16 or bf16"),
    ({"gradient_allreduce_op": "max"}, '"gradient_allreduce_op" is "max"'),
]
# DeepSpeed's config is taken; its engine fails of it.
ONLY_BY_ITS_ENGINE = ({"data_types": {"param_dtype": "bf16"}},)


def with_batch(config):
    batches = ("train_batch_size", "gradient_accumulation_steps")
    own = not config or any(key in config for key in batches)
    return config if own else {"train_batch_size": 1, **config}


def test_what_deepspeed_refuses_is_refused_by_path():
    asked = [(with_batch(config), words) for config, words in REFUSED]
    asked[3][0]["train_micro_batch_size_per_gpu"] = 1
    answers = deepspeeds([{"config": config, "world_size": 1} for config, _ in asked])
    for (config, words), found, (written, _) in zip(asked, answers, REFUSED, strict=True):
        assert "refused" in found or written in ONLY_BY_ITS_ENGINE, config
        assert words in refusal(config), config


def test_auto_that_nobody_fills_in_is_deepspeeds_default_where_it_drops_it():
    config = {
        "train_batch_size": 4,
        "fp16": {"enabled": "auto", "loss_scale": 8},
        "bf16": {"enabled": "auto"},
        "tensorboard": {"enabled": "auto", "job_name": "auto"},
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "sub_group_size": "auto",
        },
    }
    (found,) = deepspeeds([{"config": config, "world_size": 1}])
    assert_alike("auto", config, found)
    notes = Config(config, world_size=1).notes
    assert any('"zero_optimization.stage" is "auto" and was not filled in' in n for n in notes)


def test_batch_sizes_are_completed_for_the_ranks():
    cases = [
        {"train_batch_size": 24},
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2},
        {"train_batch_size": 24, "gradient_accumulation_steps": 3},
        {"train_micro_batch_size_per_gpu": 5},
        {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2},
    ]
    for config, found in zip(
        cases, deepspeeds([{"config": c, "world_size": 4} for c in cases]), strict=True
    ):
        assert_alike(str(config), config, found, ranks=4)


EVERYTHING = {
    "train_batch_size": 4,
    "gradient_clipping": 0.25,
    "steps_per_print": 7,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "dataloader_drop_last": True,
    "communication_data_type": "FP32",
    "bfloat16": {"enabled": True, "check_grad_overflow": False},
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 9, "warmup_type": "linear"},
    },
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "mine"},
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "also"},
    "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
    "checkpoint": {"tag_validation": "Fail", "use_node_local_storage": True},
    "aio": {"block_size": 65536, "queue_depth": 4, "single_submit": True, "overlap_events": False},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 1e6,
        "stage3_max_live_parameters": 2e6,
        "prefetch_bucket_size": 3e6,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
}


def test_what_is_said_is_read_as_deepspeed_reads_it():
    (found,) = deepspeeds([{"config": EVERYTHING, "world_size": 1}])
    assert_alike("everything", EVERYTHING, found)
    scaled = {
        "train_batch_size": 1,
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": 5,
            "loss_scale_window": 3,
            "hysteresis": 4,
            "consecutive_hysteresis": True,
            "min_loss_scale": 2,
        },
        "flops_profiler": {"enabled": True},
    }
    (found,) = deepspeeds([{"config": scaled, "world_size": 1}])
    assert found["wall_clock_breakdown"] is True
    assert_alike("fp16", scaled, found)


def test_what_means_nothing_here_is_named():
    config = {
        "train_batch_size": 2,
        "comms_config": {"verbose": True},
        "comet": {"enabled": True},
        "aio": {"thread_count": 4},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e9,
            "allgather_bucket_size": 1e9,
            "offload_param": {"device": "cpu", "buffer_count": 3},
        },
    }
    notes = Config(config, world_size=2).notes
    for path, words in [
        ("comms_config", "neither Ziggurat nor DeepSpeed"),
        ("comet", "`csv_monitor`"),
        ("aio.thread_count", "`intra_op_parallelism`"),
        ("zero_optimization.sub_group_size", "chunks of its own"),
        ("zero_optimization.allgather_bucket_size", "one unit at a time"),
        ("zero_optimization.offload_optimizer.device", "host memory all the same"),
    ]:
        assert any(f'"{path}"' in note and words in note for note in notes), path
    assert not any("offload_param" in note for note in notes), "what is honoured needs no note"


def test_what_the_engine_is_given_follows_from_offload():
    def given(offload, **more):
        zero = {"stage": 2, **({"offload_optimizer": offload} if offload else {})}
        config = {"train_batch_size": 1, "zero_optimization": zero, **more}
        return Config(config, world_size=1).engine_arguments

    assert given(None) == given({"device": "none"}) == given({"device": "cpu"})
    assert given({"device": "cpu"}) == {"placement": "host"}
    # DeepSpeed takes nvme for cpu below stage 3, and writes no file.
    assert given({"device": "nvme", "nvme_path": "/n"}) == {"placement": "nvme:/n"}
    assert given(None, host_memory="2GiB", threads=3, state_format="split") == {
        "placement": "host",
        "host_memory": "2GiB",
        "threads": 3,
        "state_format": "split",
    }
    missing = {
        "train_batch_size": 1,
        "zero_optimization": {"offload_optimizer": {"device": "nvme"}},
    }
    assert '"zero_optimization.offload_optimizer.nvme_path" is missing' in refusal(missing)


def test_state_in_bf16_is_a_format_of_ours():
    both = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {"train_batch_size": 1, "bf16": both, "zero_optimization": {"stage": 1}}
    assert Config(config, world_size=1).engine_arguments["state_format"] == "bf16"
    one = {**config, "bf16": {**both, "bf16_optimizer_states": False}}
    assert '"bf16.bf16_optimizer_states" is not; give both' in refusal(one)
    # DeepSpeed refuses these two.
    other = {**config, "bf16": {**both, "bf16_master_weights_and_grads": False}}
    assert '"bf16.bf16_master_weights_and_grads" is not; give both' in refusal(other)
    first = {"train_batch_size": 1, "bf16": both}
    assert "a stage from 1, as in DeepSpeed" in refusal(first)
    answers = deepspeeds([{"config": c, "world_size": 1} for c in (config, other, first)])
    assert ["refused" in found for found in answers] == [False, True, True]


def test_autocast_is_around_the_forward():
    def output(**more):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        optimizer = torch.optim.AdamW(model.parameters())
        config = {"train_batch_size": 1, **more}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine.module, engine(torch.ones(2, 4))

    model, cast = output(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cast, model(torch.ones(2, 4)))
    assert not torch.equal(cast, output()[1])
    for dtype in ("float16", None):
        section = {"enabled": True, **({"dtype": dtype} if dtype else {})}
        refused = refusal({"train_batch_size": 1, "torch_autocast": section})
        assert '"torch_autocast.dtype" is' in refused and "give bfloat16" in refused


def test_an_optimizer_has_deepspeeds_defaults_by_our_class():
    def made(kind, **params):
        section = {"type": kind, "params": params}
        config = Config({"train_batch_size": 1, "optimizer": section}, world_size=1)
        return config.optimizer_class, config.optimizer_arguments

    adam = {"lr": 1e-3, "weight_decay": 0, "maximize": False, "betas": (0.9, 0.999), "eps": 1e-8}
    assert made("Adam") == ("AdamW", adam)
    assert made("Adam", adam_w_mode=False) == ("Adam", adam)
    assert made("AdamW", torch_adam=True) == ("AdamW", {**adam, "weight_decay": 0.01})
    sgd = made("SGD", lr=0.1, momentum=0.9, nesterov=True)
    assert sgd[0] == "SGD" and sgd[1]["momentum"] == 0.9 and sgd[1]["nesterov"] is True
    assert made("Lion")[1]["betas"] == (0.9, 0.999), "torch-like Lions have 0.99"
    assert made("Adagrad", lr_decay=0.1)[1]["lr_decay"] == 0.1
    assert "OneBitAdam" in refusal(
        {"train_batch_size": 1, "optimizer": {"type": "OneBitAdam", "params": {}}}
    )


def test_filling_in_says_everything_that_contradicts_the_trainer(tmp_path):
    args = arguments(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.5,
        "train_batch_size": "auto",
    }
    with pytest.raises(InvalidArgument) as refused:
        fill_auto(config, args)
    for words in ('"train_micro_batch_size_per_gpu" is 8', "max_grad_norm is 0.7", 'say "auto"'):
        assert words in str(refused.value)
    assert config["train_batch_size"] == "auto", "the caller's is left as it is"
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu=8"):
        by_transformers(config, args)


def test_buckets_need_the_width_of_the_model(tmp_path):
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    args = arguments(tmp_path)
    with pytest.raises(InvalidArgument, match="hidden_size"):
        fill_auto(config, args, torch.nn.Linear(2, 2))
    several = SimpleNamespace(config=SimpleNamespace(hidden_sizes=[8, 32, 16]))
    assert fill_auto(config, args, several)["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    inner = SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(hidden_size=4)))
    assert fill_auto(config, args, inner)["zero_optimization"]["reduce_bucket_size"] == 16


def test_a_file_and_settings_beside_it_are_refused_as_accelerate_does(monkeypatch):
    settings = {
        "mixed_precision": "bf16",
        "deepspeed_config": {"deepspeed_config_file": "16_stage1.json", "zero_stage": 3},
    }
    monkeypatch.chdir(FOLDER)
    with pytest.raises(
        InvalidArgument, match="zero_stage, mixed_precision: set these in that file"
    ):
        ours_of_accelerate(settings, 1)
    with pytest.raises(ValueError, match="will be ignored"):
        by_accelerate(settings, monkeypatch, 1)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
