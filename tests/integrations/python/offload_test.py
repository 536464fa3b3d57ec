# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload(): the bits of the same script without it, and what is refused.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import math
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import DEPTH, Gpt, gpt, loss_of, pinned, same_with_and_without, tokens_of, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._memory import progress
from ziggurat._units.units import ROOT, divide
from ziggurat.torch import gathered, offload


def memory_for(model: torch.nn.Module, budget: str = "smallest") -> int:
    division = divide(model, "auto")
    all_bytes = sum(unit.size_bytes for unit in division.units)
    smallest = division.smallest()[0]
    return {"smallest": smallest, "half": max(smallest, all_bytes // 2), "all": all_bytes}[budget]


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    values = {}
    for name, param in model.named_parameters():
        with gathered(param):
            values[name] = param.detach().clone()
    return values


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(model, folder, offloaded=None, placement="host", **arguments):
    """Trains the model, offloaded into `offloaded` of memory if that is given. Returns its losses
    and its parameters."""
    if offloaded is not None:
        assert offload(model, memory=memory_for(model, offloaded), placement=placement) is model
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=f"nvme:{folder}" if folder else "host"
    )
    losses = train(model, optimizer, range(3), **arguments)
    if offloaded is not None:
        assert not pinned(model)
        assert "away" in repr(next(model.parameters()))
    values = values_of(model)
    optimizer.close()
    assert same(values, dict(model.named_parameters()))  # close() has given them back
    return losses, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", ["smallest", "half", "all"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_bits_are_those_without_it(dtype, budget, placement, tmp_path):
    plain = trained(gpt(dtype), tmp_path / "plain")
    ours = trained(gpt(dtype), tmp_path / "ours", budget, placement)
    assert ours[0] == plain[0]
    assert same(ours[1], plain[1])


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bits_with_checkpointing_accumulation_and_clipping(checkpointing, accumulate):
    arguments = {"accumulate": accumulate, "clip": 1.0}
    plain = trained(gpt(checkpointing=checkpointing), None, **arguments)
    ours = trained(gpt(checkpointing=checkpointing), None, "smallest", **arguments)
    assert ours[0] == plain[0]
    assert same(ours[1], plain[1])


def test_units_are_blocks_and_layers_outside():
    division = divide(gpt(), "auto")
    blocks = [f"blocks.{i}" for i in range(DEPTH)]
    assert [u.name for u in division.units] == [ROOT, "embedding", "narrow", *blocks, "widen"]
    named = divide(gpt(), ["blocks.1", "blocks.2"])
    assert [unit.name for unit in named.units] == [ROOT, "blocks.1", "blocks.2"]
    told = divide(gpt(), lambda name, module: name.startswith("blocks.1.mlp."))
    assert [unit.name for unit in told.units] == [ROOT, "blocks.1.mlp.0", "blocks.1.mlp.2"]


def names_of_units(*modules: torch.nn.Module) -> list[str]:
    return [unit.name for unit in divide(torch.nn.Sequential(*modules), "auto").units]


def test_units_are_the_repeated_blocks_between_other_modules():
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

    blocks = [Block() for _ in range(3)]
    norms = [torch.nn.LayerNorm(64) for _ in range(2)]
    small, large = torch.nn.Linear(64, 8), torch.nn.Linear(64, 1000)
    assert names_of_units(*blocks, small) == [ROOT, "0", "1", "2"]
    assert names_of_units(torch.nn.Embedding(1000, 64), norms[0], *blocks, norms[1], large) == [
        ROOT, "0", "2", "3", "4", "6",
    ]
    assert names_of_units(norms[0], large, norms[1]) == [ROOT, "1"]  # layers are no blocks
    assert names_of_units(torch.nn.Sequential(norms[0], *blocks, small), small) == [
        ROOT, "0.1", "0.2", "0.3",
    ]
    # a list in a list is never called
    lists = [torch.nn.ModuleList(blocks[:2]), torch.nn.ModuleList([Block(), Block()])]
    units = divide(torch.nn.ModuleList(lists), "auto").units
    assert [unit.name for unit in units] == ["0.0", "0.1", "1.0", "1.1"]


def test_a_sequence_of_blocks_and_a_head_has_the_bits_without_it():
    results = []
    for offloads in (False, True):
        torch.manual_seed(1)
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)) for _ in range(3)]
        model = torch.nn.Sequential(torch.nn.Embedding(97, 64), *blocks, torch.nn.Linear(64, 97))
        if offloads:
            offload(model, memory=memory_for(model))
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.1)
        results.append(train(model, optimizer, range(2)))
        optimizer.close()
    assert results[0] == results[1]


def test_too_little_memory_says_what_works():
    model = gpt()
    smallest = memory_for(model)
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=rf"smallest that works is {smallest}, for unit '\(root\)' with \d+ bytes, unit "
        r"'blocks\.0' with \d+ bytes, the next, unit 'blocks\.1'",
    ):
        offload(model, memory=smallest - 1)
    offload(model, memory=smallest)


def test_in_8_bits_small_parameters_have_gaps_between_them():
    def norms():
        return torch.nn.Sequential(*(torch.nn.LayerNorm(129) for _ in range(60)))

    division = divide(norms(), [])
    smallest, _ = division.smallest()
    division.require(math.inf, own_blocks=True)
    with_gaps, _ = division.smallest()
    assert with_gaps > smallest
    for memory in (smallest, with_gaps):
        model = norms()
        offload(model, memory=memory, units=[])
        optimizer = ziggurat.torch.AdamW(model.parameters(), state_format="8bit")
        if memory == with_gaps:
            model(torch.ones(2, 129)).square().sum().backward()
            optimizer.step()
            optimizer.close()
            continue
        with pytest.raises(ziggurat.InvalidArgument, match=f"smallest that works is {with_gaps}"):
            optimizer.open()


class Reader(torch.nn.Module):
    """Reads a context twice, as cross-attention does, and adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        read = torch.tanh(self.key(context)) * self.value(context)
        x += read
        return x


class Readers(torch.nn.Module):
    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(300, 64)
        self.readers = torch.nn.ModuleList(Reader() for _ in range(4))
        self.readers.append(self.readers[1])  # once more
        self.head = torch.nn.Linear(64, 300)
        self.beside = beside

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = context = torch.relu(self.embedding(tokens))
        if self.beside:  # all read the same, as experts do
            x = sum(reader(context * 1, context) for reader in self.readers)
        else:
            x = context + 1
            for reader in self.readers:
                x = reader(x, context)
        return self.head(x)


@pytest.mark.parametrize("beside", [False, True])
def test_inputs_that_units_share_are_summed_in_the_same_order(beside):
    results = []
    for offloads in (False, True):
        torch.manual_seed(1)
        model = Readers(beside)
        if offloads:
            offload(model, memory=memory_for(model))
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.1)
        results.append((train(model, optimizer, range(4), clip=1.0), values_of(model)))
        optimizer.close()
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_a_compiled_block_is_not_compiled_again():
    results, graphs = [], []
    for offloads in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = gpt()
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        if offloads:
            offload(model, memory=memory_for(model))
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        results.append(train(model, optimizer, range(3)))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        optimizer.close()
    assert results[0] == results[1]
    assert graphs[0] == graphs[1]


def run_until_killed(folder, placement: str, ready: str) -> None:
    model = gpt()
    offload(model, memory=memory_for(model), placement=placement)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{folder}")

    def after_step(step: int) -> None:
        if step == 2:
            optimizer.engine.make_durable()
            Path(ready).touch()

    train(model, optimizer, range(1000), after_step)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_killed_run_goes_on_with_the_same_bits(placement, tmp_path):
    model = gpt()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement="host")
    # the losses of each step, and of the evaluation after it
    losses = train(model, optimizer, range(40))
    optimizer.close()

    ready = tmp_path / "ready"
    with forked_runs() as runs:
        child = runs.started(run_until_killed, tmp_path / "state", placement, str(ready))
        until = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < until
            time.sleep(0.002)
        assert runs.status_after_kill(child) == -signal.SIGKILL

    torch.manual_seed(9)  # what the parameters are before is of no matter
    model = Gpt()
    offload(model, memory=memory_for(model), placement=placement)
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/state"
    )
    optimizer.open(resume=True)
    made = optimizer.engine.generation
    assert made >= 3
    assert train(model, optimizer, range(made, made + 3)) == losses[2 * made : 2 * made + 6]
    optimizer.close()


class Adapted(torch.nn.Module):
    """A frozen layer and a trained product of two narrow ones beside it, as LoRA has them."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted_gpt() -> torch.nn.Module:
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        block.mlp[0], block.mlp[2] = Adapted(block.mlp[0]), Adapted(block.mlp[2])
    return model


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("given", ["all", "trained"])
def test_frozen_parameters_are_brought_too(placement, given, tmp_path):
    results = []
    for offloaded in (None, placement):
        model = adapted_gpt()
        if offloaded:
            offload(model, memory=memory_for(model), placement=offloaded)
        params = [p for p in model.parameters() if p.requires_grad or given == "all"]
        where = f"nvme:{tmp_path}/{offloaded}"
        optimizer = ziggurat.torch.AdamW(params, lr=1e-2, placement=where)
        losses = train(model, optimizer, range(2))
        optimizer.close()

        model = adapted_gpt()  # the store has nothing of what is frozen
        if offloaded:
            offload(model, memory=memory_for(model), placement=offloaded)
        params = [p for p in model.parameters() if p.requires_grad or given == "all"]
        optimizer = ziggurat.torch.AdamW(params, lr=1e-2, placement=where)
        optimizer.open(resume=True)
        losses += train(model, optimizer, range(2, 4))
        if offloaded:
            assert "away" in repr(model.embedding.weight)
        results.append((losses, values_of(model)))
        optimizer.close()
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_state_dicts_and_checkpoints(tmp_path):
    results = []
    for offloads in (False, True):
        folder = tmp_path / str(offloads)
        model = adapted_gpt()
        if offloads:
            offload(model, memory=memory_for(model))
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, range(2))
        early = {name: value.clone() for name, value in model.state_dict().items()}
        early_state = optimizer.state_dict()
        ziggurat.torch.save_checkpoint(str(folder), optimizer, model)
        losses += train(model, optimizer, range(2, 4))
        model.load_state_dict(early)
        optimizer.load_state_dict(early_state)
        assert not offloads or not pinned(model)
        losses += train(model, optimizer, range(2, 4))
        optimizer.close()

        model = adapted_gpt()
        with torch.no_grad():
            model.norm.weight.fill_(7)
        if offloads:
            offload(model, memory=memory_for(model))
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        assert ziggurat.torch.load_checkpoint(str(folder), optimizer, model).step == 2
        losses += train(model, optimizer, range(2, 4))
        results.append((losses, early))
        tied = model.state_dict()
        assert tied["head.weight"].data_ptr() == tied["embedding.weight"].data_ptr()
        optimizer.close()
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])
    assert results[1][0][4:8] == results[1][0][8:12] == results[1][0][12:]


@pytest.mark.parametrize(("placement", "state"), [("host", "host"), ("host", "nvme"), ("nvme", "nvme")])
def test_a_checkpoint_before_the_first_step_has_the_models_values(tmp_path, placement, state):
    def run(offloads):
        model = adapted_gpt()
        if offloads:
            offload(model, placement=placement, memory=memory_for(model))
        where = "host" if state == "host" else f"nvme:{tmp_path}/{offloads}"
        return model, ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=where)

    model, optimizer = run(offloads=True)
    optimizer.open()
    ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    other, its = run(offloads=False)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    ziggurat.torch.load_checkpoint(tmp_path / "saved", its, other)
    assert same(other.state_dict(), values)
    assert train(model, optimizer, range(2)) == train(other, its, range(2))
    optimizer.close()
    its.close()


class Shown:
    """What a program has in place of standard error: it can only write."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


@pytest.mark.parametrize("shown", [None, Shown()], ids=["nowhere", "elsewhere"])
def test_a_program_need_not_have_a_standard_error(shown, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SILENCE_S", 0.0)
    monkeypatch.setattr(progress, "_BETWEEN_S", 0.0)
    monkeypatch.setattr(sys, "stderr", shown)
    model = gpt()
    offload(model, memory=memory_for(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    optimizer.close()
    assert capsys.readouterr().out == ""
    if shown is not None:
        assert "units with" in shown.text and "\x1b" not in shown.text


def test_another_module_may_be_called_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", types.ModuleType("peft"))
    monkeypatch.delitem(sys.modules, "peft.tuners.tuners_utils", raising=False)
    model = gpt()
    offload(model, memory=memory_for(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    optimizer.close()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Lion", {"lr": 1e-3}), ("Adagrad", {"lr": 1e-2})],
)
def test_other_optimizers_and_groups(name, arguments):
    results = []
    for offloads in (False, True):
        model = gpt()
        if offloads:
            offload(model, memory=memory_for(model))
        wide = [p for p in model.parameters() if p.dim() > 1]
        narrow = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow}]
        optimizer = getattr(ziggurat.torch, name)(groups, **arguments)
        results.append(train(model, optimizer, range(3)))
        optimizer.close()
    assert results[0] == results[1]


def test_evaluation_before_training_runs_where_the_values_are():
    model = gpt()
    with torch.no_grad():
        before = loss_of(model, tokens_of(1)).item()
    offload(model, memory=memory_for(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement="host")
    with torch.no_grad():
        assert loss_of(model, tokens_of(1)).item() == before
    assert optimizer.engine is None  # so that a checkpoint or a store may still be loaded
    loss = loss_of(model, tokens_of(1))
    assert optimizer.engine is not None and loss.item() == before
    with torch.inference_mode():
        assert loss_of(model, tokens_of(1)).item() == before
    optimizer.close()
    assert loss_of(model, tokens_of(1)).item() == before


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
