# SPDX-License-Identifier: Apache-2.0
"""offload() without memory=, or with placement="auto": what the planner gives, on one rank and on several, the same bits
whatever that is, and what is said of it: the choice, and once, after the fourth step, what was planned beside it.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import re
import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import on_ranks
    from streamed_models import gpt, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._optimizer import opening
from ziggurat._streaming.streaming import streaming_around

MIB, GIB = 1 << 20, 1 << 30
UNITS, WIDTH = 8, 512  # 2.1 million elements: 4 MiB of parameters, 8 of sums of gradients, 24 of state


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x)) + x


def blocks() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block() for _ in range(UNITS))).bfloat16()


def steps(model, optimizer, count):
    losses = []
    made = torch.Generator().manual_seed(2)
    for _ in range(count):
        inputs = torch.randn(4, WIDTH, generator=made).bfloat16()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def adamw(model, placement, **more):
    return ziggurat.torch.AdamW(model.parameters(), lr=1e-3, placement=placement, threads=1, **more)


def choice_of(model):
    streaming = streaming_around(list(model.parameters()))
    return streaming.chosen


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free beside the model, in MiB."""

    def set_free(mib):
        model_bytes = 2 * UNITS * WIDTH * WIDTH
        monkeypatch.setattr(opening, "free_bytes", lambda: int(mib * MIB) - model_bytes)

    return set_free


# Three quarters of what is free are taken.
@pytest.mark.parametrize(
    ("mib", "state", "expected"),
    [
        (1024, "auto", "params=device,grads=host,optimizer=host"),
        (1024, "nvme", "params=device,grads=host,optimizer=nvme"),
        (96, "nvme", "params=device,grads=host,optimizer=nvme"),
        (48, "auto", "params=device,grads=host,optimizer=nvme"),
        (12, "nvme", "params=nvme,grads=nvme,optimizer=nvme"),
    ],
)
def test_what_is_chosen_for_so_much_free_memory(mib, state, expected, free, tmp_path):
    free(mib)
    model = ziggurat.torch.offload(blocks(), placement="auto")
    optimizer = adamw(model, f"{state}:{tmp_path}/state")
    optimizer.open()
    choice = choice_of(model)
    assert choice.placement == expected
    assert choice.takes_bytes <= 0.75 * mib * MIB
    assert optimizer.placement == ("host" if "optimizer=host" in expected else f"nvme:{tmp_path}/state")
    if choice.host_memory:
        assert optimizer.engine.figures()["host_budget_bytes"] == choice.host_memory
    optimizer.close()


def test_what_is_given_by_hand_is_kept(free, tmp_path):
    free(1024)
    model = ziggurat.torch.offload(blocks(), memory="2MiB", placement="auto")
    optimizer = adamw(model, f"nvme:{tmp_path}/one", host_memory="70MiB")
    optimizer.open()
    choice = choice_of(model)
    assert (choice.memory, choice.host_memory) == (2 * MIB, 70 * MIB)
    assert choice.placement == "params=host,grads=host,optimizer=nvme"
    optimizer.close()
    model = ziggurat.torch.offload(blocks(), placement="params=nvme,grads=nvme")
    optimizer = adamw(model, f"nvme:{tmp_path}/two")
    optimizer.open()
    assert choice_of(model).placement == "params=nvme,grads=nvme,optimizer=nvme"
    optimizer.close()


@pytest.mark.parametrize("mib", [1024, 48, 12])
def test_the_bits_are_those_of_every_choice(mib, free, tmp_path):
    plain = blocks()
    expected = steps(plain, adamw(plain, "host"), 3)
    free(mib)
    model = ziggurat.torch.offload(blocks(), placement="auto")
    optimizer = adamw(model, f"auto:{tmp_path}/state")
    assert steps(model, optimizer, 3) == expected
    optimizer.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def said(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("ziggurat: auto:")]


def test_the_choice_is_said_and_once_what_was_planned_beside_what_it_took(free, capfd, tmp_path):
    free(96)
    model = ziggurat.torch.offload(blocks(), placement="auto")
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    steps(model, optimizer, 3)
    (chosen,) = said(capfd)
    size = r"\d+\.\d+ [KMG]iB"
    assert re.fullmatch(
        rf"ziggurat: auto: params=memory for units,grads=host,optimizer=nvme in {tmp_path}/state, memory={size} for "
        rf"units, host_memory={size}: it takes at most {size} of {size} \(75 % of the 96\.0 MiB that are free\), and a step "
        r"moves .* over the drive, .*",
        chosen,
    ), chosen
    steps(model, optimizer, 5)
    (compared,) = said(capfd)
    assert re.fullmatch(
        rf"ziggurat: auto: planned were {size} of memory without activations, and {size} over the drive.* for a step; "
        rf"up to the fourth step it took {size} and {size} in \S+ s of the drive, and a step \S+ s",
        compared,
    ), compared
    optimizer.close()


def test_a_run_by_hand_says_nothing_of_auto(capfd):
    model = ziggurat.torch.offload(blocks(), memory="8MiB")
    optimizer = adamw(model, "host")
    steps(model, optimizer, 5)
    assert said(capfd) == []
    optimizer.close()


def test_too_little_memory_is_refused_with_the_least_that_works(free, tmp_path):
    free(6)
    model = ziggurat.torch.offload(blocks(), placement="auto")
    with pytest.raises(ziggurat.ResourceExhausted, match=r"the least that works is .*, and the run may take 4\.5 MiB"):
        steps(model, adamw(model, f"nvme:{tmp_path}/state"), 1)


def test_a_store_that_is_there_goes_on_whatever_is_free(free, tmp_path):
    free(12)
    model = ziggurat.torch.offload(blocks(), placement="auto")
    optimizer = adamw(model, f"auto:{tmp_path}/state")
    first = steps(model, optimizer, 2)
    optimizer.close()
    plain = blocks()
    assert first == steps(plain, adamw(plain, "host"), 2)
    free(1024)
    model = ziggurat.torch.offload(blocks(), placement="auto")
    optimizer = adamw(model, f"auto:{tmp_path}/state")
    optimizer.open(resume=True)
    assert optimizer.engine.generation == 2
    assert choice_of(model).placement == "params=device,grads=host,optimizer=nvme"
    optimizer.close()


def test_plan_tells_the_choice_before(free, tmp_path):
    free(96)
    planned = ziggurat.torch.plan(
        blocks(), tokens=4, placement="auto", optimizer_placement=f"nvme:{tmp_path}/state", free_memory="96MiB"
    )
    model = ziggurat.torch.offload(blocks(), placement="auto")
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open()
    assert planned.memory_bytes == choice_of(model).memory
    opened = ziggurat.torch.plan(model, tokens=4)
    assert (opened.in_host_memory, opened.step) == (planned.in_host_memory, planned.step)
    optimizer.close()


def test_what_an_optimizer_trains_a_part_of_has_room(free, tmp_path):
    free(192)
    torch.manual_seed(1)
    small = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(600))
    model = ziggurat.torch.offload(torch.nn.Sequential(*small), placement="auto")
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    optimizer = ziggurat.torch.AdamW(weights, lr=1e-3, placement=f"nvme:{tmp_path}/state", threads=1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert choice_of(model).placement.startswith("params=device")
    assert streaming_around(weights).tier == "device"  # what was chosen is what is done
    optimizer.close()


def test_buffers_are_counted_once(free, tmp_path):
    free(32)
    model = blocks()
    model.register_buffer("cache", torch.zeros(48 * MIB, dtype=torch.uint8))
    model = ziggurat.torch.offload(model, placement="auto")
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open()
    choice = choice_of(model)
    assert 48 * MIB < choice.takes_bytes <= 0.75 * (32 + 48) * MIB
    optimizer.close()


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_a_sparse_buffer_is_counted_with_its_indices(sparse, free, tmp_path):
    free(64)
    model = blocks()
    model.register_buffer("graph", sparse(torch.eye(4096)))
    planned = ziggurat.torch.plan(model, tokens=4, memory="8MiB", free_memory="1GiB")
    assert 8 * 4096 <= planned.in_host_memory["buffers"] <= 24 * 4096
    optimizer = adamw(ziggurat.torch.offload(model, placement="auto"), f"nvme:{tmp_path}/state")
    optimizer.open()
    optimizer.close()


class WithTable(torch.nn.Module):
    def __init__(self, mib=24):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(mib << 10, WIDTH, dtype=torch.bfloat16)  # and twice that for a gradient's sum
        self.blocks = blocks()

    def forward(self, tokens):
        return self.blocks(self.table(tokens))


def test_a_table_whose_rows_are_read_on_the_drive_takes_no_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(opening, "free_bytes", lambda: 0)  # but for what the model itself leaves
    model = ziggurat.torch.offload(WithTable(), placement="auto")
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open()
    choice = choice_of(model)
    assert choice.placement.startswith("params=nvme") and choice.takes_bytes < 24 * MIB
    model(torch.arange(64)).float().square().mean().backward()
    optimizer.step()
    optimizer.close()


def test_a_table_that_was_chosen_by_rows_is_so_where_units_have_room_for_it(free, tmp_path):
    free(32)  # in which the sum of its gradient has no room
    model = ziggurat.torch.offload(WithTable(3), memory="auto", placement="params=nvme,grads=host")
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open()
    division = streaming_around(list(model.parameters())).division
    assert choice_of(model).memory > 4 * MIB, "units have no room for the table: the case shows nothing"
    assert [unit.name for unit in division.units if unit.by_rows] == ["table"]
    optimizer.close()


def test_sizes_by_hand_need_not_be_whole_mebibytes(free, tmp_path):
    free(96)
    two_units = 2 * (2 * WIDTH * WIDTH + 4096)  # with the room between them: 1.008 MiB
    model = ziggurat.torch.offload(blocks(), memory=two_units, placement="auto")
    optimizer = adamw(model, f"nvme:{tmp_path}/state", host_memory="auto")
    optimizer.open()
    assert choice_of(model).memory == two_units
    optimizer.close()


def test_what_is_missing_is_said_in_the_words_of_the_call():
    with pytest.raises(ziggurat.InvalidArgument, match='which optimizer_placement="host" does not have'):
        ziggurat.torch.plan(blocks(), tokens=4, placement="nvme")
    model = ziggurat.torch.offload(blocks(), placement="nvme")
    with pytest.raises(ziggurat.InvalidArgument, match='which placement="host" puts into host memory'):
        adamw(model, "host").open()


def test_parameters_have_a_directory_of_their_own_where_the_state_is_in_memory(free, tmp_path):
    """As ziggurat.deepspeed gives one for "offload_param" on nvme beside "offload_optimizer" on cpu."""
    free(96)
    model = ziggurat.torch.offload(blocks(), placement="params=nvme,grads=nvme")
    streaming_around(list(model.parameters())).folder = str(tmp_path)
    optimizer = adamw(model, "host")
    optimizer.open()
    assert choice_of(model).placement == "params=nvme,grads=nvme,optimizer=host"
    plan = ziggurat.torch.plan(model, tokens=1, drive="1GB")
    assert set(plan.on_drive) == {"parameters", "gradients"}
    assert plan.step.params_read_forward == plan.step.params_written > 0
    assert plan.step.grads_written == plan.step.grads_read_update > 0
    assert plan.step.state_read == plan.step.state_written == 0
    optimizer.close()


def test_a_gpu_has_no_auto():
    with pytest.raises(ziggurat.InvalidArgument, match='"auto" is for a model that computes on the CPU'):
        ziggurat.torch.offload(blocks(), device="cuda:0")


def of_a_rank(rank, folder):
    """One rank has less memory than the others."""
    opening.free_bytes = lambda: (64 if rank == 1 else 4096) * MIB
    model = ziggurat.torch.offload(gpt(), placement="auto")
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=f"auto:{folder}/state", group=dist.group.WORLD
    )
    losses = train(model, optimizer, range(2))
    streaming = streaming_around(list(model.parameters()))
    found = (losses, streaming.memory_bytes, tuple(streaming.homes), optimizer.placement)
    optimizer.close()
    return found


def test_ranks_choose_the_same_by_the_one_that_has_least(tmp_path):
    first, *others = on_ranks(3, of_a_rank, str(tmp_path))
    assert all(other[1:] == first[1:] for other in others)


def free_of_a_rank(rank, folder):
    opening.free_bytes = lambda: 1024 * MIB
    model = blocks()
    model.register_buffer("cache", torch.zeros(60 * MIB, dtype=torch.uint8))
    model = ziggurat.torch.offload(model, placement="auto")
    optimizer = adamw(model, f"nvme:{folder}/state", group=dist.group.WORLD)
    optimizer.open()
    why = choice_of(model).why
    optimizer.close()
    return why


def test_what_every_rank_has_already_is_free_to_each(tmp_path):
    for why in on_ranks(2, free_of_a_rank, str(tmp_path)):
        assert f"75 % of the {(1024 + 2 * 64) / 1024:.2f} GiB that are free, of 2 ranks together" in why


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
