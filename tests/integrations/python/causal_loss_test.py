# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload(chunked_loss=True) of transformers' causal language models: the losses of whole logits, the
bits that they have without offload(), and refusals.

Run by pytest; as a script it exits with 77 where PyTorch, transformers or pytest is missing, or PyTorch
is older than offload() takes.
"""

import sys

try:
    import pytest
    import torch
    import transformers
    from language_models import assert_same_bits, batches, bits, gpt2, llama
    from small_models import one_thread  # noqa: F401, a fixture
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.hf
import ziggurat.torch
from ziggurat import InvalidArgument, Unimplemented
from ziggurat._losses import chunked_loss
from ziggurat._losses.causal_loss import VOCABULARY_MIN, compute_in_chunks, find_head
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import gathered

pytestmark = pytest.mark.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

VOCABULARY = 300
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 96, "vocab_size": VOCABULARY, "eos_token_id": 0, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks for each of the small batches."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 16 * VOCABULARY * 20)


def large_llama(**changes):
    """One whose embedding and head are large enough for units."""
    return llama(vocab_size=VOCABULARY, **changes)


def of_config(config, name, **changes):
    torch.manual_seed(1)
    kind = getattr(transformers, name)
    return kind(getattr(transformers, config)(**SMALL, **changes)).train()


def adapted(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


MODELS = {
    "gpt2, tied": gpt2,
    "llama": large_llama,
    "llama, tied": lambda: large_llama(tie_word_embeddings=True),
    "llama, bf16": lambda: large_llama().bfloat16(),
    "llama, adapted": lambda: adapted(large_llama()),
    "llama, head frozen": lambda: head_frozen(large_llama()),
    # Logits that are scaled, limited, or changed and called otherwise
    "gemma 2": lambda: of_config("Gemma2Config", "Gemma2ForCausalLM", final_logit_softcapping=0.1, head_dim=16),
    "granite": lambda: of_config("GraniteConfig", "GraniteForCausalLM", logits_scaling=3.0),
    "cohere": lambda: of_config("CohereConfig", "CohereForCausalLM", logit_scale=0.25),
    "mixtral": lambda: of_config(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, output_router_logits=True
    ),
}


def head_frozen(model):
    model.lm_head.requires_grad_(False)
    return model


def chunked(model):
    """The model by itself, with a chunked loss."""
    compute_in_chunks(*find_head(model, True))
    return model


def offloaded(model, placement="host", **settings):
    memory = divide(model, "auto").smallest()[0]
    return ziggurat.torch.offload(model, memory=memory, placement=placement, **settings)


def run(model, folder):
    """Trains with accumulation, and evaluates. Returns the losses, the norms and the parameters' bits."""
    optimizer = ziggurat.torch.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-3, placement=f"nvme:{folder}"
    )
    found = []
    for step, batch in enumerate(batches(6)):
        loss = model(input_ids=batch, labels=batch).loss / 2
        loss.backward()
        found.append(loss.item())
        if step % 2:
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found.append(model(input_ids=batch, labels=batch).loss.item())
    params = []
    for param in model.parameters():
        with gathered(param):
            params.append(param.detach().clone())
    optimizer.close()
    return found, params


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_whole_logits_and_bits_those_without_offload(name, tmp_path):
    make = MODELS[name]
    whole, _ = run(make(), tmp_path / "whole")
    losses, params = run(chunked(make()), tmp_path / "chunked")
    # Three steps grow what rounding differs by; in bf16 that is 2**-9 of each gradient.
    assert losses == pytest.approx(whole, rel=1e-2 if "bf16" in name else 2e-5)
    for number, placement in enumerate(["host", "nvme", "params=nvme,grads=nvme"]):
        model = offloaded(make(), placement, chunked_loss=True)
        ours, ours_params = run(model, tmp_path / f"ours-{number}")
        assert ours == losses
        assert all(map(torch.equal, ours_params, params))
        streaming, _ = streaming_of(next(model.parameters()))
        assert all(unit.pins == 0 for unit in streaming.units)


class Largest(TorchDispatchMode):
    """Finds the most elements that a result has."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.count = max(self.count, result.numel())
        return result


@pytest.mark.parametrize("make", [gpt2, llama])
def test_no_logits_are_built(make):
    """The vocabulary is so large that nothing else is as large as whole logits."""
    batch = torch.cat(batches(4, size=8))
    counts = []
    for model in (make(vocab_size=1024), chunked(make(vocab_size=1024))):
        with Largest() as largest:
            model(input_ids=batch, labels=batch).loss.backward()
        counts.append(largest.count)
    vocabulary = model.config.vocab_size
    assert counts[0] == batch.numel() * vocabulary
    assert counts[1] < batch.numel() * vocabulary / 2
    # Without labels or gradients they are built.
    assert model(input_ids=batch).logits.shape == (*batch.shape, vocabulary)
    with torch.no_grad():
        assert model(input_ids=batch, labels=batch).logits.shape == (*batch.shape, vocabulary)


def test_arguments_of_the_loss_are_those_of_transformers():
    batch = batches(1)[0]
    labels = batch.clone()
    labels[:, :9] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    model, ours = large_llama(), chunked(large_llama())
    for arguments in (
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": torch.tensor(33)},
        {"labels": labels, "num_items_in_batch": 33},
        {"labels": batch, "ignore_index": 32},
        {"labels": batch, "shift_labels": shifted},
        {"labels": batch[:, -5:], "logits_to_keep": 5},
        {"labels": labels, "return_dict": False},
    ):
        expected = model(input_ids=batch, **arguments)[0]
        assert ours(input_ids=batch, **arguments)[0].item() == pytest.approx(expected.item(), rel=1e-6)
    positional = ours(batch, None, None, None, None, batch)
    assert type(positional.logits).__name__ == "_Logits"
    with pytest.raises(InvalidArgument, match="do not fit"):
        ours(input_ids=batch, labels=batch[:, :-1])


def test_logits_that_were_not_built_say_so():
    model, batch = chunked(large_llama()), batches(1)[0]
    logits = model(input_ids=batch, labels=batch).logits
    for use in (
        lambda: logits.argmax(-1),
        lambda: logits.shape,
        lambda: logits[:, -1],
        lambda: logits.float(),
        lambda: logits * 2,
        lambda: 1 - logits,
        lambda: logits.device,
        lambda: list(logits),
        lambda: torch.softmax(logits, -1),
        lambda: torch.tanh(logits),
        lambda: torch.stack([logits]),
        lambda: torch.nn.functional.cross_entropy(logits, batch),
    ):
        with pytest.raises(InvalidArgument, match=r"LlamaForCausalLM.*without labels.*chunked_loss=False"):
            use()
    assert not hasattr(logits, "dtype") and "not built" in repr(logits)


def test_a_use_of_logits_in_the_forward_is_an_error():
    """Such as of a layer that was put around the head afterwards."""
    model, batch = chunked(large_llama()), batches(1)[0]
    removed = model.lm_head.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(InvalidArgument, match=r"chunked_loss=False"):
        model(input_ids=batch, labels=batch)
    removed.remove()
    removed = model.lm_head.register_forward_hook(lambda module, args, output: output * torch.ones(()))
    with pytest.raises(InvalidArgument, match=r"\* Tensor.*chunked_loss=False"):
        model(input_ids=batch, labels=batch)
    removed.remove()
    kept = []

    def fail(module, args, output):
        kept.append(output)
        raise RuntimeError("failed")

    removed = model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        model(input_ids=batch, labels=batch)
    removed.remove()
    with pytest.raises(InvalidArgument, match=r"float: .*chunked_loss=False"):
        kept[0].float()
    assert model(input_ids=batch).logits.numel()  # nothing is left of the forwards that failed
    assert model(input_ids=batch, labels=batch).loss > 0


def test_another_loss_gets_its_logits():
    model, batch = offloaded(large_llama(), chunked_loss=True), batches(1)[0]
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    output = model(input_ids=batch, labels=batch)
    assert output.loss == output.logits.square().mean()


@pytest.mark.parametrize("before", [False, True])
def test_a_compiled_model(before):
    batch = batches(1)[0]
    expected = chunked(large_llama())(input_ids=batch, labels=batch)
    model = large_llama()
    if before:
        model.compile(backend="aot_eager")
    offloaded(model, chunked_loss=True)
    if not before:
        model.compile(backend="aot_eager")
    output = model(input_ids=batch, labels=batch)
    assert output.loss == expected.loss and type(output.logits) is type(expected.logits)
    output.loss.backward()
    assert model(input_ids=batch).logits.shape == (*batch.shape, VOCABULARY)


def test_a_config_of_another_vocabulary_is_refused():
    model, batch = chunked(large_llama()), batches(1)[0]
    model.config.vocab_size = VOCABULARY // 2
    with pytest.raises(InvalidArgument, match=r"300 words.*150"):
        model(input_ids=batch, labels=batch)


class PenalizedForCausalLM(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return {"loss": loss + logits.logsumexp(-1).square().mean(), "logits": logits}


class ShiftedForCausalLM(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        logits += self.shift
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return {"loss": loss, "logits": logits}


class NamedTwiceForCausalLM(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = scores = self.lm_head(hidden)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return {"loss": loss + scores.square().mean(), "logits": logits}


def shifted():
    return ShiftedForCausalLM(large_llama().config)


def named_twice():
    return NamedTwiceForCausalLM(large_llama().config)


def with_penalty():
    torch.manual_seed(1)
    return PenalizedForCausalLM(large_llama().config)


def t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


def head_adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(large_llama(), peft.LoraConfig(r=4, target_modules=["lm_head"]))


def with_another_loss():
    model = large_llama()
    model.loss_function = lambda logits, labels, **_: logits.mean()
    return model


def replaced():
    model = large_llama()
    model.forward = model.forward
    return model


def hooked():
    model = large_llama()
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    return model


REFUSED = {
    with_penalty: r"logits\.logsumexp",
    shifted: r"logits \+= self\.shift",
    named_twice: r"logits = scores = self\.lm_head",
    t5: "0 causal language models.*T5ForConditionalGeneration",
    head_adapted: "head 'lm_head' of LlamaForCausalLM",
    with_another_loss: "another loss",
    replaced: "was replaced",
    hooked: "hooks",
    lambda: torch.nn.Linear(4, 4): "0 causal language models",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_may_need_its_logits_is_refused_or_left_as_it_is(make, monkeypatch):
    with pytest.raises(Unimplemented, match=REFUSED[make]):
        offloaded(make(), chunked_loss=True)
    monkeypatch.setattr("ziggurat._losses.causal_loss.VOCABULARY_MIN", 1)
    model = offloaded(make())
    assert not any("_chunked_loss" in module.__dict__ for module in model.modules())


def test_it_is_the_default_for_a_large_vocabulary_and_says_so(capfd):
    batch = batches(1)[0]
    for vocabulary, setting, expected in (
        (VOCABULARY_MIN, None, True),
        (VOCABULARY_MIN, False, False),
        (VOCABULARY_MIN - 1, None, False),
        (VOCABULARY_MIN - 1, True, True),
    ):
        model = offloaded(llama(vocab_size=vocabulary), chunked_loss=setting)
        said = capfd.readouterr().err
        assert ("LlamaForCausalLM computes its loss" in said) == ("chunked_loss=False" in said) == expected
        logits = model(input_ids=batch, labels=batch).logits
        assert isinstance(logits, torch.Tensor) != expected


@pytest.mark.parametrize("bf16", [False, True])
def test_in_trainer(bf16, tmp_path):
    data = [{"input_ids": one[0], "labels": one[0]} for one in batches(12, size=1)]
    results = []
    for prepare in (
        lambda model: model,
        chunked,
        lambda model: offloaded(model, chunked_loss=True),
    ):
        model = prepare(gpt2())
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            bf16=bf16,
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
        trainer.train()
        keys = ("loss", "eval_loss", "grad_norm")
        results.append([entry[key] for entry in trainer.state.log_history for key in keys if key in entry])
        assert ("_chunked_loss" in model.__dict__) == (len(results) > 1)
        trainer.optimizer.optimizer.close()
        results[-1] = (results[-1], bits(model))
    (whole, _), (plain, plain_bits), (ours, ours_bits) = results
    assert len(ours) == 10 and ours == plain
    assert_same_bits(ours_bits, plain_bits)
    assert ours == pytest.approx(whole, rel=1e-3 if bf16 else 2e-5)


def test_after_accelerate_has_unwrapped_the_model():
    """It takes off again what it has put around forward, and whatever says that it wraps something."""
    accelerate = pytest.importorskip("accelerate")
    model, batch = chunked(large_llama()), batches(1)[0]
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    for one in (prepared, accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)):
        assert not isinstance(one(input_ids=batch, labels=batch).logits, torch.Tensor)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
