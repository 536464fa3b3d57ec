# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload() of models of transformers, by themselves, with adapters of PEFT and in Trainer: the losses without it.

Run by pytest; as a script it exits with 77 where PyTorch, transformers or pytest is missing, or PyTorch
is older than offload() takes.
"""

import sys

try:
    import pytest
    import torch
    import transformers
    from language_models import batches, gpt2, llama, loss_of
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.hf
import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import gathered, offload

ENDS = {"eos_token_id": 0, "pad_token_id": 0}
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}


def large_llama(**changes):
    """One whose embedding is large enough for a unit."""
    return llama(vocab_size=300, num_hidden_layers=3, **changes)


def t5():
    torch.manual_seed(1)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=300, dropout_rate=0.0, decoder_start_token_id=0, **sizes, **ENDS
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral():
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        num_key_value_heads=2,
        num_local_experts=4,
        intermediate_size=128,
        output_router_logits=True,  # so that a loss is made of what is inside the blocks
        **SMALL,
        **ENDS,
    )
    return transformers.MixtralForCausalLM(config)


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model


def adapted(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


MODELS = {
    "gpt2": gpt2,
    "llama": large_llama,
    "llama, tied": lambda: large_llama(tie_word_embeddings=True),
    "llama, bf16": lambda: large_llama().bfloat16(),
    "llama, checkpointed": lambda: checkpointed(large_llama(use_cache=False)),
    "llama, tied and checkpointed": lambda: checkpointed(
        large_llama(use_cache=False, tie_word_embeddings=True)
    ),
    "llama, adapted": lambda: adapted(large_llama()),
    "llama, adapted and checkpointed": lambda: adapted(
        checkpointed(large_llama(use_cache=False))
    ),
    "t5": t5,
    "mixtral": mixtral,
}


def offloaded(model, placement: str = "host"):
    return offload(model, memory=divide(model, "auto").smallest()[0], placement=placement)


def run(model, folder, offloads: bool) -> list[float]:
    """Trains, evaluates and generates. Returns the losses, tokens and sums of parameters."""
    if offloads:
        offloaded(model.train(), "nvme")
    optimizer = ziggurat.torch.AdamW(
        [param for param in model.parameters() if param.requires_grad],
        lr=1e-2,
        placement=f"nvme:{folder}",
    )
    found = []
    for step, batch in enumerate(batches(4)):
        loss = loss_of(model.train(), batch)
        loss.backward()
        found += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(loss_of(model, batch).item())
        if step == 1:
            made = model.generate(input_ids=batch[:1, :4], max_new_tokens=5, do_sample=False)
            found += made.flatten().tolist()
    for param in model.parameters():
        with gathered(param):
            found.append(param.double().sum().item())
    if offloads:
        streaming, _ = streaming_of(next(model.parameters()))
        assert all(unit.pins == 0 for unit in streaming.units)
        assert "away" in repr(next(model.parameters()))
    optimizer.close()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_without_it(name, tmp_path):
    make = MODELS[name]
    assert run(make(), tmp_path / "ours", True) == run(make(), tmp_path / "plain", False)


def test_units_are_the_blocks_that_a_model_names():
    names = [unit.name for unit in divide(large_llama(), "auto").units]
    layers = [f"model.layers.{i}" for i in range(3)]
    assert names == ["(root)", "model.embed_tokens", *layers, "lm_head"]
    tied = [unit.name for unit in divide(large_llama(tie_word_embeddings=True), "auto").units]
    assert tied == names[:-1]


@pytest.mark.filterwarnings("ignore")
def test_in_trainer(tmp_path):
    """Trained to a checkpoint, and from there with another model."""
    data = [{"input_ids": one[0], "labels": one[0]} for one in batches(12, size=1)]
    results = []
    for offloads in (False, True):
        histories = []
        for steps in (4, 6):
            model = gpt2(seed=steps)
            if offloads:
                offloaded(model)
            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path / str(offloads)),
                max_steps=steps,
                save_steps=2,
                eval_strategy="steps",
                eval_steps=2,
                logging_steps=1,
                per_device_train_batch_size=2,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(
                model,
                arguments,
                train_dataset=data,
                eval_dataset=data[:4],
                optimizer_cls_and_kwargs=ziggurat.hf.optimizer(arguments, placement="host"),
            )
            trainer.train(resume_from_checkpoint=steps == 6)
            losses = ("loss", "eval_loss", "grad_norm")
            histories += [
                (key, entry[key]) for entry in trainer.state.log_history for key in losses if key in entry
            ]
            assert not offloads or "away" in repr(next(model.parameters()))
        results.append(histories)
    assert len(results[0]) > 10
    assert results[0] == results[1]


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
