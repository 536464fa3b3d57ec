# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.plan() of a module and a batch leaves model and optimizer as they were, and says what it does not
take.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import random
import sys

try:
    import numpy
    import pytest
    import torch
    from live_plan_test import Recurrent, conv, mlp, square, tied
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument


class Noisy(torch.nn.Module):
    """Draws from three generators, and keeps what it has seen in a buffer, an attribute and a new buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
        self.register_buffer("seen", torch.zeros(64))
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = x
        self.seen = self.seen + x.detach().mean(0)
        x = torch.nn.functional.dropout(self.norm(self.linear(x)), 0.1)
        return x * (1 + 0 * random.random()) * (1 + 0 * numpy.random.rand())


def state_of(model):
    """Returns all that a plan may not change."""
    modules = [(vars(module) | {"_parameters": None, "_buffers": None}).keys() for module in model.modules()]
    return {
        "values": [one.detach().clone() for one in (*model.parameters(), *model.buffers())],
        "objects": [id(one) for one in (*model.parameters(), *model.buffers())],
        "versions": [one._version for one in (*model.parameters(), *model.buffers())],
        "gradients": [None if one.grad is None else (id(one.grad), one.grad.clone()) for one in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "hooks of parameters": [list(one._backward_hooks or ()) for one in model.parameters()],
        "attributes": [sorted(map(str, its)) for its in modules],
        "draws": [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]],
    }


def same(one, other):
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("make", [Noisy, conv, Recurrent, tied])
def test_a_plan_leaves_all_as_it_was(make, grads):
    torch.manual_seed(1)
    model = make()
    shape = {conv: (3, 12, 12), Recurrent: (11, 16)}.get(make, (64,))
    batch = torch.randn(16, *shape)
    if grads:
        square(model(batch), batch).backward()
    called_back = []
    param = next(model.parameters())
    param.register_hook(lambda grad: called_back.append("hook"))
    param.register_post_accumulate_grad_hook(lambda one: called_back.append("after"))
    list(model.modules())[-1].train(False)
    optimizer = torch.optim.AdamW(model.parameters())
    before, attributes = state_of(model), [dict(vars(module)) for module in model.modules()]
    for _ in range(2):
        ziggurat.torch.plan(model, batch, optimizer, loss=square)
    after = state_of(model)
    for what, its in before.items():
        assert same(its, after[what]), what
    if make is Noisy:
        assert (model.calls, model.last) == (attributes[0]["calls"], attributes[0]["last"])
    assert not called_back
    assert not optimizer.state
    square(model(batch), batch).backward()
    assert called_back == ["hook", "after"]


def test_a_plan_leaves_all_as_it_was_where_the_model_fails():
    class Fails(Noisy):
        def forward(self, x):
            super().forward(x)
            raise ValueError("no")

    model, batch = Fails(), torch.randn(8, 64)
    before = state_of(model)
    with pytest.raises(ValueError, match="no"):
        ziggurat.torch.plan(model, batch, loss=square)
    after = state_of(model)
    assert all(same(its, after[what]) for what, its in before.items())
    assert model.calls == 0


class OwnDraws(torch.nn.Module):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.of_torch, self.of_python = torch.Generator().manual_seed(1), random.Random(1)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.of_torch)
        return self.linear(x + noise) * self.of_python.random()


def test_generators_of_a_module_go_on_from_where_they_were():
    model = OwnDraws()
    before = model.of_torch.get_state(), model.of_python.getstate()
    ziggurat.torch.plan(model, torch.randn(40, 64), loss=square)
    assert torch.equal(model.of_torch.get_state(), before[0])
    assert model.of_python.getstate() == before[1]


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("by_shapes", [False, True])
def test_a_batch_that_gets_gradients_gets_none_of_a_plan(count, by_shapes, monkeypatch):
    if by_shapes:
        monkeypatch.setattr("ziggurat._plan.live_plan.free_bytes", lambda: 1)
    batch = torch.randn(count, 64, requires_grad=True)
    ziggurat.torch.plan(mlp(), batch, loss=square, free_memory="1GiB")
    assert batch.grad is None
    batch.grad = torch.ones(count, 64)
    ziggurat.torch.plan(mlp(), batch, loss=square, free_memory="1GiB")
    assert torch.equal(batch.grad, torch.ones(count, 64))


class SetUp(torch.nn.Module):
    """Sets itself up in its first forward, by a hook that removes itself and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.handle = self.register_forward_pre_hook(self.begin)

    @staticmethod
    def begin(module, _):
        module.handle.remove()
        module.register_buffer("scale", torch.ones(64), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.scale


def test_hooks_that_remove_themselves_are_there_again():
    model = SetUp()
    ziggurat.torch.plan(model, torch.randn(16, 64), loss=square)
    assert len(model._forward_pre_hooks) == 1
    assert not model._non_persistent_buffers_set and not hasattr(model, "scale")
    model(torch.randn(4, 64))
    assert not model._forward_pre_hooks and torch.equal(model.scale, torch.ones(64))


class Centers(torch.nn.Module):
    """Writes its parameters in each forward, in three ways."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 64, max_norm=1.0)
        self.mean, self.slow = torch.nn.Parameter(torch.zeros(64)), torch.nn.Linear(64, 64).requires_grad_(False)

    def forward(self, tokens):
        x = self.table(tokens)
        self.mean.data.copy_(x.mean((0, 1)))
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(1)
        return self.slow(x - self.mean)


def test_parameters_that_a_forward_writes_are_as_they_were():
    torch.manual_seed(1)
    model = Centers()
    model.table.weight.data[0, 0] = float("nan")
    before = [one.detach().clone() for one in model.parameters()]
    versions = [one._version for one in model.parameters()]
    ziggurat.torch.plan(model, torch.randint(1, 50, (16, 4)), loss=square)
    for was, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(was.nan_to_num(7), param.nan_to_num(7))
    assert [one._version for one in model.parameters()] == versions


class Counts(torch.optim.SGD):
    """An optimizer with attributes of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.rate, self.norms, self.calls = 0.5, [], 0

    def step(self, closure=None):
        self.calls += 1
        self.norms.append(self.rate)
        return super().step(closure)


def test_an_optimizer_with_attributes_of_its_own():
    model = mlp()
    optimizer = Counts(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called_back = []
    optimizer.register_step_pre_hook(lambda *how: called_back.append("before"))
    plan = ziggurat.torch.plan(model, torch.randn(16, 64), optimizer, loss=square)
    assert plan.held.state == sum(param.nbytes for param in model.parameters())
    assert (optimizer.norms, optimizer.calls, called_back, len(optimizer.state)) == ([], 0, [], 0)
    assert "step" in vars(optimizer) and scheduler.optimizer is optimizer
    assert not getattr(optimizer, "_opt_called", False)


def test_words_for_what_has_no_step():
    model, batch = torch.nn.Linear(64, 4), torch.randn(8, 64)

    def refused(words, module, *how, kind=InvalidArgument):
        with pytest.raises(kind, match=words):
            ziggurat.torch.plan(module, batch, *how, loss=square)

    refused("is trained", torch.nn.Linear(64, 4).requires_grad_(False))
    refused("is trained", torch.nn.ReLU())
    refused("is None", model, None)
    refused("the class SGD", model, torch.optim.SGD)
    refused("is a list", model, list(model.parameters()))
    scripted = torch.jit.trace(model, batch)
    refused("module '0' is a Top", torch.nn.Sequential(scripted), kind=ziggurat.Unimplemented)


def test_a_dictionary_with_a_loss_and_a_cpu_that_is_named():
    class Losses(torch.nn.Linear):
        def forward(self, x):
            return {"loss": super().forward(x).mean()}

    plan = ziggurat.torch.plan(Losses(64, 4), torch.randn(8, 64), device=torch.device("cpu"))
    assert plan.held.grads == 4 * (64 + 1) * 4


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
