# SPDX-License-Identifier: Apache-2.0
"""What ziggurat.deepspeed takes for a config, names and gives the engine; and what fills in "auto".
What keys mean and which are refused is in deepspeed_config_test.py.

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
        by_accelerate,
        by_transformers,
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
