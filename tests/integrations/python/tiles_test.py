# SPDX-License-Identifier: Apache-2.0
"""Linear layers of an offloaded model that are used a tile at a time: offload(tiles=).

Run by pytest; as a script it exits with 77 where PyTorch, safetensors or pytest is missing, or
PyTorch is older than offload() takes.
"""

import gc
import re
import contextlib
import sys
from pathlib import Path

try:
    import pytest
    import torch
    import torch.fx.experimental._config
    from rank_runs import on_ranks
    from safetensors.torch import load_file, save_file
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import assert_same_run, pinned, values_of
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument, Unimplemented
from ziggurat._losses.logits import How
from ziggurat._losses.tiled_loss import loss_in_tiles
from ziggurat._memory.file_memory import is_in_file
from ziggurat._streaming.streaming import streaming_of
from ziggurat.torch import gathered, micro_batches, offload

WORDS, WIDTH, LENGTH, ROWS = 300, 64, 12, 20_003
IN_FILES = "params=nvme,grads=nvme"

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(torch.nn.Module):
    """`trunk`: whether what comes before the head is trained too."""

    def __init__(self, bias: bool = True, trunk: bool = True, rows: int = ROWS) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)
        )
        self.lm_head = torch.nn.Linear(WIDTH, rows, bias=bias)
        self.checkpointing: bool | None = None  # or whether it is reentrant
        if not trunk:
            self.embedding.requires_grad_(False)
            self.blocks.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        if self.checkpointing is None:
            return self.lm_head(x)
        return checkpoint(self.lm_head, x, use_reentrant=self.checkpointing)


def made(dtype=torch.float32, seed=1, **arguments):
    torch.manual_seed(seed)
    return Model(**arguments).to(dtype)


def tokens_of(number):
    return torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(number))


def loss_of(model, tokens):
    return model(tokens).float().square().mean()


def in_tiles(model, count=16, **arguments):
    """Offloads with a quarter of the memory that the head takes."""
    memory = arguments.pop("memory", model.lm_head.weight.nbytes // 4)
    return offload(model, memory=memory, tiles={"lm_head": count}, **arguments)


def adamw(model, where="host"):
    trained = [param for param in model.parameters() if param.requires_grad]
    return ziggurat.torch.AdamW(trained, lr=1e-2, weight_decay=0.1, placement=where)


def steps_of(model, optimizer, steps, backwards=2):
    found = []
    for step in steps:
        for part in range(backwards):
            loss = loss_of(model, tokens_of(backwards * step + part))
            loss.backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model, tokens_of(1000 + step)).item())
    return found


def opened(model, tmp_path, **arguments):
    """Returns the offloaded model's optimizer when the engine has the parameters."""
    in_tiles(model, **{"placement": "nvme", **arguments})
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open()
    return optimizer


def apart(one, other):
    return (one.double() - other.double()).norm() / other.double().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (33,), (1,), (2, 1, 3), ()])
def test_the_bits_of_output_and_gradients(tmp_path, dtype, bias, shape):
    plain, model = made(dtype, bias=bias), made(dtype, bias=bias)
    optimizer = opened(model, tmp_path)
    torch.manual_seed(7)
    x = torch.randn(*shape, WIDTH).to(dtype)
    of_output, found = torch.randn(*shape, ROWS).to(dtype), []
    for one in (plain, model):
        given = x.clone().requires_grad_()
        output = one.lm_head(given)
        params = [given, *one.lm_head.parameters()]
        found.append((output.detach(), *torch.autograd.grad(output, params, of_output)))
    (*same, theirs), (*ours, its) = ([one[0], *one[2:], one[1]] for one in found)
    assert len(same) == len(ours) == 2 + bias
    assert all(torch.equal(*pair) for pair in zip(same, ours, strict=True))
    assert its.dtype == dtype and its.shape == x.shape
    if shape not in ((), (1,)):
        assert apart(its, theirs) < {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    else:  # PyTorch adds up the numbers of a single token one after the other, and is farther from the sum itself
        exact = of_output.double() @ plain.lm_head.weight.detach().double()
        assert apart(its, exact) < 2 * apart(theirs, exact)
    optimizer.close()


def test_an_input_without_gradient_and_a_frozen_weight(tmp_path):
    plain, model = made(), made()
    optimizer = opened(model, tmp_path)
    x = torch.randn(4, WIDTH)
    found = []
    for one in (plain, model):
        one.lm_head(x).square().sum().backward()
        with gathered(one.parameters()):
            found.append(one.lm_head.weight.grad.clone())
        one.lm_head.requires_grad_(False)
        given = x.clone().requires_grad_()
        output = one.lm_head(given)
        if one is model:  # as in PyTorch, nothing but the weight is kept
            saved = [tensor for tensor in output.grad_fn.saved_tensors if tensor is not None]
            assert len(saved) == 1 and saved[0] is one.lm_head.weight
        found.append(torch.autograd.grad(output.square().sum(), given)[0])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[1], found[3], rtol=1e-5, atol=1e-5)
    optimizer.close()


@pytest.mark.parametrize(
    ("placement", "dtype", "backwards"),
    [
        ("host", torch.float32, 2),
        ("nvme", torch.float32, 1),
        ("nvme", torch.bfloat16, 3),
        (IN_FILES, torch.bfloat16, 2),
        (IN_FILES, torch.float32, 1),
    ],
)
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_training_has_the_bits_of_a_layer_that_is_whole(tmp_path, placement, dtype, backwards, checkpointing):
    results = []
    for tiles in (False, True):
        model = made(dtype, trunk=False)
        if tiles:
            in_tiles(model, placement=placement)
            model.checkpointing = checkpointing
            if checkpointing:  # it needs an input with a gradient
                model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
        else:
            offload(model, memory="64MiB", placement=placement)
        optimizer = adamw(model, f"nvme:{tmp_path}/{tiles}")
        losses = steps_of(model, optimizer, range(3), backwards)
        if tiles:
            assert pinned(model) == []
            assert is_in_file(model.lm_head.weight) == (placement != "host")
        results.append((losses, values_of(model)))
        optimizer.close()
        assert torch.equal(model.lm_head.weight, results[-1][1]["lm_head.weight"])
    assert_same_run(*results)


@pytest.mark.parametrize("placement", ["host", IN_FILES])
def test_what_comes_before_is_trained_too(tmp_path, placement):
    losses = []
    for tiles in (False, True):
        model = made()
        if tiles:
            in_tiles(model, placement=placement)
        optimizer = adamw(model, f"nvme:{tmp_path}/{tiles}")
        losses.append(torch.tensor(steps_of(model, optimizer, range(3))))
        optimizer.close()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def resident(folder: Path) -> int:
    """Returns how much of the mappings of files in `folder` this process has."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    own = [entry for entry in entries if str(folder) in entry.partition("\n")[0]]
    return sum(int(size) << 10 for entry in own for size in re.findall(r"^Rss: +(\d+)", entry, re.M))


@pytest.mark.parametrize("count", [8, 64])
def test_one_tile_is_there_at_a_time(tmp_path, monkeypatch, count):
    """And a page at its ends, and what the kernel maps around them. Of the gradient as much is there."""
    model = made(rows=2**16)
    weight, seen = model.lm_head.weight, []
    optimizer = opened(model, tmp_path, count=count, memory=weight.nbytes // 4)
    for name in ("linear", "_added"):
        its = getattr(ziggurat._streaming.tiled_linear, name)

        def looked(*args, its=its):
            result = its(*args)
            seen.append(resident(tmp_path))
            return result

        monkeypatch.setattr(ziggurat._streaming.tiled_linear, name, looked)
    for _ in range(2):
        loss_of(model, tokens_of(1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert resident(tmp_path) < 2**18  # of what the step has written, too
        loss_of(model, tokens_of(1))
    seen.clear()
    loss_of(model, tokens_of(1)).backward()
    tile = weight.nbytes // count
    assert len(seen) == 2 * count
    assert tile <= min(seen) and max(seen) < tile + 2**18
    assert resident(tmp_path) < 2**18
    figures = optimizer.figures()
    assert figures["tiles_read_bytes"] == 8 * weight.nbytes
    optimizer.close()


def test_memory_for_all_tiles_keeps_them(tmp_path):
    model = made()
    optimizer = opened(model, tmp_path, memory="64MiB")
    steps_of(model, optimizer, range(2))
    assert optimizer.figures()["tiles_read_bytes"] == model.lm_head.weight.nbytes
    step = ziggurat.torch.plan(model, tokens=36).step
    assert step.params_read_forward == step.brought_forward
    optimizer.close()


def test_a_plan_is_that_of_the_run(tmp_path):
    model = made()
    asked = {"memory": model.lm_head.weight.nbytes // 4, "placement": "nvme", "free_memory": "1GiB"}
    plan = ziggurat.torch.plan(model, tokens=36, tiles={"lm_head": 16}, optimizer_placement="nvme", **asked)
    assert plan.tiles == {"lm_head": 16} and plan.by_rows == ()
    assert plan.step.params_read_forward - plan.step.brought_forward == model.lm_head.weight.nbytes
    assert plan.step.params_read_backward - plan.step.brought_backward == model.lm_head.weight.nbytes
    assert "lm_head has 16 tiles, of which one is there at a time" in str(plan)
    optimizer = opened(model, tmp_path)
    its = ziggurat.torch.plan(model, tokens=36)
    assert its.step == plan.step and its.smallest_memory_bytes == plan.smallest_memory_bytes
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_it_is_one_parameter_for_state_dicts_and_groups(tmp_path, placement):
    plain, model = made(), in_tiles(made(), placement=placement)
    assert {name: value.shape for name, value in model.named_parameters()} == {
        name: value.shape for name, value in plain.named_parameters()
    }
    groups = [{"params": [model.lm_head.weight], "lr": 1e-3}, {"params": list(model.blocks.parameters())}]
    optimizer = ziggurat.torch.AdamW(groups, placement=f"nvme:{tmp_path}/state")
    loss_of(model, tokens_of(0)).backward()
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state[model.lm_head.weight]["exp_avg"].shape == model.lm_head.weight.shape
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    loss_of(model, tokens_of(1)).backward()
    optimizer.step()
    optimizer.synchronize()
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    model.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        plain.load_state_dict(before)
        assert torch.equal(plain(tokens_of(2)), model(tokens_of(2)))
    optimizer.close()


def test_checkpoints_and_stores_go_on_with_other_tiles(tmp_path):
    """Saved with tiles and loaded without, and the other way round; and the store of a run with others."""
    results = []
    for before, after in ((16, None), (None, 64), (16, 32)):
        name = f"{before}-{after}"

        def run(count, seed, where):
            model = made(seed=seed, trunk=False)
            offload(model, memory="2MiB" if count else "64MiB", placement="nvme", tiles={"lm_head": count} if count else None)
            return model, adamw(model, f"nvme:{tmp_path}/{where}")

        model, optimizer = run(before, 1, name)
        losses = steps_of(model, optimizer, range(2))
        ziggurat.torch.save_checkpoint(tmp_path / f"saved-{name}", optimizer, model)
        optimizer.close()
        model, optimizer = run(after, 1, name)
        optimizer.open(resume=True)
        from_store = steps_of(model, optimizer, range(2, 4))
        optimizer.close()
        model, optimizer = run(after, 1, f"{name}-again")
        ziggurat.torch.load_checkpoint(tmp_path / f"saved-{name}", optimizer, model)
        losses += steps_of(model, optimizer, range(2, 4))
        assert losses[-len(from_store) :] == from_store
        results.append((losses, values_of(model)))
        optimizer.close()
    assert_same_run(*results[:2])
    assert_same_run(*results[1:])


@pytest.mark.parametrize("in_own_file", [False, True])
def test_a_frozen_head(tmp_path, in_own_file):
    file = tmp_path / "model.safetensors"
    save_file(made().state_dict(), file)
    results = []
    for tiles in (False, True):
        model = optimizer = None
        gc.collect()  # or the mapping of the run before counts too
        model = made()
        if in_own_file:
            model.load_state_dict(load_file(file), assign=True)
        model.lm_head.requires_grad_(False)
        if tiles:
            in_tiles(model, placement="nvme")
        optimizer = adamw(model, f"nvme:{tmp_path}/{tiles}")
        losses = steps_of(model, optimizer, range(2))
        if tiles:
            assert model.lm_head.weight.grad is None
            assert optimizer.figures()["tiles_read_bytes"] > 0
            its = resident(file if in_own_file else tmp_path / "True")
            assert its < model.lm_head.weight.nbytes / 8
            plan = ziggurat.torch.plan(model, tokens=36, accumulation=2)
            assert plan.step.frozen_read_forward == in_own_file * 2 * model.lm_head.weight.nbytes
        results.append(torch.tensor(losses))
        assert torch.equal(model.lm_head.weight, made().lm_head.weight)
        optimizer.close()
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


def test_autocast_double_backward_and_transforms(tmp_path):
    plain, model = made(), made()
    optimizer = opened(model, tmp_path)
    x, found = torch.randn(3, 5, WIDTH), []
    for one in (plain, model):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = one.lm_head(given)
        assert output.dtype == torch.bfloat16
        grads = torch.autograd.grad(output.float().square().sum(), [*one.lm_head.parameters(), given])
        assert grads[0].dtype == torch.float32
        found.append([output, *grads])
    assert all(torch.equal(*pair) for pair in zip(found[0][:3], found[1][:3], strict=True))
    assert apart(found[1][3], found[0][3]) < 5e-3
    found = []
    for one in (plain, model):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(one.lm_head(given).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [given, *one.lm_head.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    mapped = [torch.func.vmap(one.lm_head)(x) for one in (plain, model)]
    torch.testing.assert_close(*mapped)
    optimizer.close()


def test_a_weight_that_was_written_since_the_forward_is_an_error(tmp_path):
    model = made()
    optimizer = opened(model, tmp_path)
    loss = loss_of(model, tokens_of(1))
    with torch.no_grad(), gathered(model.lm_head.weight, write=True):
        model.lm_head.weight[5] += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss_of(model, tokens_of(1)).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"logit_scale": 0.5, "softcap": 3.0}, {"reduction": "sum", "chunk": 7}])
@pytest.mark.parametrize("bias", [True, False])
def test_a_loss_without_logits(tmp_path, dtype, changes, bias):
    plain, model = made(dtype, bias=bias), made(dtype, bias=bias)
    optimizer = opened(model, tmp_path)
    torch.manual_seed(7)
    x, labels = torch.randn(5, 9, WIDTH).to(dtype), torch.randint(ROWS, (5, 9))
    labels[0, :4], labels[1, 0], labels[1, 1] = -100, 0, ROWS - 1
    found = []
    for one in (plain, model):
        given = x.clone().requires_grad_()
        loss = ziggurat.torch.chunked_cross_entropy(given, one.lm_head.weight, labels, bias=one.lm_head.bias, **changes)
        found.append([loss, *torch.autograd.grad(3 * loss, [given, *one.lm_head.parameters()])])
    (loss, *grads), (its_loss, *its) = found
    assert apart(its_loss, loss) < 1e-6
    assert all(apart(*pair) < (1e-6 if dtype == torch.float32 else 5e-3) for pair in zip(its, grads, strict=True))
    # Whichever way the tokens are cut, and with nothing to learn.
    labels.fill_(-100)
    loss = ziggurat.torch.chunked_cross_entropy(given, model.lm_head.weight, labels, reduction="sum")
    assert loss == 0 and not torch.autograd.grad(loss, given)[0].any()
    assert optimizer.figures()["tiles_read_bytes"] == 4 * model.lm_head.weight.nbytes
    optimizer.close()


def test_words_that_a_bias_bans_in_a_whole_tile():
    plain, model = made(bias=True), made(bias=True)
    x, labels = torch.randn(6, WIDTH), torch.full((6,), ROWS - 1)
    for one in (plain, model):
        with torch.no_grad():
            one.lm_head.bias[: ROWS // 2] = -torch.inf
    in_tiles(model)
    loss = ziggurat.torch.chunked_cross_entropy(x, model.lm_head.weight, labels, bias=model.lm_head.bias)
    expected = torch.nn.functional.cross_entropy(plain.lm_head(x), labels)
    assert apart(loss, expected) < 1e-6


def test_a_vocabulary_that_grows_after_offload_is_refused():
    model = in_tiles(made(bias=False))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(2 * ROWS, WIDTH))
    with pytest.raises(ziggurat.torch.InvalidArgument, match="grow a vocabulary before offload"):
        model.lm_head(torch.randn(6, WIDTH))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_causal_model_computes_its_loss_in_tiles(tmp_path, monkeypatch, capfd, frozen):
    language_models = pytest.importorskip("language_models")
    losses, seen = [], []

    def looked(logits, *args, its=ziggurat._losses.tiled_loss.change):
        seen.append(logits.shape)
        return its(logits, *args)

    monkeypatch.setattr(ziggurat._losses.tiled_loss, "change", looked)
    for tiles in (None, {"lm_head": 8}):
        model = language_models.llama(vocab_size=5000)
        model.lm_head.requires_grad_(not frozen)
        offload(model, memory="1MiB" if tiles else "4MiB", placement="nvme", tiles=tiles, chunked_loss=True)
        optimizer = adamw(model, f"nvme:{tmp_path}/{tiles is None}")
        losses.append([])
        for batch in language_models.batches(3):
            loss = language_models.loss_of(model, batch)
            loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if tiles is not None:
            assert optimizer.figures()["tiles_read_bytes"] == 6 * model.lm_head.weight.nbytes
            with torch.no_grad():
                logits = model(input_ids=batch).logits
                assert logits.shape[-1] == 5000
                model.eval()
                assert model.generate(batch[:1, :4], max_new_tokens=3).shape == (1, 7)
            model.save_pretrained(tmp_path / "saved")
            saved = load_file(tmp_path / "saved" / "model.safetensors")
            state = model.state_dict()
            assert saved.keys() == state.keys()
            assert all(torch.equal(saved[name], state[name]) for name in saved)
        optimizer.close()
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    assert len(seen) == 48 and max(shape[1] for shape in seen) <= 640
    assert f"computes its loss {2**28 // (16 * 632)} tokens" in capfd.readouterr().err


def test_layers_within_a_block_before_and_after_an_engine(tmp_path):
    plain, model = made(), made()
    tiles = {"blocks.1.0": 4, "lm_head": 16}
    offload(model, memory=model.lm_head.weight.nbytes // 4, placement="nvme", tiles=tiles)
    assert [unit.name for unit in streaming_of(model.lm_head.weight)[0].units if unit.unit.tiles] == list(tiles)

    def compare():
        with torch.no_grad():
            assert torch.equal(plain(tokens_of(1)), model(tokens_of(1)))
        found = [torch.autograd.grad(loss_of(one, tokens_of(1)), one.blocks[1][0].weight)[0] for one in (plain, model)]
        assert apart(*found) < 1e-5

    compare()
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open()
    compare()
    steps_of(model, optimizer, range(1))
    optimizer.close()
    plain.load_state_dict(model.state_dict())
    compare()


def test_micro_batches(tmp_path):
    results = []
    for takes_turns in (False, True):
        model = in_tiles(made(trunk=False), placement="nvme")
        optimizer = adamw(model, f"nvme:{tmp_path}/{takes_turns}")
        losses = []
        for step in range(2):
            batches = [(tokens_of(3 * step + part),) for part in range(3)]
            if takes_turns:
                losses += micro_batches(model, batches, lambda output, _: output.square().mean() / 3)
            else:
                for (tokens,) in batches:
                    losses.append(model(tokens).square().mean() / 3)
                    losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(([one.item() for one in losses], values_of(model)))
        optimizer.close()
    assert_same_run(*results)


def of_rank(rank, world, home, folder):
    """Returns what ZeRO-2 finds with a whole head, and what ranks find that stream their models with tiles."""
    found = []
    for tiles in (False, True):
        model = made(trunk=False)
        if tiles:
            in_tiles(model, placement=home)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = ziggurat.torch.AdamW(
            trained, lr=1e-2, placement=f"nvme:{folder}/{tiles}", model=model, group=torch.distributed.group.WORLD
        )
        losses = steps_of(model, optimizer, range(rank, 3 * world, world))
        found.append((losses, values_of(model)))
        optimizer.close()
    return found


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_ranks(tmp_path, home):
    """Each has the whole layer, as it has tables that are read by rows."""
    for results in on_ranks(2, of_rank, 2, home, str(tmp_path)):
        assert_same_run(*results)


def test_errors():
    model = made()

    def refused(kind, words, tiles, **arguments):
        with pytest.raises(kind, match=words):
            offload(model, memory="1GiB", tiles=tiles, **arguments)
        assert streaming_of(model.lm_head.weight) is None

    refused(InvalidArgument, "no module 'head': its linear layers are 'lm_head', 'blocks.0.0'", {"head": 4})
    refused(InvalidArgument, "'embedding' is a Embedding, no torch.nn.Linear", {"embedding": 4})
    for count in (0, 1, ROWS + 1, 2.0, True, "2"):
        refused(InvalidArgument, rf"'lm_head', which has {ROWS} rows: give from 2 to {ROWS}", {"lm_head": count})
    refused(InvalidArgument, 'give names of linear layers and how many tiles each has', "lm_head")

    class Other(torch.nn.Linear):
        pass

    model.lm_head.__class__ = Other
    refused(Unimplemented, "'lm_head' is a Other or has a forward of its own", {"lm_head": 4})
    model.lm_head.__class__ = torch.nn.Linear
    model.lm_head = torch.nn.Linear(WIDTH, WORDS)
    model.lm_head.weight = model.embedding.weight
    refused(Unimplemented, "'lm_head.weight' is also used by other modules", {"lm_head": 4})


def test_too_little_memory_names_the_tiles_that_help():
    model = made()
    memory = model.lm_head.weight.nbytes // 4
    with pytest.raises(InvalidArgument, match=r'or tiles={"lm_head": 8}, which brings') as refused:
        offload(model, memory=memory)
    assert "smaller units" in str(refused.value)
    in_tiles(model, 8, memory=memory)
    with pytest.raises(InvalidArgument) as refused:
        offload(made(), memory=1000)
    assert "tiles" not in str(refused.value)


class OnCpu:
    """Tiles of a weight that stays on the CPU."""

    rows, folder_of_grad = 8, None

    def each(self, backward=False):
        yield from (slice(0, 8), slice(8, 16))

    def require_rows(self, weight):
        assert len(weight) == 16


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_loss_is_computed_where_hidden_is(is_trained, monkeypatch):
    """PyTorch's meta device plays a GPU: it computes no values, and refuses operands on another device."""
    monkeypatch.setattr(torch, "autocast", lambda *device, **given: contextlib.nullcontext())  # which it has not
    weight, bias = torch.ones(16, 4, requires_grad=is_trained), torch.ones(16)
    with torch.device("meta"):
        hidden, tokens, divisor = torch.empty(6, 4, requires_grad=True), torch.arange(5), torch.ones(())
    how = How(3, torch.float32, 1.0, None, True)
    comes_back = pytest.raises(NotImplementedError, match="copy out of meta") if is_trained else contextlib.nullcontext()
    with torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):
        loss = loss_in_tiles(hidden, weight, bias, tokens, tokens, divisor, how, OnCpu())
        with comes_back:  # what the CPU gets has no values to copy
            loss.backward()
    assert loss.is_meta and (is_trained or hidden.grad.is_meta)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
