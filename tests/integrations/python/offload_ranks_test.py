# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload() among several ranks, each of which keeps slices: the bits of ZeRO-2, and what one rank does alone.

The suite runs some cases; ZIGGURAT_CASES=all runs all. Run by pytest; as a script it exits with 77 where PyTorch,
transformers or pytest is missing, or PyTorch is older than offload() takes.
"""

import gc
import itertools
import re
import sys
import time
import weakref
from pathlib import Path

try:
    import pytest
    import torch
    import torch.distributed as dist
    import transformers
    from language_models import batches, gpt2, llama, loss_of
    from long_cases import long
    from offload_families_test import BLOCKS, FAMILIES
    from rank_runs import on_ranks
    from streamed_models import gpt, tokens_of
    from streamed_models import loss_of as loss_of_tokens
    from streamed_ranks import STEPS, adamw, least, trained
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.hf
import ziggurat.torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def offloaded(model, home="host"):
    return ziggurat.torch.offload(model, memory=least(model), placement=home)


def family(rank, world, name, dtype, home, folder):
    """One run with whole parameters and slices of state, ZeRO-2, and one with slices of both."""
    runs = []
    for streams in (False, True):
        model = FAMILIES[name]().to(dtype)
        if streams:
            model = offloaded(model, home)
        optimizer = adamw(model, folder and f"{folder}/{streams}", group=dist.group.WORLD)
        runs.append(trained(model, optimizer, rank, world))
        optimizer.close()
        runs[-1] += ([param.detach().clone() for param in model.parameters()],)
    return runs


IN_THE_SUITE = {
    (2, "mixture of experts", "fp32", "host"),
    (2, "encoder-decoder", "bf16", "nvme"),
    (3, "llama", "fp32", "nvme"),
}
CASES = [
    pytest.param(*case, marks=[] if case in IN_THE_SUITE else long)
    for case in itertools.product((2, 3), FAMILIES, DTYPES, ("host", "nvme"))
]


@pytest.mark.parametrize(("world", "name", "dtype", "home"), CASES)
def test_the_bits_are_those_of_zero_2(world, name, dtype, home, tmp_path):
    found = on_ranks(world, family, world, name, DTYPES[dtype], home, str(tmp_path) if home == "nvme" else None)
    for (losses, state, params), (own_losses, own_state, own_params) in found:
        assert own_losses == losses
        assert all(torch.equal(own_state[key], values) for key, values in state.items())
        assert all(map(torch.equal, own_params, params))
    assert all(torch.equal(found[0][1][1][key], values) for key, values in found[-1][1][1].items())


def gradients(rank, world, dtype, folder):
    """Runs whose gradients are in memory, and in files, and what their exchange takes of memory."""
    runs = []
    for home in ("nvme", "params=nvme,grads=nvme"):
        model = offloaded(gpt2(n_layer=BLOCKS, n_embd=128).to(dtype), home)  # whose slices have tiles
        optimizer = adamw(model, f"{folder}/{home}")
        planned = ziggurat.torch.plan(model, tokens=64)
        found = trained(model, optimizer, rank, world)
        figures = optimizer.figures()
        assert figures["exchange_bytes"] <= figures["exchange_planned_bytes"]
        optimizer.close()
        runs.append((*found, figures["exchange_bytes"], planned.on_drive.get("gradients", 0)))
    return runs


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, "bf16"), pytest.param(3, "fp32", marks=long), pytest.param(2, "fp32", marks=long)]
)
def test_gradients_in_files_have_the_same_bits(world, dtype, tmp_path):
    for memory, files in on_ranks(world, gradients, world, DTYPES[dtype], str(tmp_path)):
        (losses, state, took, none), (own_losses, own_state, own_took, planned) = memory, files
        assert own_losses == losses
        assert all(torch.equal(own_state[key], values) for key, values in state.items())
        assert own_took < took
        assert none == 0 < planned


def in_groups(rank, world, name, dtype, home, folder, groups):
    """Runs with whole parameters and with slices, in groups of each number of ranks; None: without groups."""
    runs = []
    for streams, group in itertools.product((False, True), groups):
        model = FAMILIES[name]().to(dtype)
        if streams:
            model = offloaded(model, home)
        folder_of = None if home == "host" else f"{folder}/{streams}-{group}"
        exchange = "ziggurat" if group and not streams else "torch"
        optimizer = adamw(model, folder_of, group=dist.group.WORLD, shard_group=group, exchange=exchange)
        runs.append((*trained(model, optimizer, rank, world), slices_of(optimizer)))
        figures = optimizer.figures()
        assert figures["exchange_bytes"] <= figures["exchange_planned_bytes"]
        optimizer.close()
    return runs


def slices_of(optimizer):
    """How many elements this rank has of the parameters' state."""
    return sum(part.memory().numel() for part in optimizer.engines()[0].parts)


@pytest.mark.parametrize(
    ("world", "name", "dtype", "home", "groups"),
    [
        (4, "llama", "fp32", "host", (None, 2)),
        pytest.param(4, "tied", "bf16", "params=nvme,grads=nvme", (None, 2), marks=long),
        pytest.param(6, "mixture of experts", "fp32", "nvme", (None, 2, 3), marks=long),
    ],
)
def test_groups_that_have_copies_have_the_bits_of_as_many_ranks(world, name, dtype, home, groups, tmp_path):
    for runs in on_ranks(world, in_groups, world, name, DTYPES[dtype], home, str(tmp_path), groups):
        (losses, state, count), *others = runs
        for own_losses, own_state, _ in others:
            assert own_losses == losses
            assert all(torch.equal(own_state[key], values) for key, values in state.items())
        for group, (*_, own_count) in zip(2 * groups, runs, strict=True):
            assert own_count == pytest.approx(count * world / (group or world), rel=0.1)


def of_nodes(rank, home, folder):
    """Runs of four ranks in which two share copies, and in which none do: bits, and what came from other ranks."""
    runs = []
    for hpz in (None, 2):
        model = offloaded(gpt2(n_layer=BLOCKS).bfloat16(), home)
        optimizer = adamw(model, None if home == "host" else f"{folder}/{hpz}", hpz=hpz)
        found = trained(model, optimizer, rank, 4)
        figures = optimizer.figures()
        runs.append((*found, figures["from_ranks_bytes"], figures["from_other_nodes_bytes"]))
        optimizer.close()
    for given in ({"hpz": 2}, {"shard_group": 2}):
        with pytest.raises(ziggurat.torch.InvalidArgument, match="rank 0 gives shard_group=.*, but rank 1 gives shard_"):
            adamw(torch.nn.Linear(8, 8), group=dist.group.WORLD, **(given if rank == 0 else {}))
    return runs, sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("home", ["host", pytest.param("nvme", marks=long)])
def test_copies_of_a_node_change_no_bit_and_come_once_a_step(home, tmp_path):
    every = on_ranks(4, of_nodes, home, str(tmp_path))
    for (alone, shared), _ in every:
        assert shared[0] == alone[0]
        assert all(torch.equal(shared[1][key], values) for key, values in alone[1].items())
        assert alone[3] == 0
    # Each half comes to the two ranks of the other once after each step, also after the last, for state_dict().
    other, all_bytes = (sum(run[i][at] for run, _ in every) for i, at in ((1, 3), (0, 2)))
    assert other == pytest.approx((STEPS + 1) * every[0][1], rel=0.01)
    assert 1.5 * other < 2 / 3 * all_bytes  # what comes from these ranks without copies


def grouped(rank, folder, steps, group, how):
    """Trains, and saves what another number of ranks goes on with."""
    model = offloaded(gpt(), "nvme")
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, model=model, placement=f"nvme:{folder}/store", shard_group=group
    )
    optimizer.open(resume=how)
    for step in steps:
        loss_of_tokens(model, tokens_of(2 * step)).backward()  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()
    state = {name: values.clone() for name, values in model.state_dict().items()}
    if steps:
        ziggurat.torch.save_checkpoint(f"{folder}/saved", optimizer, model)
    full = optimizer.state_dict()["state"]
    optimizer.close()
    return state, full


def test_what_groups_have_saved_goes_on_with_other_groups(tmp_path):
    (state, full), *others = on_ranks(4, grouped, str(tmp_path), range(2), 2, False)
    for its, its_full in others:
        assert all(torch.equal(its[name], values) for name, values in state.items())
        assert all(torch.equal(its_full[i]["exp_avg"], one["exp_avg"]) for i, one in full.items())
    for its, *_ in on_ranks(2, loaded, f"{tmp_path}/saved"):
        assert all(torch.equal(its[name], values) for name, values in state.items())
    for world, group in ((2, None), (4, 2)):
        for its, _ in on_ranks(world, grouped, str(tmp_path), range(0), group, "reshard"):
            assert all(torch.equal(its[name], values) for name, values in state.items())


def dropped(rank, streams, keeps_gradients):
    model = offloaded(gpt()) if streams else gpt()
    optimizer = adamw(model, group=dist.group.WORLD)
    loss_of_tokens(model, tokens_of(rank)).backward()
    optimizer.step()
    if not keeps_gradients:
        optimizer.zero_grad()
    known = [weakref.ref(optimizer), weakref.ref(optimizer.engines()[0])]
    del optimizer
    gc.collect()
    assert known[0]() is None
    del model  # whose parameters the engine has
    gc.collect()
    return [one() for one in known]


@pytest.mark.parametrize(
    ("streams", "keeps_gradients"),
    [(True, True), pytest.param(False, True, marks=long), pytest.param(True, False, marks=long)],
)
def test_an_optimizer_that_was_dropped_is_freed(streams, keeps_gradients):
    assert on_ranks(2, dropped, streams, keeps_gradients) == [[None, None]] * 2


def refused_groups(rank):
    model = offloaded(gpt())
    for group in (1, 2, 6):
        with pytest.raises(ziggurat.torch.InvalidArgument, match=f"shard_group={group} does not divide the 3 ranks"):
            ziggurat.torch.AdamW(model.parameters(), lr=1e-2, shard_group=group)
    with pytest.raises(ziggurat.torch.InvalidArgument, match="hpz=2 does not divide the 3 ranks"):
        ziggurat.torch.AdamW(model.parameters(), lr=1e-2, hpz=2)
    alone = [dist.new_group([member]) for member in range(3)][rank]
    for given in ({}, {"group": alone}):
        model = torch.nn.Linear(8, 8)
        optimizer = adamw(model, shard_group=3, **given)
        with pytest.raises(ziggurat.torch.InvalidArgument, match="shard_group=3: this optimizer has no other ranks"):
            optimizer.open()


def test_groups_that_do_not_divide_the_ranks_are_refused():
    on_ranks(3, refused_groups)


def beside_ddp(rank, autocast):
    found = []
    for streams in (False, True):
        model = gpt()
        if streams:
            model = offloaded(model)
            optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(50):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of_tokens(model, tokens_of(2 * step + rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if streams:
            optimizer.close()
        found.append(losses)
    return found


# The order of operations in torch.optim's AdamW and of the ranks' sums is another. In bf16 both compute under autocast: a
# model that is bf16 itself is rounded at each of its steps, which ours, with fp32 masters, is not (0.029 apart by then).
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-4), (True, 2e-2)])
def test_losses_are_those_of_ddp(autocast, tolerance):
    for theirs, ours in on_ranks(2, beside_ddp, autocast):
        assert max(abs(a - b) / a for a, b in zip(theirs, ours, strict=True)) < tolerance


def alone(rank, what):
    """Rank 0 uses the model between two steps while the others wait at the next one, or sleep."""
    model = offloaded(llama(num_hidden_layers=BLOCKS) if what != "state_dict" else gpt2(n_layer=BLOCKS))
    optimizer = adamw(model)
    texts = batches(4)
    found = []
    for step in range(2):
        loss_of(model.train(), texts[2 * step + rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == step:  # the other one is at its next backward's exchange
            found.append(use(model, what, texts[0]))
    if rank == 1:
        time.sleep(1)
    optimizer.close()
    whole = use(model, what, texts[0])
    return found, whole


def use(model, what, text):
    with torch.no_grad():
        if what == "evaluate":
            return loss_of(model.eval(), text)
        if what == "generate":
            return model.eval().generate(text[:1, :8], max_new_tokens=6, do_sample=False)
        return {name: values.clone() for name, values in model.state_dict().items()}


@pytest.mark.parametrize("what", ["evaluate", "generate", "state_dict"])
def test_a_rank_alone_is_served(what):
    (first, _), (second, whole) = on_ranks(2, alone, what)
    assert len(first) == len(second) == 1
    if what == "state_dict":
        assert all(torch.equal(second[0][name], values) for name, values in whole.items())
    else:
        assert torch.equal(second[0], whole)


def uneven(rank):
    model = offloaded(gpt())
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        loss_of_tokens(model, tokens_of(2 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for text in range((rank + step) % 3):
                found.append((step, text, loss_of_tokens(model, tokens_of(text)).item()))
        model.train()
    optimizer.close()
    return found


def test_ranks_evaluate_different_numbers_of_batches():
    every = on_ranks(3, uneven)
    known = {}
    for step, text, loss in itertools.chain(*every):
        assert known.setdefault((step, text), loss) == loss
    assert len(known) > 3


class Router(torch.nn.Module):
    """Calls the expert that it is told."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.gate = torch.nn.Linear(64, 4)

    def forward(self, x, expert):
        return x + self.experts[expert](x) * self.gate(x)[..., expert : expert + 1]


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Router() for _ in range(4))

    def forward(self, x, expert):
        for block in self.blocks:
            x = block(x, expert)
        return x


def routed(rank, streams):
    torch.manual_seed(1)
    model = Mixture()
    if streams:
        model = ziggurat.torch.offload(model, memory="1MiB")
    optimizer = adamw(model, group=dist.group.WORLD)
    found = []
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        # One that this rank alone hits, or both, or one after the other; the last is never hit.
        loss = model(x, [rank, 2, (step + rank) % 2, 2][step]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item().hex())
    steps = {i: its["step"] for i, its in optimizer.state_dict()["state"].items()}
    found += [str(steps), *({name: v.clone() for name, v in model.state_dict().items()}.values())]
    optimizer.close()
    return found


def test_an_expert_may_be_hit_by_one_rank_alone():
    for whole, slices in zip(on_ranks(2, routed, False), on_ranks(2, routed, True), strict=True):
        assert all(a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(whole, slices, strict=True))


def checkpointed(rank, kind, streams):
    model = gpt(checkpointing=kind)
    if streams:
        model = offloaded(model)
    optimizer = adamw(model, group=dist.group.WORLD)
    losses = []
    for step in range(3):
        with optimizer.no_sync():
            loss_of_tokens(model, tokens_of(4 * step + rank)).backward()
        loss = loss_of_tokens(model, tokens_of(4 * step + 2 + rank))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    optimizer.close()
    return losses


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_checkpointing_and_accumulation(kind):
    assert on_ranks(2, checkpointed, kind, True) == on_ranks(2, checkpointed, kind, False)


def frozen_base(rank, streams, folder):
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(("blocks.1", "blocks.3")))
    if streams:
        model = offloaded(model, "nvme")
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(
        trained, lr=1e-2, model=model, placement=f"nvme:{folder}/{streams}", group=dist.group.WORLD
    )
    losses = []
    for step in range(3):
        loss = loss_of_tokens(model, tokens_of(2 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    state = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer.close()
    return losses, state


def test_a_frozen_base_is_divided_too(tmp_path):
    for whole, slices in zip(
        on_ranks(2, frozen_base, False, str(tmp_path)), on_ranks(2, frozen_base, True, str(tmp_path)), strict=True
    ):
        assert whole[0] == slices[0]
        assert all(torch.equal(slices[1][name], values) for name, values in whole[1].items())


def written(rank):
    """All ranks write the same, in three ways, and one reads before the others have written."""
    model = offloaded(gpt())
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    loss_of_tokens(model, tokens_of(rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = []
    torch.manual_seed(9)
    new = {name: torch.randn_like(values) for name, values in gpt().state_dict().items()}
    new["head.weight"] = new["embedding.weight"]
    if rank == 0:
        time.sleep(0.5)
    model.load_state_dict(new)
    found.append({name: values.clone() for name, values in model.state_dict().items()})
    params = [model.blocks[0].mlp[0].weight, model.norm.bias]
    if rank == 1:
        time.sleep(0.5)
    with ziggurat.torch.gathered(params), torch.no_grad():
        for param in params:
            param.mul_(2)
    found.append({name: values.clone() for name, values in model.state_dict().items()})
    loss_of_tokens(model, tokens_of(rank)).backward()
    optimizer.step()
    found.append({name: values.clone() for name, values in model.state_dict().items()})
    optimizer.close()
    return new, found


def test_what_all_ranks_write():
    every = on_ranks(2, written)
    for new, (loaded, doubled, _) in every:
        assert all(torch.equal(loaded[name], values) for name, values in new.items())
        for name, values in loaded.items():
            is_doubled = name in ("blocks.0.mlp.0.weight", "norm.bias")
            assert torch.equal(doubled[name], 2 * values if is_doubled else values)
    assert all(torch.equal(every[0][1][2][name], values) for name, values in every[1][1][2].items())


def saved(rank, folder, steps):
    model = offloaded(gpt())
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model)
    for step in range(steps):
        loss_of_tokens(model, tokens_of(2 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ziggurat.torch.save_checkpoint(folder, optimizer, model)
    optimizer.close()
    return {name: values.clone() for name, values in model.state_dict().items()}


def loaded(rank, folder):
    model = gpt()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model = offloaded(model)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model)
    ziggurat.torch.load_checkpoint(folder, optimizer, model)
    state = {name: values.clone() for name, values in model.state_dict().items()}
    loss = loss_of_tokens(model, tokens_of(7))
    loss.backward()
    optimizer.step()
    after = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer.close()
    return state, loss.item(), after


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_by_three(tmp_path):
    folder = str(tmp_path / "saved")
    state = on_ranks(2, saved, folder, 2)[0]
    for world in (1, 3):
        for its, _, after in on_ranks(world, loaded, folder):
            assert all(torch.equal(its[name], values) for name, values in state.items())
            assert not any(torch.equal(after[name], values) for name, values in state.items())


def resumed(rank, folder, steps, how):
    model = offloaded(gpt(), "nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model, placement=f"nvme:{folder}")
    optimizer.open(resume=how)
    losses = []
    for step in steps:
        loss = loss_of_tokens(model, tokens_of(2 * step))  # the same on all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses


def test_a_store_is_resumed_and_divided_anew(tmp_path):
    whole = on_ranks(2, resumed, f"{tmp_path}/whole", range(4), False)
    on_ranks(2, resumed, f"{tmp_path}/parts", range(2), False)
    assert on_ranks(2, resumed, f"{tmp_path}/parts", range(2, 4), True)[0] == whole[0][2:]
    # the mean of equal gradients is the same, but for the rounding of a sum of three
    for world in (3, 1):
        on_ranks(2, resumed, f"{tmp_path}/{world}", range(2), False)
        losses = on_ranks(world, resumed, f"{tmp_path}/{world}", range(2, 4), "reshard")[0]
        assert losses == pytest.approx(whole[0][2:], rel=1e-4)


MIB = 1 << 20


def size_of_process(name):
    return int(re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) << 10


def measured(rank, world):
    """Returns what a rank takes at most, and what plan() says: before offload() and after."""
    torch.nn.Linear(8, 8)(torch.zeros(1, 8)).sum().backward()  # PyTorch's own
    before = size_of_process("VmRSS")
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(24)]
    model = torch.nn.Sequential(*layers).bfloat16()
    asked = {"tokens": 4, "memory": "16MiB"}
    planned = ziggurat.torch.plan(model, **asked, ranks=world)
    model = ziggurat.torch.offload(model, memory="16MiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        if step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the most
        model(torch.ones(4, 1024, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = size_of_process("VmHWM") - before
    known = ziggurat.torch.plan(model, tokens=4)
    optimizer.close()
    rows = planned.in_host_memory
    assert rows == known.in_host_memory
    return took, sum(rows.values()), rows["parameters"] + rows["optimizer state"]


def test_a_rank_takes_what_is_planned():
    """What PyTorch loads with the first exchange and step is in none of the plans."""
    _, _, alone = on_ranks(1, measured, 1)[0]
    for took, planned, own in on_ranks(2, measured, 2):
        assert planned / 2 < took < planned + 48 * MIB
        assert own == pytest.approx(alone / 2, rel=0.02)  # whole tiles


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.pieces = torch.cat(batches(12))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def in_trainer(rank, folder, streams):
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/{streams}",
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=5e-3,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=True,  # Accelerate has wrapped forward in autocast
    )
    model = offloaded(gpt2()) if streams else gpt2()
    made = ziggurat.hf.optimizer(arguments, placement="host", threads=1)
    trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), optimizer_cls_and_kwargs=made)
    trainer.train()
    assert (trainer.model_wrapped is model) == streams
    ours = trainer.optimizer
    while hasattr(ours, "optimizer"):
        ours = ours.optimizer
    ours.close()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_trainer_and_accelerate_do_not_wrap_it(tmp_path):
    whole = on_ranks(2, in_trainer, str(tmp_path), False)
    assert on_ranks(2, in_trainer, str(tmp_path), True) == whole


def wrapped(rank):
    model = torch.nn.parallel.DistributedDataParallel(offloaded(gpt()))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ziggurat.torch.InvalidArgument, match="DistributedDataParallel was given an offloaded model"):
        loss_of_tokens(model, tokens_of(rank)).backward()
    optimizer.close()


def test_ddp_around_it_is_refused():
    on_ranks(2, wrapped)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
