# SPDX-License-Identifier: Apache-2.0
"""Experts of an offloaded model that are modules of their own: each is a unit, which comes where a batch calls it.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import signal
import sys
import time
import weakref
from pathlib import Path

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from long_cases import long, long_case
    from safetensors.torch import load_file, save_file
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import assert_same_run, memory_of, pinned, values_of
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._library import native
from ziggurat._memory import frozen_files
from ziggurat._streaming.pins import Pins
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import micro_batches, offload

WIDTH, DEPTH, EXPERTS, CALLED = 128, 4, 6, 2
IN_FILES = "params=nvme,grads=nvme"


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


_called: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Mixture(torch.nn.Module):
    """Calls the experts that a token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(EXPERTS))

    @property
    def called(self) -> list[int]:
        """The numbers of those of the newest forward. Not an attribute, which would be one of all micro-batches."""
        return _called[self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CALLED, -1)
        result = torch.zeros_like(x)
        _called[self] = called = chosen.unique().tolist()
        for expert in called:
            token, place = torch.where(chosen == expert)
            made = self.experts[expert](x[token]) * weights[token, place, None]
            result = result.index_add(0, token, made.to(result.dtype))
        return result


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.norm(x + self.mix(x)))


def keeping_products():
    """For a checkpoint that keeps the results of linear layers, and finds them by how often each operation ran."""

    def keep(_, operation, *__, **___):
        products = operation == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)


class Model(torch.nn.Module):
    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, WIDTH), torch.nn.Linear(WIDTH, 10)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(DEPTH))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.checkpointing is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                how = {"context_fn": keeping_products} if self.checkpointing == "selective" else {}
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant", **how)
        return self.last(x)


def made(dtype=torch.float32, checkpointing=None, seed=1):
    torch.manual_seed(seed)
    return Model(checkpointing).to(dtype)


def batch_of(number: int, tokens: int = 2, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(model, x):
    return model(x).float().square().mean()


def blocks_alone(model):
    """Returns the division in which a block's experts are parts of it."""
    return divide(model, lambda name, module: isinstance(module, Block))


def offloaded(model, **arguments):
    """Offloads in memory that is too little for a block with all its experts."""
    memory = memory_of(model)
    assert memory < min(unit.size_bytes for unit in blocks_alone(model).units if "blocks" in unit.name)
    return offload(model, memory=memory, **arguments)


def steps_of(model, optimizer, steps, in_16_bits=False, dtype=torch.float32):
    """Returns losses, norms and which parameters had no gradient, of steps of two backwards with an evaluation after."""
    found = []
    for step in steps:
        for part in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=in_16_bits):
                loss = loss_of(model, batch_of(2 * step + part, dtype=dtype))
            loss.backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        without = [name for name, param in model.named_parameters() if param.grad is None]
        assert without, "all experts were called"
        found.append(without)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model, batch_of(1000 + step, dtype=dtype)).item())
    return found


@pytest.mark.parametrize(
    "run",
    [
        {},
        long_case({"placement": "nvme"}),
        {"placement": IN_FILES, "dtype": torch.bfloat16},
        {"checkpointing": "reentrant"},
        {"checkpointing": "not reentrant", "placement": "nvme"},
        {"in_16_bits": True},
    ],
)
def test_the_bits_are_those_without_offload(tmp_path, run):
    run = dict(run)
    placement, dtype = run.pop("placement", "host"), run.pop("dtype", torch.float32)
    checkpointing = run.pop("checkpointing", None)
    results = []
    for offloads in (False, True):
        model = made(dtype, checkpointing)
        if offloads:
            offloaded(model, placement=placement)
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=1e-2, weight_decay=0.1, placement=f"nvme:{tmp_path}/{offloads}"
        )
        found = steps_of(model, optimizer, range(2), dtype=dtype, **run)
        assert not offloads or pinned(model) == []
        results.append((found, values_of(model)))
        optimizer.close()
    assert_same_run(*results)


def test_selective_checkpointing_finds_what_it_kept(tmp_path):
    """Parameters are compared in some forwards and not in their recomputation, and the other way round."""
    results = []
    for offloads in (False, True):
        model = made(checkpointing="selective")
        if offloads:
            offloaded(model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/{offloads}")
        found = []
        for step in range(6):
            loss = loss_of(model, batch_of(step))
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        results.append((found, values_of(model)))
        optimizer.close()
    assert_same_run(*results)


@pytest.fixture
def brought(monkeypatch):
    """The names of the units that were brought, in their order."""
    names: list[str] = []
    bring = Pins._bring

    def told(self, unit, exact=True):
        names.append(unit.name)
        return bring(self, unit, exact)

    monkeypatch.setattr(Pins, "_bring", told)
    return names


@pytest.mark.parametrize("checkpointing", [None, "not reentrant"])
def test_only_what_is_called_is_brought(tmp_path, brought, checkpointing):
    """In forward, in what is computed again, and in backward, in which experts come in the other order."""
    model = offloaded(made(checkpointing=checkpointing), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}", host_memory="64MiB")
    optimizer.open()
    optimizer.engine.make_durable()
    optimizer.figures()
    loss = loss_of(model, batch_of(1, tokens=1))
    called = [f"blocks.{i}.mixture.experts.{expert}" for i in range(DEPTH) for expert in model.blocks[i].mixture.called]
    assert len(called) == DEPTH * CALLED
    experts = [name for name in brought if "experts" in name]
    assert experts == called
    loss.backward()
    backward = [name for name in brought if "experts" in name][len(called) :]
    if checkpointing is None:
        assert backward == called[::-1]
    else:
        # in each block as in forward, and then back
        assert sorted(backward) == sorted(2 * called)
    # In its first step the engine brings what it is asked for, and nothing ahead.
    division = streaming_of(model.first.weight)[0].division
    sizes = {unit.name: sum(part.home_bytes for part in unit.parts()) for unit in division.units}
    figures = optimizer.figures()
    assert 0 < figures["nvme_read_bytes"] <= sum(sizes[name] for name in brought)
    assert figures["brought_experts"] == len(called) + len(backward)
    assert figures["brought_units"] == len(brought) - figures["brought_experts"]
    optimizer.close()


def test_the_engine_knows_what_a_router_may_leave_out(monkeypatch):
    """So that what is brought ahead of the blocks does not depend on it."""
    given = []
    structs = native._structs
    monkeypatch.setattr(native, "_structs", lambda params: given.extend(params) or structs(params))
    model = made()
    for param in model.blocks[0].mixture.experts[0].parameters():
        param.requires_grad_(False)
    offloaded(model)
    ziggurat.torch.AdamW(one for one in model.named_parameters() if one[1].requires_grad).open()
    assert {param.name for param in given} == {name for name, _ in model.named_parameters()}  # what plans, plans them too
    assert {param.name for param in given if param.optional} == {
        name for name, _ in model.named_parameters() if ".experts." in name
    }


@pytest.mark.parametrize("checkpointing", [None, long_case("reentrant"), "not reentrant"])
@pytest.mark.parametrize("tokens", [long_case(2), 9])
def test_no_step_moves_more_than_its_plan_says(tmp_path, checkpointing, tokens):
    model = made(checkpointing=checkpointing)
    memory = memory_of(model)
    plan = ziggurat.torch.plan(
        model,
        tokens=tokens,
        memory=memory,
        placement="nvme",
        optimizer_placement="nvme",
        accumulation=2,
        recomputes=checkpointing is not None,
    )
    assert plan.experts == DEPTH * EXPERTS
    assert f"{DEPTH * EXPERTS} of them experts" in str(plan)
    offload(model, memory=memory, placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}")
    moved = []
    for step in range(7):
        for part in range(2):
            loss_of(model, batch_of(2 * step + part, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.engine.make_durable()
        figures = optimizer.figures()
        moved.append((figures["nvme_read_bytes"], figures["nvme_write_bytes"]))
    assert ziggurat.torch.plan(model, tokens=tokens, accumulation=2).step == plan.step
    passes = optimizer._passes
    optimizer._passes = lambda *given: found.append(passes(*given)) or found[-1]
    found: list[int] = []
    optimizer.why_slow()
    # Reentrant checkpointing brings blocks once more, where they still are.
    assert found == [3 if checkpointing == "reentrant" else 2]
    # What one step brings for the next is that one's: of two steps on average.
    read, written = (sum(one) / 4 for one in zip(*moved[3:], strict=True))
    assert read <= plan.step.read and written <= plan.step.written
    optimizer.close()


@pytest.mark.parametrize("checkpointing", [None, "not reentrant"])
@pytest.mark.parametrize("placement", ["host", long_case(IN_FILES)])
def test_micro_batches_call_their_own_experts(tmp_path, checkpointing, placement):
    def loop(model, batches, loss):
        return [(found := loss(model(*one), one), found.backward())[0].detach() for one in batches]

    results = []
    for run in (loop, micro_batches):
        model = offloaded(made(checkpointing=checkpointing), placement=placement)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/{run.__name__}")
        losses = []
        for step in range(2):
            batches = [(batch_of(3 * step + part, 1 + part),) for part in range(3)]
            losses += [one.item() for one in run(model, batches, lambda output, _: output.square().mean() / 3)]
            losses.append([name for name, param in model.named_parameters() if param.grad is None])
            optimizer.step()
            optimizer.zero_grad()
        assert pinned(model) == []
        results.append((losses, values_of(model)))
        optimizer.close()
    assert_same_run(*results)


def run_until_killed(folder: str, ready: str) -> None:
    model = offloaded(made(), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{folder}")
    steps_of(model, optimizer, range(2))
    optimizer.engine.make_durable()
    Path(ready).touch()
    steps_of(model, optimizer, range(2, 1000))


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    ready = tmp_path / "ready"
    with forked_runs() as runs:
        child = runs.started(run_until_killed, f"{tmp_path}/state", str(ready))
        until = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < until
            time.sleep(0.002)
        assert runs.status_after_kill(child) == -signal.SIGKILL
    model = offloaded(made(seed=9), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/state")
    optimizer.open(resume=True)
    step = optimizer.engine.generation
    assert step >= 2
    ours = steps_of(model, optimizer, range(step, step + 2))
    optimizer.close()
    model = made()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement="host")
    plain = steps_of(model, optimizer, range(step + 2))
    assert ours == plain[-len(ours) :]
    optimizer.close()


def test_frozen_experts_are_read_from_their_files_where_they_are_called(tmp_path, monkeypatch):
    """None is read ahead, though the blocks are."""
    save_file(made().state_dict(), tmp_path / "model.safetensors")
    read: list[str] = []
    plain = frozen_files._read
    monkeypatch.setattr(
        frozen_files, "_read", lambda ranges: (read.extend(name for name, _ in ranges), plain(ranges))[1]
    )
    results = []
    for offloads in (False, True):
        model = made(seed=2)
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
        for name, param in model.named_parameters():
            param.requires_grad_("experts" not in name)
        memory = memory_of(model)
        if offloads:
            offload(model, memory=memory)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = ziggurat.torch.AdamW(trained, lr=1e-2, placement="host")
        losses, called = [], []
        for step in range(3):
            loss = loss_of(model, batch_of(step))
            called += [f"blocks.{i}.mixture.experts.{one}" for i in range(DEPTH) for one in model.blocks[i].mixture.called]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, values_of(model)))
        optimizer.close()
    assert_same_run(*results)
    names = {name.rpartition(".")[0].rpartition(".")[0] for name in read}
    assert sorted(name for name in read if name.endswith("up.weight")) == sorted(f"{one}.up.weight" for one in 2 * called)
    assert names == set(called)


class Named(torch.nn.ModuleDict):
    """As transformers' Switch has its experts."""

    def __init__(self) -> None:
        super().__init__({f"expert_{i}": torch.nn.Linear(WIDTH, WIDTH) for i in range(3)})
        self.drops = torch.nn.Dropout()


class Fused(torch.nn.Module):
    """As transformers 5 has most models' experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(3, WIDTH, WIDTH))


def units_of(experts, choice="auto"):
    blocks = [torch.nn.Sequential() for _ in range(2)]
    for block in blocks:
        block.mix = torch.nn.Linear(WIDTH, WIDTH)
        block.experts = experts()
    return [unit.name for unit in divide(torch.nn.Sequential(*blocks), choice).units]


def test_units_are_blocks_and_the_experts_within_them():
    alone = ["0", "1"]
    assert units_of(Fused) == alone
    assert units_of(lambda: torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))) == alone  # small
    assert units_of(lambda: torch.nn.ModuleList([Expert()])) == alone  # always called
    both = [name for one in alone for name in (one, *(f"{one}.experts.{i}" for i in range(3)))]
    assert units_of(lambda: torch.nn.ModuleList(Expert() for _ in range(3))) == both
    named = [name for one in alone for name in (one, *(f"{one}.experts.expert_{i}" for i in range(3)))]
    assert units_of(Named) == named
    by_hand = units_of(lambda: torch.nn.ModuleList(Expert() for _ in range(3)), ["0", "1", "1.experts.2"])
    assert by_hand == ["0", "1", "1.experts.2"]


def test_experts_of_a_compiled_block_are_parts_of_it():
    model = made()
    model.blocks[1].compile()
    names = [unit.name for unit in divide(model, "auto").units]
    assert "blocks.1" in names and "blocks.0.mixture.experts.0" in names
    assert not any(name.startswith("blocks.1.") for name in names)


def test_a_model_of_very_many_experts_is_divided_at_once():
    with torch.device("meta"):
        blocks = [torch.nn.Sequential() for _ in range(24)]
        for block in blocks:
            block.mix = torch.nn.Linear(WIDTH, WIDTH)
            block.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(128))
        model = torch.nn.Sequential(*blocks)
    before = time.process_time()
    division = divide(model, "auto", also_meta=True)
    division.smallest()
    assert len(division.units) == 24 * 129
    assert time.process_time() - before < 20  # and not minutes, as what looks at each pair takes


@long
@pytest.mark.filterwarnings("ignore")
def test_switch_transformers(tmp_path):
    """Its experts are in a dict. Forward, backward, an evaluation and generate() between steps."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=300, d_model=64, d_kv=16, d_ff=256, num_layers=4, num_decoder_layers=4, num_heads=4, num_experts=4,
        num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    results = []
    for offloads in (False, True):
        torch.manual_seed(1)
        model = transformers.SwitchTransformersForConditionalGeneration(config)
        if offloads:
            offload(model, memory=memory_of(model), placement="nvme")
            assert any(unit.is_expert for unit in streaming_of(next(model.parameters()))[0].division.units)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/{offloads}")
        found = []
        for step in range(3):
            tokens = torch.randint(300, (2, 3), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            found += [loss.item(), [name for name, one in model.named_parameters() if one.grad is None]]
            optimizer.step()
            optimizer.zero_grad()
            found += model.eval().generate(input_ids=tokens, max_new_tokens=4, do_sample=False).flatten().tolist()
            model.train()
        results.append((found, values_of(model)))
        optimizer.close()
    assert_same_run(*results)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
