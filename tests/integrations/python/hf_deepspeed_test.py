# SPDX-License-Identifier: Apache-2.0
"""Trainer with a config for DeepSpeed, and with Accelerate's; Trainer and Accelerate on two ranks.

Run by pytest; as a script it exits with 77 where PyTorch, transformers, accelerate or pytest is
missing.
"""

import json
import sys

try:
    import accelerate
    import pytest
    import torch
    import transformers
    from hf_test import arguments_of, logged, of_trainer, trainer_of
    from language_models import assert_same_bits, batches, bits, gpt2, loss_of
    from long_cases import long_case
    from rank_runs import on_ranks
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.hf
import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

_AUTO = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": "auto",
    },
}


def on_drive(folder):
    offload = {"device": "nvme", "nvme_path": str(folder)}
    return _AUTO | {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}


def trained(folder, optimizer, **more):
    arguments = arguments_of(folder, max_steps=6, **more)
    model = gpt2()
    trainer = trainer_of(model, arguments, optimizer(arguments))
    trainer.train()
    losses, own = logged(trainer, "loss"), of_trainer(trainer)
    if isinstance(own, ziggurat.torch.AdamW):
        own.close()
    return losses, bits(model), own


@pytest.mark.parametrize("bf16", [False, True])
def test_a_config_for_deepspeed_is_the_same_run(bf16, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(_AUTO))
    losses, found, optimizer = trained(
        tmp_path / "cpu", lambda a: ziggurat.hf.optimizer(a, config=str(file)), bf16=bf16
    )
    drive, on_nvme, other = trained(
        tmp_path / "nvme",
        lambda a: ziggurat.hf.optimizer(a, config=on_drive(tmp_path / "drive")),
        bf16=bf16,
    )
    assert optimizer.placement == "host"
    assert other.placement == f"nvme:{tmp_path}/drive/ziggurat-nvme"
    assert drive == losses
    assert_same_bits(on_nvme, found)
    if bf16:  # as DeepSpeed has it: the model is bf16, and masters are the engine's
        assert {p.dtype for g in optimizer.param_groups for p in g["params"]} == {torch.bfloat16}
    else:
        plain, same, _ = trained(tmp_path / "plain", lambda a: ziggurat.hf.optimizer(a))
        assert losses == plain
        assert_same_bits(found, same)


@pytest.mark.parametrize(("param", "state"), [("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")])
def test_stage_3_streams_parameters_in_trainer(param, state, tmp_path):
    drive = {"nvme_path": str(tmp_path / "drive")}
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": param, "max_in_cpu": 0, "buffer_count": 0, **drive},
        "offload_optimizer": {"device": state, **drive},
    }
    plain = _AUTO | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    expected, values, _ = trained(tmp_path / "plain", lambda a: ziggurat.hf.optimizer(a, config=plain))

    def run(resumed=None):
        arguments = arguments_of(tmp_path / "run", max_steps=6, save_strategy="steps", save_steps=3)
        model = gpt2()
        config = _AUTO | {"zero_optimization": zero}
        trainer = trainer_of(model, arguments, ziggurat.hf.optimizer(arguments, config=config))
        trainer.train(resume_from_checkpoint=resumed)
        streaming, _ = streaming_of(model.transformer.wte.weight)
        assert streaming.tier == {"cpu": "host"}.get(param, param) and not streaming.fits
        assert of_trainer(trainer).figures()["brought_bytes"] > 0
        of_trainer(trainer).close()
        return trainer, model

    trainer, model = run()
    assert logged(trainer, "loss") == expected
    assert_same_bits(bits(model), values)
    _, resumed = run(str(tmp_path / "run" / "checkpoint-3"))
    assert_same_bits(bits(resumed), values)


def test_a_config_without_optimizer_has_trainers(tmp_path):
    config = {key: value for key, value in _AUTO.items() if key != "optimizer"}
    arguments = arguments_of(tmp_path, optim="lion_32bit")
    factory, more = ziggurat.hf.optimizer(arguments, config=config)
    optimizer = factory()(gpt2(), **more)
    assert isinstance(optimizer, ziggurat.torch.Lion)
    assert optimizer.param_groups[0]["lr"] == arguments.learning_rate


def test_the_configs_optimizer_counts_whatever_optim_names(tmp_path):
    arguments = arguments_of(tmp_path, optim="adafactor")
    factory, more = ziggurat.hf.optimizer(arguments, config=_AUTO)
    assert isinstance(factory()(gpt2(), **more), ziggurat.torch.AdamW)
    with pytest.raises(ziggurat.InvalidArgument, match="adafactor"):
        ziggurat.hf.optimizer(arguments)


def test_accelerates_file_with_a_deepspeed_plugin(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  zero_stage: 2\n  offload_optimizer_device: cpu\n  gradient_accumulation_steps: 2\n"
    )
    # What the file leaves open is as the arguments say.
    arguments = arguments_of(tmp_path, bf16=True, optim="adamw_torch_fused", max_grad_norm=0.25)
    factory, more = ziggurat.hf.optimizer(arguments, config=file)
    optimizer = factory()(gpt2(), **more)
    assert isinstance(optimizer, ziggurat.torch.AdamW) and optimizer.placement == "host"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient_accumulation_steps": 7}, "gradient_accumulation_steps"),
        ({"gradient_clipping": 3.0}, "max_grad_norm"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "lr_scheduler_type"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, 'lr_scheduler_type="linear"'),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "logarithmic"),
    ],
)
def test_what_contradicts_the_arguments_is_refused(change, words, tmp_path):
    factory, more = ziggurat.hf.optimizer(arguments_of(tmp_path), config=_AUTO | change)
    with pytest.raises(ziggurat.InvalidArgument) as refusal:
        factory()(gpt2(), **more)
    assert words in str(refusal.value)


# On two ranks


def accelerated(rank, kind):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt2()
    where = {"model": model} if kind is ziggurat.torch.AdamW else {}
    optimizer = kind(model.parameters(), lr=5e-3, **where)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step, tokens in enumerate(batches(12)):
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens[rank::2])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    inner = accelerator.unwrap_model(model)
    return losses, [p.detach().clone() for p in inner.parameters()]


def test_accelerate_wraps_the_model_after_the_optimizer_was_made():
    def run(rank):
        return accelerated(rank, torch.optim.AdamW), accelerated(rank, ziggurat.torch.AdamW)

    for plain, own in on_ranks(2, run):
        assert own[0] == pytest.approx(plain[0], rel=1e-4)
        for a, b in zip(own[1], plain[1], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_trainer_on_two_ranks_and_its_checkpoints(tmp_path):
    def run(rank):
        def made(name, optimizer, resume=None, steps=6, **more):
            arguments = arguments_of(
                tmp_path / name, max_steps=steps, lr_scheduler_type="constant", **more
            )
            model = gpt2()
            trainer = trainer_of(model, arguments, optimizer(arguments))
            trainer.train(resume_from_checkpoint=resume)
            found = logged(trainer, "loss"), [p.detach().clone() for p in model.parameters()]
            if isinstance(of_trainer(trainer), ziggurat.torch.AdamW):
                of_trainer(trainer).close()
            return found

        saving = {"save_strategy": "steps", "save_steps": 3}
        plain = made("torch", lambda a: None)
        ours = made("ours", lambda a: ziggurat.hf.optimizer(a))
        nvme = lambda a: ziggurat.hf.optimizer(a, placement=f"nvme:{tmp_path}/state")  # noqa: E731
        made("nvme", nvme, steps=3, **saving)
        newest = str(tmp_path / "nvme" / "checkpoint-3")
        again = made("nvme", lambda a: ziggurat.hf.optimizer(a), resume=newest, **saving)
        return plain, ours, again

    results = on_ranks(2, run)
    plain, ours, again = results[0]
    assert ours[0] == pytest.approx(plain[0], rel=1e-3)
    for plain, ours, again in results:
        for a, b, c in zip(plain[1], ours[1], again[1], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
            assert torch.equal(b, c)


@pytest.mark.parametrize("param", ["cpu", long_case("nvme")])
def test_stage_3_on_two_ranks_is_not_wrapped(param, tmp_path):
    drive = {"nvme_path": str(tmp_path / "drive")}
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": param, "max_in_cpu": 0, "buffer_count": 0, **drive},
        "offload_optimizer": {"device": "cpu"},
    }

    def run(rank, name, its, resumed=None):
        arguments = arguments_of(
            tmp_path / name, max_steps=6, save_strategy="steps", save_steps=3, eval_on_start=True
        )
        model = gpt2()
        made = ziggurat.hf.optimizer(arguments, config=_AUTO | {"zero_optimization": its})
        trainer = trainer_of(model, arguments, made)
        trainer.eval_dataset = trainer.train_dataset
        trainer.train(resume_from_checkpoint=resumed)
        assert (trainer.model_wrapped is model) == (its is zero)
        of_trainer(trainer).close()
        return logged(trainer, "loss"), logged(trainer, "eval_loss"), bits(model)

    whole = on_ranks(2, run, "whole", {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    straight = on_ranks(2, run, "run", zero)
    for found, expected in zip(straight, whole, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)  # the norm is summed in another order
        assert found[1] == expected[1]
    for found, expected in zip(on_ranks(2, run, "run", zero, checkpoint), straight, strict=True):
        assert found[0][-3:] == expected[0][-3:]
        assert_same_bits(found[2], expected[2])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
