# SPDX-License-Identifier: Apache-2.0
"""While a step is under way: what uses, writes, moves, copies or compiles a model then.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import copy
import io
import pickle
import sys

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401: pytest uses it
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from torch import nn

WIDTH = 384  # so that a step is not over before the next line


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def optimizer_of(model, tmp_path, waits=True, **more):
    return ziggurat.torch.AdamW(
        model.parameters(),
        lr=1e-2,
        placement=f"nvme:{tmp_path}/{'waits' if waits else 'plain'}",
        threads=1,
        model=model if waits else None,
        **more,
    )


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model, optimizer, called=None, **backward) -> float:
    loss = (model if called is None else called)(batch()).square().mean()
    loss.backward(**backward)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values_of(build, loop, tmp_path, waits):
    model = build()
    optimizer = optimizer_of(model, tmp_path, waits)
    values = loop(model, optimizer)
    optimizer.close()
    return values + [p.double().sum().item() for p in model.parameters()]


def assert_waits_change_nothing(build, loop, tmp_path):
    expected = values_of(build, loop, tmp_path, False)
    assert values_of(build, loop, tmp_path, True) == expected


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.two(torch.sin(self.one(x)))


class Shared(nn.Module):
    """Uses the weights themselves, in operations that save no value for backward, before it calls
    the modules that have them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        both = torch.cat([self.one.weight, self.two.weight]) * 0.5
        sums = nn.functional.linear(x, self.one.weight + self.two.weight)
        return self.one(sums) + self.two(sums) + nn.functional.linear(x, both)[:, :WIDTH]


class Routed(nn.Module):
    """Another part is used in every forward, and the others have no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        one, two = self.parts[self.calls % 3], self.parts[self.calls % 2]
        return one(x) + nn.functional.linear(x, two.weight)


class Inferring(nn.Module):
    """Of its own modules it calls some, and in inference none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if torch.is_grad_enabled():
            return self.inner(x)
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def old_weight_norm():
    model = model_of()
    model[1] = nn.Linear(WIDTH, WIDTH)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[1])
    return model


def new_weight_norm():
    model = model_of()
    model[1] = nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrizations.weight_norm(model[1])
    return model


@pytest.mark.parametrize("build", [Shared, Routed, old_weight_norm, new_weight_norm])
def test_a_weight_that_is_used_before_its_module_is_called_is_new(build, tmp_path):
    def loop(model, optimizer):
        return [step(model, optimizer) for _ in range(5)]

    assert_waits_change_nothing(build, loop, tmp_path)


def test_in_inference_all_is_waited_for(tmp_path):
    def loop(model, optimizer):
        values = []
        for _ in range(4):
            values.append(step(model, optimizer))
            model.eval()
            with torch.no_grad():
                values.append(model(batch()).square().mean().item())
            model.train()
        return values

    assert_waits_change_nothing(Inferring, loop, tmp_path)


def test_the_operations_are_looked_at_in_the_first_step_only(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model, tmp_path)
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 5))  # a forward that ends in an error
    step(model, optimizer)
    assert torch._C._len_torch_function_stack() == 0
    assert not any(module._forward_hooks for module in model.modules())
    assert optimizer._waits._learned == set(model.parameters())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_compiled_later_is_waited_for(fullgraph, tmp_path):
    def loop(model, optimizer):
        torch.compiler.reset()
        values = [step(model, optimizer) for _ in range(2)]
        called = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        for _ in range(3):
            values.append(step(model, optimizer))
            with torch.no_grad():
                values.append(called(batch()).square().mean().item())
            values.append(step(model, optimizer, called))
        return values

    assert_waits_change_nothing(Plain, loop, tmp_path)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_compiled_before_is_waited_for(fullgraph, tmp_path):
    def loop(model, optimizer):
        return [step(model, optimizer) for _ in range(4)]

    def built():
        torch.compiler.reset()
        model = Plain()
        model.compile(backend="aot_eager", fullgraph=fullgraph)
        return model

    assert_waits_change_nothing(built, loop, tmp_path)


def test_a_model_that_is_compiled_while_it_trains(tmp_path):
    """Its code may be that of an equal model, which had no hooks."""

    def loop(model, optimizer):
        values = [step(model, optimizer) for _ in range(2)]
        optimizer.synchronize()
        model.compile(backend="aot_eager")
        return values + [step(model, optimizer) for _ in range(4)]

    torch.compiler.reset()
    assert_waits_change_nothing(Plain, loop, tmp_path)


def test_a_compiled_function_in_a_forward_is_compiled(tmp_path):
    class Calling(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.called = torch.compile(
                lambda x: torch.sin(x) * 2, backend="aot_eager", fullgraph=True
            )

        def forward(self, x):
            return self.called(self.inner(x))

    def loop(model, optimizer):
        return [step(model, optimizer) for _ in range(4)]

    assert_waits_change_nothing(Calling, loop, tmp_path)


def in_place(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def moved(model):
    for param in model.parameters():
        param.data = param.data.clone()


@pytest.mark.parametrize(
    ("change", "word"),
    [(in_place, "written"), (moved, "moved"), (lambda model: model.to(torch.bfloat16), "moved")],
)
def test_a_parameter_that_is_changed_while_a_step_is_under_way_is_an_error(change, word, tmp_path):
    model = model_of()
    optimizer = optimizer_of(model, tmp_path)
    step(model, optimizer)
    if not optimizer._opened[0].pending:
        pytest.skip("the step was not under way")
    change(model)
    untouched = [torch.ones(WIDTH, WIDTH) for _ in range(8)]  # where the parameters were
    with pytest.raises(ziggurat.ZigguratError, match=f"'0.weight' was {word} during"):
        optimizer.synchronize()
    with pytest.raises(ziggurat.ZigguratError):
        while optimizer._opened[0].pending:
            optimizer.synchronize()
        raise ziggurat.ZigguratError("all are delivered")
    assert all((tensor == 1).all() for tensor in untouched)


@pytest.mark.parametrize("change", [in_place, moved])
def test_a_parameter_that_is_changed_after_it_is_taken_anew(change, tmp_path):
    def loop(model, optimizer):
        values = []
        for _ in range(3):
            values.append(step(model, optimizer))
            optimizer.synchronize()
            change(model)
        return values

    assert_waits_change_nothing(model_of, loop, tmp_path)


def test_a_model_of_another_type_needs_another_optimizer(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model, tmp_path)
    step(model, optimizer)
    optimizer.synchronize()
    model.to(torch.bfloat16)
    model(batch().bfloat16()).sum().backward()
    with pytest.raises(ziggurat.InvalidArgument, match="'0.weight' is bf16 .* but was fp32"):
        optimizer.step()


def saved_and_loaded(model):
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("build", [model_of, lambda: nn.Linear(WIDTH, WIDTH)])
def test_a_copy_of_a_model_has_the_new_parameters_and_none_of_the_hooks_work(
    copied, build, tmp_path
):
    model = build()
    optimizer = optimizer_of(model, tmp_path)
    for _ in range(3):
        step(model, optimizer)
        other = copied(model)
        optimizer.synchronize()
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    step(other, own)
    step(model, optimizer)


def test_an_optimizer_is_not_copied(tmp_path):
    optimizer = optimizer_of(model_of(), tmp_path)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ziggurat.Unimplemented, match="AdamW cannot be copied or pickled"):
            copied(optimizer)


def test_a_closed_optimizer_makes_no_step():
    model = model_of()
    optimizer = ziggurat.torch.AdamW(model.parameters(), threads=1)
    step(model, optimizer)
    optimizer.close()
    with pytest.raises(ziggurat.InvalidArgument, match="the optimizer was closed"):
        step(model, optimizer)


def add_to(grad):
    grad.add_(1.0)


def clamp(grad):
    grad.clamp_(-1e-4, 1e-4)


@pytest.mark.parametrize("write", [add_to, clamp, torch.Tensor.zero_])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_that_a_step_still_reads_may_be_written(write, create_graph, tmp_path):
    def loop(model, optimizer):
        values = []
        for _ in range(4):
            loss = model(batch()).square().mean()
            loss.backward(create_graph=create_graph)
            optimizer.step()
            for param in model.parameters():
                with torch.no_grad():
                    write(param.grad)
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    assert_waits_change_nothing(model_of, loop, tmp_path)


def test_groups_come_back_from_a_file(tmp_path):
    def made(model):
        one, two = model[0].parameters(), model[2].parameters()
        groups = [{"params": list(one), "lr": 0.1}, {"params": list(two), "weight_decay": 0.0}]
        return ziggurat.torch.AdamW(groups, threads=1, betas=(0.5, 0.6))

    model = model_of()
    optimizer = made(model)
    step(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 7.0, (0.0, 0.0)
    optimizer.load_state_dict(saved)
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert all(one | other == one for one, other in zip(after, before, strict=True))
    assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.parameters())
    step(model, optimizer)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
