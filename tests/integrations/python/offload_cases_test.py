# SPDX-License-Identifier: Apache-2.0
"""Errors around ziggurat.torch.offload(): parameters that are used while they are away, passes that
end with an exception, and what is refused.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import copy
import dataclasses
import io
import os
import sys
import warnings

try:
    import pytest
    import torch
    import torch.testing._internal.distributed.fake_pg  # registers "fake"
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import (
        gpt,
        loss_of,
        memory_of,
        offloaded,
        pinned,
        same_with_and_without,
        stepped,
        tokens_of,
        train,
    )
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._pytorch import storages
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import gathered, offload


def alias_of(param: torch.Tensor) -> torch.Tensor:
    with gathered(param):
        return param.detach()


def backward_with_a_weight_away(model: torch.nn.Module) -> None:
    weight = model.narrow.weight
    with gathered(weight):
        squares = weight.square().sum()
    squares.backward()


# A parameter of a unit that is away, and what reads or writes it.
USES = {
    "add": lambda model, p: p + 1,
    "sum": lambda model, p: p.sum(),
    "clone": lambda model, p: p.clone(),
    "norm": lambda model, p: torch.linalg.vector_norm(p),
    "detach": lambda model, p: p.detach(),
    "data": lambda model, p: p.data.mul_(2),
    "numpy": lambda model, p: p.numpy(force=True),
    "item": lambda model, p: p[0, 0].item(),
    "tolist": lambda model, p: p.tolist(),
    "linear": lambda model, p: torch.nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "cat": lambda model, p: torch.cat([torch.zeros(p.shape), p]),
    "foreach": lambda model, p: torch._foreach_norm([p]),
    "copy_": lambda model, p: p.copy_(torch.zeros(p.shape)),
    "init": lambda model, p: torch.nn.init.zeros_(p),
    "deepcopy": lambda model, p: copy.deepcopy(p),
    "save": lambda model, p: torch.save(p, io.BytesIO()),
    "assigned": lambda model, p: model.load_state_dict(model.state_dict(), assign=True),
    "half": lambda model, p: model.half(),
    "address": lambda model, p: p.data_ptr(),
    "functional": lambda model, p: torch.nn.functional.linear(torch.ones(2, 256), model.narrow.weight),
    "submodule's child": lambda model, p: model.blocks[0].mlp[0](torch.ones(1, 64)),
}
# Uses that only C++ code sees. PyTorch's error does not name the parameter.
UNNAMED = {
    "alias": lambda model, p: alias_of(p).sum(),
    "alias written": lambda model, p: alias_of(p).zero_(),
    "alias to numpy": lambda model, p: alias_of(p).numpy(),
    "alias viewed": lambda model, p: alias_of(p).t().contiguous(),
    "alias saved": lambda model, p: torch.save(alias_of(p), io.BytesIO()),
    "backward": lambda model, p: backward_with_a_weight_away(model),
}


def run_uses(uses, message: str) -> None:
    model = gpt()
    optimizer = offloaded(model)
    for name, use in uses.items():
        print(f"use: {name}", flush=True)  # the last one before a signal
        with pytest.raises((ziggurat.InvalidArgument, RuntimeError), match=message):
            use(model, model.blocks[1].mlp[0].weight)
        assert not pinned(model)
    train(model, optimizer, range(1, 2))
    optimizer.close()


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        (USES, "parameter '.*' of unit '.*' is away|leave assign out"),
        (UNNAMED, "Cannot access data pointer of Storage that is invalid"),
    ],
    ids=["named", "unnamed"],
)
def test_a_use_of_what_is_away_is_an_error_and_no_signal(uses, message):
    with forked_runs() as runs:
        assert runs.status_of(runs.started(run_uses, uses, message), within=120) == 0


def test_a_trace_of_what_is_away_is_refused_and_that_of_a_copy_is_not():
    model = gpt()
    optimizer = offloaded(model)
    tokens = tokens_of(5)[:, :-1]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with pytest.raises(ziggurat.Unimplemented, match=r"torch\.jit\.trace .* trace copy\.deepcopy\(model\)"):
                torch.jit.trace(model, tokens)
        assert not pinned(model)
    with torch.no_grad():
        traced = torch.jit.trace(copy.deepcopy(model), tokens, check_trace=False)
        assert torch.equal(traced(tokens), model(tokens))
    train(model, optimizer, range(1, 2))
    optimizer.close()


def test_a_forked_worker_gets_an_error():
    model = gpt()
    optimizer = offloaded(model)
    child = os.fork()
    if child == 0:
        try:
            loss_of(model, tokens_of(0))
        except ziggurat.InvalidArgument as error:
            os._exit(7 if "a forked process has no engine" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    train(model, optimizer, range(1, 2))
    optimizer.close()


def test_the_error_names_parameter_unit_and_fix():
    model = gpt()
    optimizer = offloaded(model)
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=r"sum: parameter 'blocks\.1\.mlp\.0\.weight' of unit 'blocks\.1' is away.*gathered\(\[param\]\)"
        r".* units without 'blocks\.1'",
    ):
        model.blocks[1].mlp[0].weight.sum()
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=r"parameter 'position' of unit '\(root\)' is used outside of the model's forward.*: call the model, or "
        r"use it within `with ziggurat\.torch\.gathered\(\[param\]\)`$",
    ):
        model.position.sum()
    with gathered(model.blocks[1].mlp[0].weight):
        model.blocks[1].mlp[0].weight.sum()
    optimizer.close()
    model.blocks[1].mlp[0].weight.sum()


def test_every_use_of_a_guard_raises_here():
    assert storages.guards_reads()


def test_metadata_and_what_trainers_do_with_it_work():
    model = gpt()
    optimizer = offloaded(model)
    p = model.blocks[0].mlp[0].weight
    assert (p.shape, p.dtype, p.device.type, p.is_leaf) == ((256, 64), torch.float32, "cpu", True)
    assert p.numel() == p.nelement() == 256 * 64 and p.stride() == (64, 1)
    assert isinstance(p, torch.nn.Parameter) and p in set(model.parameters())
    assert torch.equal(torch.zeros_like(p), torch.zeros(256, 64))
    assert type(torch.zeros_like(p)) is torch.Tensor
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0.0
    model.requires_grad_(True)
    model.zero_grad()
    model.eval()
    optimizer.close()


MOVES_NOTHING = {
    "to cpu": lambda model: model.to("cpu"),
    "to its own": lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    "to one like it": lambda model: model.to(model.norm.weight),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float32),
}
MOVES = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "cuda": lambda model: model.cuda(),
}


def test_a_model_that_is_moved_to_where_it_is():
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        loss_of(model, tokens_of(7)).backward()
        for move in MOVES_NOTHING.values():
            assert move(model) is model
        assert streaming_of(model.norm.weight) is None or "away" in repr(model.norm.weight)
        optimizer.step()
        optimizer.zero_grad()
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_model_that_is_moved_elsewhere_is_refused():
    model = gpt()
    optimizer = offloaded(model)
    for name, move in MOVES.items():
        with pytest.raises(
            ziggurat.InvalidArgument, match=rf"call model\.{name}\(\) before the optimizer opens"
        ):
            move(model)
    with pytest.raises(ziggurat.InvalidArgument, match="its type and device stay"):
        model.norm.weight.to("cpu", copy=True)
    train(model, optimizer, range(1, 2))
    optimizer.close()


@dataclasses.dataclass
class Found:
    logits: torch.Tensor
    all: list


class Returns(torch.nn.Module):
    """Returns an object, or a list, that contains itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gpt, self.kind = gpt(), kind

    def forward(self, tokens: torch.Tensor):
        found = Found(self.gpt(tokens), [])
        found.all += [found, {"all": found.all}]
        return found if self.kind == "object" else found.all


@pytest.mark.parametrize("kind", ["object", "list"])
def test_an_output_that_contains_itself(kind):
    def run(offload):
        model = offload(Returns(kind))
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)

        def logits_of(tokens):
            found = model(tokens)
            return (found if kind == "object" else found[0]).logits

        losses = train(logits_of, optimizer, range(2))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_other_errors_of_tensors_without_memory_stay_what_they_are():
    model = gpt()
    optimizer = offloaded(model)

    def fail(*_):
        raise RuntimeError("Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor)")

    handle = model.blocks[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match=r"of Tensor \(e\.g\. FakeTensor") as raised:
        loss_of(model, tokens_of(1))
    assert not isinstance(raised.value, ziggurat.ZigguratError)
    handle.remove()
    weight = alias_of(model.narrow.weight)
    handle = model.blocks[1].mlp.register_forward_hook(lambda *_: weight.sum())
    with pytest.raises(ziggurat.InvalidArgument, match=r"unit 'blocks\.1' has used .* keep no alias"):
        loss_of(model, tokens_of(1))
    handle.remove()
    train(model, optimizer, range(1, 2))
    optimizer.close()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


def fail_in_forward(*_):
    raise ValueError("in forward")


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("where", ["forward", "backward", "eval"])
def test_nothing_stays_pinned_after_an_exception(checkpointing, where):
    def run(offload):
        model = offload(gpt(checkpointing=checkpointing))
        optimizer = stepped(model)
        fails = fail_in_forward if where != "backward" else lambda module, args, out: Fails.apply(out)
        handle = model.blocks[1].mlp.register_forward_hook(fails)
        with torch.set_grad_enabled(where != "eval"), pytest.raises(ValueError, match="in "):
            loss_of(model, tokens_of(7)).backward()
        handle.remove()
        assert streaming_of(model.norm.weight) is None or not pinned(model)
        optimizer.zero_grad()
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_passes_that_overlap():
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        losses = [loss_of(model, tokens_of(step)) for step in (7, 8)]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        assert streaming_of(model.norm.weight) is None or not pinned(model)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(model, tokens_of(9))
        weights = [model.embedding.weight, model.blocks[2].after.weight]
        found = [grad.norm().item() for grad in torch.autograd.grad(loss, weights)]
        found += train(model, optimizer, range(1, 3))
        optimizer.close()
        return found

    same_with_and_without(run)


def test_a_graph_of_before_the_step_raises():
    model = gpt()
    optimizer = offloaded(model)
    loss = loss_of(model, tokens_of(7))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert not pinned(model)
    optimizer.close()


def test_a_parameter_that_gets_other_memory_is_an_error_by_name():
    model = gpt()
    optimizer = offloaded(model)

    def assign(module, args, out):
        module.weight.data = module.weight.data.clone()

    handle = model.blocks[1].mlp[0].register_forward_hook(assign)
    for _ in range(2):
        with pytest.raises(
            ziggurat.InvalidArgument, match=r"'blocks\.1\.mlp\.0\.weight' .* was given other memory"
        ):
            loss_of(model, tokens_of(1))
        assert not pinned(model)
        handle.remove()  # the parameter stays what it was made


def test_writes_that_pytorch_does_not_count_are_found_after_many_steps_too():
    def found_at() -> tuple[int, str]:
        model = gpt()
        optimizer = offloaded(model)
        unit = streaming_of(model.blocks[1].mlp[0].weight)[1].unit
        with torch.no_grad():
            while unit.brings < 34:
                loss_of(model, tokens_of(1))
            for block in model.blocks:
                block.mlp[0].register_forward_hook(lambda module, *_: module.weight.data.clamp_(-0.01, 0.01).shape and None)
            with pytest.raises(ziggurat.InvalidArgument, match=r"\.mlp\.0\.weight' was written while unit") as raised:
                while unit.brings < 63:  # at 64 each unit is compared
                    loss_of(model, tokens_of(1))
        optimizer.close()
        return unit.brings, str(raised.value)

    assert found_at() == found_at()


KEEPS = {
    "NumPy": lambda p: p.detach().numpy(),
    "NumPy of a view": lambda p: p.data[1:].t().numpy(),
    "DLPack": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
}


@pytest.mark.parametrize("kind", KEEPS)
def test_memory_that_another_library_has_does_not_go_to_the_engine(kind):
    def run(offload):
        model = offload(gpt())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        kept = KEEPS[kind](model.narrow.weight)
        if hasattr(model, "_offloaded"):
            with pytest.raises(ziggurat.InvalidArgument, match=r"has the memory of parameter 'narrow\.weight'"):
                loss_of(model, tokens_of(0))
            assert not pinned(model)
        del kept
        losses = train(model, optimizer, range(2))
        optimizer.close()
        return losses

    same_with_and_without(run)


class Named(torch.Tensor):
    pass


def as_gradient(alias: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros_like(alias))
    param.grad = alias
    return param


@pytest.mark.parametrize("kept", [lambda alias: alias.as_subclass(Named), as_gradient], ids=["subclass", "gradient"])
@pytest.mark.parametrize("when", ["before", "gathered"])
def test_an_alias_that_python_has_elsewhere_is_no_array(when, kept):
    def run(offload):
        model = offload(gpt())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        if when == "gathered":
            train(model, optimizer, range(1))
        with gathered(model.narrow.weight):
            alias = model.narrow.weight.detach()
            holder = kept(alias)
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        assert holder is not None
        return losses

    same_with_and_without(run)


def test_an_alias_of_before_is_no_array_even_if_one_was_made():
    model = gpt()
    state = model.state_dict()
    sums = {name: value.numpy().sum() for name, value in state.items()}
    optimizer = offloaded(model)
    with gathered(model.narrow.weight):
        assert model.narrow.weight.detach().numpy().sum() != sums["narrow.weight"]
    with pytest.raises(RuntimeError, match="Cannot access data pointer of Storage that is invalid"):
        state["narrow.weight"].sum()
    optimizer.close()


class Transposed(torch.nn.Linear):
    """Computes with a view that Python has made, which autograd alone keeps then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def of_transposed(frozen: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(Transposed(8, 8, bias=False)) for _ in range(3)))
    model[1].requires_grad_(not frozen)
    return model


def trains(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, 8)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return ziggurat.torch.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_of_before_is_no_array(frozen):
    def run(offload):
        model = of_transposed(frozen)
        early = model(torch.ones(2, 8))
        model = offload(model, memory="1MiB")
        optimizer = optimizer_of(model)
        losses = [trains(model, optimizer)]
        optimizer.close()
        kept = model(torch.ones(2, 8))  # until another optimizer opens
        optimizer = optimizer_of(model)
        losses.append(trains(model, optimizer))
        optimizer.close()
        return losses, early.tolist(), kept.tolist()

    same_with_and_without(run)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_that_is_kept_from_gathered_is_no_array(frozen):
    def run(offload):
        model = offload(of_transposed(frozen), memory="1MiB")
        optimizer = optimizer_of(model)
        losses = [trains(model, optimizer)]
        with gathered(model.parameters()):
            kept = model[1](torch.ones(2, 8, requires_grad=True))
        losses.append(trains(model, optimizer))
        optimizer.close()
        return losses, kept.tolist()

    same_with_and_without(run)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_array_that_a_hook_has_let_go_of_is_none_beside_a_graph(frozen):
    def run(offload):
        model = offload(of_transposed(frozen), memory="1MiB")
        seen: list[float] = []
        for part in model:
            part[0].register_forward_hook(lambda part, *_: seen.append(float(part.weight.detach().numpy().mean())))
        optimizer = optimizer_of(model)
        losses = [trains(model, optimizer) for _ in range(2)]
        optimizer.close()
        return losses, seen

    same_with_and_without(run)


def test_an_array_that_the_parameter_was_made_of_stays():
    """Nobody can tell whether there are others, so its memory stays too."""
    model = gpt()
    values = model.norm.weight.detach().numpy().copy()
    model.norm.weight.data = torch.from_numpy(values)
    other = model.norm.weight.detach().numpy()
    before = values.copy()
    optimizer = offloaded(model)
    assert (values == before).all() and (other == before).all()
    optimizer.close()
    assert (model.norm.weight.detach().numpy() != before).any()


def test_a_parameter_that_is_resized_within_gathered_is_an_error_by_name():
    model = gpt()
    optimizer = offloaded(model)
    weight = model.narrow.weight
    for _ in range(2):  # an alias may be larger now than what would be brought
        with pytest.raises(ziggurat.InvalidArgument, match=r"'narrow\.weight' .* was given other memory"):
            with gathered(weight):
                weight.data.resize_(1 << 16)
        assert not pinned(model)
    del optimizer


def test_a_backward_that_memory_has_no_room_for_is_an_error_by_name():
    """With create_graph all units stay until the step."""

    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        if streaming_of(model.norm.weight) is not None:
            loss = loss_of(model, tokens_of(7))
            with pytest.raises(
                ziggurat.ResourceExhausted, match=r"unit 'blocks\.2' takes \d+ bytes, and beside the "
                r"units in use \(.*'blocks\.3'.*\) memory=\d+ has no room for them: give offload\(\) more memory, "
                r"since a backward with create_graph keeps all units that it uses until the step$"
            ):
                torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            assert not pinned(model)
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_units_within_units():
    units = ["blocks.0", "blocks.0.mlp", "blocks.0.mlp.2", "blocks.3.attention"]

    def run(offload):
        model = gpt()
        offload(model, memory=divide(model, units).smallest()[0], units=units)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, range(3))
        optimizer.close()
        return losses

    same_with_and_without(run)
    with pytest.raises(ziggurat.InvalidArgument, match="'blocks' is a ModuleList.*'blocks.0'"):
        offload(gpt(), memory="1GiB", units=["blocks"])


def test_two_models_of_which_one_is_offloaded():
    def run(offload):
        models = gpt(), offload(gpt())
        params = [*models[0].parameters(), *models[1].parameters()]
        optimizer = ziggurat.torch.AdamW(params, lr=1e-2)
        losses = train(lambda x: models[0](x) + models[1](x), optimizer, range(3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_gathered_writes_become_masters():
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        weight = model.blocks[1].mlp[0].weight
        with torch.no_grad(), gathered(weight):
            weight.mul_(0.5)
        with gathered([weight, model.norm.weight], write=True):
            model.norm.weight.data.mul_(0.25)
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_step_within_gathered_is_refused():
    model = gpt()
    optimizer = offloaded(model)
    loss_of(model, tokens_of(1)).backward()
    with gathered(model.norm.weight), pytest.raises(
        ziggurat.InvalidArgument, match=r"step\(\) was called while unit '\(root\)' of the offloaded model is in "
        "use: call it outside of"
    ):
        optimizer.step()
    optimizer.step()
    optimizer.close()


class Kind(torch.nn.Parameter):
    pass


def module_with(**params) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, param in params.items():
        module.register_parameter(name, param)
    return module


def refused_models():
    whole = torch.zeros(64)
    one, other = torch.nn.Parameter(whole[:32]), torch.nn.Parameter(whole[32:])
    yield "parameters 'a' and 'b' are different parameters in one memory", module_with(a=one, b=other)
    yield "parameter 'a' is a part of a larger memory", module_with(a=one)
    yield "parameter 'a' is a Kind", module_with(a=Kind(torch.zeros(4)))
    yield "parameter 'a' is torch.float64", module_with(a=torch.nn.Parameter(torch.zeros(4).double()))
    yield "parameter 'a' does not lie in the order", module_with(a=torch.nn.Parameter(torch.zeros(4, 3).t()))
    yield "parameter 'a' is on meta", module_with(a=torch.nn.Parameter(torch.zeros(4, device="meta")))
    yield "parameter 'a' is a Plain", module_with(a=torch.nn.Parameter(torch.zeros(4).as_subclass(Plain)))
    sparse = torch.nn.Parameter(torch.zeros(4, 3).to_sparse())
    yield "parameter 'a' is sparse", module_with(a=sparse)
    quantized = torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8)
    yield "parameter 'a' is sparse or quantized", module_with(
        a=torch.nn.Parameter(quantized, requires_grad=False)
    )
    yield "the model has no parameters", torch.nn.GELU()


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_offloaded_is_refused_by_name():
    for message, model in refused_models():
        with pytest.raises(ziggurat.ZigguratError, match=message):
            offload(model, memory="1GiB")


class Plain(torch.Tensor):
    pass


def test_a_model_on_another_gpu_is_told_to_be_brought_there(monkeypatch):
    """This machine has none: the parameter only says that it is on one."""
    model = module_with(a=torch.nn.Parameter(torch.zeros(4)))
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda:1"))
    with pytest.raises(ziggurat.Unimplemented, match=r"is on cuda:1, .*before model.to\(\), or .*device=\"cuda:1\"\)"):
        offload(model, memory="1GiB")


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_models_that_something_else_has_are_refused_by_name(one_rank):
    models = {
        "module 'the model' is a DistributedDataParallel": torch.nn.parallel.DistributedDataParallel(gpt()),
        "module '0' is a DistributedDataParallel": torch.nn.Sequential(torch.nn.parallel.DistributedDataParallel(gpt())),
        "module 'the model' is compiled already": torch.compile(gpt()),
        "module 'the model' is a RecursiveScriptModule": torch.jit.script(torch.nn.Linear(2, 2)),
        "module 'the model' was given to fully_shard": torch.distributed.fsdp.fully_shard(gpt()),
        "parameter 'position' is in shared memory": gpt().share_memory(),
    }
    for message, model in models.items():
        with pytest.raises(ziggurat.Unimplemented, match=message):
            offload(model, memory="1GiB")


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_that_is_sharded_after_offload_is_refused_at_the_first_forward(trained, one_rank):
    model = offload(gpt(), memory="1GiB")
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block)
    optimizer = ziggurat.torch.AdamW(model.parameters()) if trained else None
    with pytest.raises(ziggurat.Unimplemented, match=r"module 'blocks\.0' was given to fully_shard\(\)"):
        loss_of(model, tokens_of(0))
    del optimizer


def test_a_model_that_nothing_here_trains_says_once_that_it_stays_in_memory():
    model = offload(gpt(), memory="1GiB")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"no optimizer of ziggurat has its parameters.*ziggurat\.torch\.AdamW") as said:
        model(tokens_of(0)[:, :-1])
    assert said[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        train(model, optimizer, range(2))


def test_a_model_that_is_evaluated_or_was_closed_says_nothing():
    with warnings.catch_warnings(action="error"):
        model = offload(gpt(), memory="1GiB")
        loss_of(model.eval(), tokens_of(0))
        with torch.no_grad():
            loss_of(model.train(), tokens_of(0))
        optimizer = stepped(model)
        optimizer.close()
        loss_of(model, tokens_of(0))


def test_what_else_is_refused():
    with pytest.raises(ziggurat.InvalidArgument, match=r'placement="nvme:/x"\): give "host"'):
        offload(gpt(), memory="1GiB", placement="nvme:/x")
    with pytest.raises(ziggurat.InvalidArgument, match='memory="much": give bytes'):
        offload(gpt(), memory="much")
    with pytest.raises(ziggurat.InvalidArgument, match="has no module 'blocks.9'"):
        offload(gpt(), memory="1GiB", units=["blocks.9"])
    model = gpt()
    offload(model, memory="1GiB", placement="nvme")
    with pytest.raises(ziggurat.InvalidArgument, match="'position' was offloaded already"):
        offload(model, memory="1GiB")
    optimizer = ziggurat.torch.AdamW(model.parameters())
    with pytest.raises(ziggurat.InvalidArgument, match='which placement="host" puts into'):
        model(tokens_of(0)[:, :-1])
    plain = gpt()
    optimizer = ziggurat.torch.AdamW(plain.parameters())
    train(plain, optimizer, range(1))
    with pytest.raises(ziggurat.InvalidArgument, match="in an optimizer's engine already"):
        offload(plain, memory="1GiB")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
