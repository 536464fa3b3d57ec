# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.micro_batches() with models of transformers: the bits of the ordinary loop.

Run by pytest; as a script it exits with 77 where PyTorch, transformers or pytest is missing, or PyTorch
is older than offload() takes.
"""

import sys

try:
    import pytest
    import torch
    import transformers
    from language_models import MAJOR, batches, gpt2, llama
    from offload_models_test import MODELS
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import micro_batches, offload

IN_FILES = "params=nvme,grads=nvme"
# In transformers 4 both halves of T5 call one embedding, and a model that returns what its blocks compute replaces their
# forward meanwhile.
CALLS_TWICE, REPLACES = "'shared' was called twice in micro-batch 0", "changes its attribute 'forward' in forward"
REFUSED = {"t5": CALLS_TWICE, "mixtral": REPLACES} if MAJOR == 4 else {}


def in_a_loop(model, batches, loss=lambda output, batch: output.loss):
    losses = []
    for batch in batches:
        found = loss(model(**batch), batch)
        losses.append(found.detach())
        found.backward()
    return losses


def in_a_loop_with_seeds(model, batches):
    """Draws as micro_batches() says that it does."""
    before = torch.Generator()
    before.set_state(torch.get_rng_state())
    losses = []
    for seed, batch in zip([0, *torch.randint(2**62, (len(batches) - 1,), generator=before)], batches, strict=True):
        if losses:
            torch.manual_seed(int(seed))
        losses += in_a_loop(model, [batch])
    return losses


def pinned(model):
    found = next(streaming_of(param) for param in model.parameters() if streaming_of(param))
    return [unit.name for unit in found[0].units if unit.pins]


def offloaded(model, placement="host"):
    return offload(model, memory=divide(model, "auto").smallest()[0], placement=placement)


def trained(run, model, place, placement):
    offloaded(model, placement)
    optimizer = ziggurat.torch.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-3, placement=place
    )
    torch.manual_seed(5)
    texts, found = batches(12), []
    for step in range(3):
        its = texts[4 * step : 4 * step + 4]
        shorter = [one[:, : 32 - 4 * index].contiguous() for index, one in enumerate(its)]
        found += run(model, [{"input_ids": one, "labels": one} for one in shorter])
        assert pinned(model) == []
        found += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [*found, *(param.detach().clone() for param in model.parameters()), torch.rand(2)]


def assert_same(tmp_path, make, plain=in_a_loop, placement=IN_FILES):
    one, other = (
        trained(run, make(), f"nvme:{tmp_path}/{run.__name__}", placement) for run in (plain, micro_batches)
    )
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def assert_refused(message, model, batch, loss=None):
    offloaded(model)
    with pytest.raises(ziggurat.InvalidArgument, match=message):
        micro_batches(model, [batch, batch], loss)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_bits_of_the_loop(tmp_path, name):
    if name in REFUSED:
        (tokens,) = batches(1)
        assert_refused(REFUSED[name], MODELS[name](), {"input_ids": tokens, "labels": tokens})
    else:
        assert_same(tmp_path, MODELS[name])


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_dropout_has_the_bits_of_the_loop_with_its_seeds(tmp_path, checkpointing):
    def make():
        model = gpt2(n_layer=3, vocab_size=300, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        return model

    assert_same(tmp_path, make, in_a_loop_with_seeds, "nvme")


def test_outputs_of_all_blocks_are_each_micro_batchs_own():
    def loss(output, batch):
        return output.loss + sum(one.square().mean() for one in (*output.hidden_states, *output.attentions))

    given = [
        {"input_ids": one, "labels": one, "output_hidden_states": True, "output_attentions": True}
        for one in batches(3)
    ]
    if MAJOR == 4:
        assert_refused(REPLACES, MODELS["llama"](attn_implementation="eager"), given[0], loss)
        return
    found = []
    for run in (in_a_loop, micro_batches):
        model = offloaded(MODELS["llama"](attn_implementation="eager"))
        found.append([*run(model, given, loss), *(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_classifier_that_notes_what_its_labels_are():
    found = []
    for run in (in_a_loop, micro_batches):
        torch.manual_seed(1)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=300, pad_token_id=0, num_labels=3, **sizes)
        model = offloaded(transformers.LlamaForSequenceClassification(config))
        given = [{"input_ids": one, "labels": one[:, 0] % 3} for one in batches(3)]
        found.append([*run(model, given), *(param.grad for param in model.parameters())])
        assert model.config.problem_type == "single_label_classification"
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_chunks_has_the_bits_of_the_loop(tied, tmp_path):
    """The head's stand-in for logits belongs to a micro-batch."""

    def run(how):
        model = llama(vocab_size=300, num_hidden_layers=2, tie_word_embeddings=tied)
        memory = divide(model, "auto").smallest()[0]
        offload(model, memory=memory, placement="nvme", chunked_loss=True)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/{how.__name__}")
        losses = []
        for _ in range(2):
            losses += [loss.item() for loss in how(model, [{"input_ids": one, "labels": one} for one in batches(3)])]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return losses

    assert run(micro_batches) == run(in_a_loop)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
