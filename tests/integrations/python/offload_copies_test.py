# SPDX-License-Identifier: Apache-2.0
"""Copies and averages of an offloaded model: plain models with the values, and the bits of PyTorch's averages.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import copy
import io
import pickle
import sys
import weakref

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import Gpt, gpt, loss_of, memory_of, offloaded, same_with_and_without, tokens_of, train
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._memory.file_memory import is_in_file
from ziggurat._streaming.streaming import Streaming, streaming_of
from ziggurat.torch import offload, streamed_init


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def is_plain(model) -> bool:
    like = [(type(module), vars(module).keys()) for module in gpt().modules()]
    params = model.parameters()
    return [(type(module), vars(module).keys()) for module in model.modules()] == like and all(
        type(param) is torch.nn.Parameter and streaming_of(param) is None for param in params
    )


def losses_of(model, steps=range(2)):
    """Trains a copy on, with an optimizer of PyTorch's."""
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, pickled])
@pytest.mark.parametrize("when", ["before it opens", "after close()"])
def test_a_copy_is_a_plain_model_of_the_values(copied, when, tmp_path):
    def run(offload):
        model = gpt()
        offload(model, placement="nvme")
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/{len(found)}")
        if when == "after close()":
            train(model, optimizer, range(1))
            optimizer.close()
        made = copied(model)
        found.append(made)
        assert made.head.weight is made.embedding.weight
        return losses_of(made), loss_of(model, tokens_of(0)).item()

    found = []
    same_with_and_without(run)
    assert all(map(is_plain, found))


@pytest.mark.parametrize("placement", ["host", "params=nvme,grads=nvme"])
def test_a_deep_copy_while_parameters_are_away_has_their_values(placement, tmp_path):
    def run(offload):
        model = gpt()
        offload(model, placement=placement)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/{len(found)}")
        losses = train(model, optimizer, range(2))
        around = torch.nn.ModuleDict({"model": model, "block": model.blocks[1]})
        made = copy.deepcopy(around)
        assert made["block"] is made["model"].blocks[1]
        found.append(made["model"])
        losses += losses_of(made["model"]) + train(model, optimizer, range(2, 4))
        optimizer.close()
        return losses

    found = []
    same_with_and_without(run)
    assert all(map(is_plain, found))


def test_hooks_are_copied_as_pytorch_copies_them():
    calls = []
    model = gpt()
    offload(model, memory=memory_of(model))
    model.blocks[0].register_forward_hook(lambda module, *_: calls.append(module))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model)
    train(model, optimizer, range(1))
    made = copy.deepcopy(model)
    optimizer.close()
    calls.clear()
    made(tokens_of(0)[:, :-1])
    assert calls == [made.blocks[0]]


def test_a_copy_can_be_offloaded_itself():
    model = gpt()
    optimizer = offloaded(model)
    made = copy.deepcopy(model)
    losses = train(model, optimizer, range(1, 3))
    optimizer.close()
    plain = copy.deepcopy(made)
    offload(made, memory=memory_of(made))
    optimizer = ziggurat.torch.AdamW(made.parameters(), lr=1e-2)
    other = ziggurat.torch.AdamW(plain.parameters(), lr=1e-2)
    assert train(made, optimizer, range(1, 3)) == train(plain, other, range(1, 3)) != losses  # moments begin anew
    optimizer.close()


def test_what_cannot_be_copied_says_what_can():
    model = gpt()
    offload(model, memory=memory_of(model))
    with pytest.raises(ziggurat.Unimplemented, match=r"Gpt cannot share its parameters.*use copy.deepcopy\(\)"):
        copy.copy(model)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    for copied in (pickled, saved_and_loaded):
        with pytest.raises(ziggurat.Unimplemented, match=r"Gpt cannot be pickled while.*copy.deepcopy\(model\)"):
            copied(model)
    with pytest.raises(ziggurat.InvalidArgument, match=r"deepcopy: parameter 'blocks.0.mlp.0.weight' .*gathered"):
        copy.deepcopy(model.blocks[0].mlp)
    optimizer.close()


class CopiesItself(Gpt):
    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


def test_a_slice_of_a_sequence_is_a_plain_sequence_of_its_modules():
    def run(offload):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
        offload(model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        inputs, found = torch.ones(2, 600), []
        for _ in range(2):
            for part in (model, model[:2], model[2:]):
                assert type(part[:2]) is torch.nn.Sequential and vars(part[:2]).keys() == vars(plain).keys()
                loss = part(inputs).square().mean()
                loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        saved = model[4:].state_dict().values()
        copied = copy.deepcopy(model[4:])
        optimizer.close()
        return found, [value.tolist() for value in (*saved, *copied.parameters())]

    plain = torch.nn.Sequential()
    same_with_and_without(run)


def test_a_class_that_copies_itself_is_refused():
    model = CopiesItself()
    offload(model, memory=memory_of(model))
    with pytest.raises(ziggurat.Unimplemented, match=r"whose class copies itself.*before offload"):
        copy.deepcopy(model)


def test_a_copy_that_memory_has_no_room_for_is_refused(monkeypatch):
    model = gpt()
    optimizer = offloaded(model)
    monkeypatch.setattr("ziggurat._streaming.streaming.free_bytes", lambda: 1000)
    with pytest.raises(ziggurat.ResourceExhausted, match="parameter '.*' is offloaded, and memory has no room"):
        copy.deepcopy(model)
    monkeypatch.undo()
    optimizer.close()


def averages(kind: str) -> dict:
    """Returns the arguments of an AveragedModel."""
    return {
        "mean": {},
        "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
        "own": {"avg_fn": lambda average, new, count: average + (new - average) / (count + 1), "use_buffers": True},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "placement", "dtype", "made"),
    [
        ("mean", "host", torch.float32, "before"),
        ("exponential", "params=nvme,grads=nvme", torch.float32, "after"),
        ("exponential", "host", torch.bfloat16, "before"),
        ("own", "params=nvme,grads=nvme", torch.bfloat16, "after"),
    ],
)
def test_pytorchs_averages_have_the_bits_without_offload(kind, placement, dtype, made, tmp_path):
    def run(offload):
        model = gpt(dtype)
        average = AveragedModel(model, **averages(kind)) if made == "before" else None
        offload(model, placement=placement)
        folder = tmp_path / ("plain" if streaming_of(model.position) is None else "offloaded")
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{folder}")
        average = average or AveragedModel(model, **averages(kind))
        losses = train(model, optimizer, range(5), lambda step: average.update_parameters(model))
        losses.append(loss_of(average, tokens_of(9)).item())
        optimizer.close()
        return losses, [value.tolist() for value in average.state_dict().values()]

    same_with_and_without(run)


@pytest.mark.parametrize("kind", ["mean", "exponential", "own"])
def test_an_update_has_one_parameter_in_memory_at_a_time(kind, monkeypatch):
    model = gpt()
    average = AveragedModel(model, **averages(kind))
    optimizer = offloaded(model)
    left, most = [], []

    def copied(*given):
        made = copy_of(*given)
        left.append(weakref.ref(made))
        most.append(sum(one() is not None for one in left))
        return made

    copy_of = Streaming.copy_of
    monkeypatch.setattr(Streaming, "copy_of", copied)
    average.update_parameters(model)
    average.update_parameters(model)
    assert len(most) >= 2 * len(list(model.parameters()))
    assert max(most) <= 2  # the one that is read, and the one that a name in PyTorch's loop still has
    optimizer.close()


def test_an_average_may_lie_in_files(tmp_path):
    """That of a model that memory has no room for."""

    def run(offload):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))
        offload(model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        with streamed_init(tmp_path):
            average = AveragedModel(model, **averages("exponential"))
        assert all(is_in_file(layer.weight) for layer in average.module)
        for step in range(3):
            model(torch.full((2, 600), 0.1 * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        optimizer.close()
        return [param.tolist() for param in average.parameters()]

    same_with_and_without(run)


def test_an_average_writes_nothing_but_itself():
    model = gpt()
    average = AveragedModel(model, avg_fn=lambda average, new, count: new.mul_(0.5))
    optimizer = offloaded(model)
    average.update_parameters(model)
    with pytest.raises(ziggurat.Unimplemented, match="mul_: an average writes the parameters"):
        average.update_parameters(model)
    optimizer.close()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
