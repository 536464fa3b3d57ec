# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch's optimizers beside torch.optim's, and beside themselves on other tiers.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    from small_models import small_model
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        tokens = torch.randint(61, (16, 9))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    as_integers = {2: torch.int16, 4: torch.int32}
    return [p.detach().view(as_integers[p.element_size()]).clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_placement_or_threads(dtype, tmp_path):
    results = []
    for placement, threads in [("host", 1), ("host", 2), (f"nvme:{tmp_path}/state", 2)]:
        model = small_model(dtype)
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=1e-3, placement=placement, threads=threads
        )
        train(model, optimizer, 10)
        optimizer.close()
        results.append(bits(model))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert not same(results[0], bits(small_model(dtype)))


class PlainLion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2, in PyTorch's words."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * momentum.lerp(param.grad, 1 - beta1).sign())
                momentum.lerp_(param.grad, 1 - beta2)


FAMILY = [
    ("AdamW", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    ("Adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "dampening": 0.5}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.8, "nesterov": True, "maximize": True}),
    ("AdamW", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("Adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (
        "Adagrad",
        torch.optim.Adagrad,
        {"lr": 1e-2, "initial_accumulator_value": 0.1, "maximize": True, "weight_decay": 0.01},
    ),
    ("Lion", PlainLion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
]


def step_alike(models, optimizers, steps: int) -> None:
    """Both have the same gradients in every step, whatever their parameters have come to."""
    for step in range(steps):
        torch.manual_seed(step)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def assert_same_within_rounding(ours, theirs, steps: int) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=4e-7 * steps, atol=4e-8 * steps)


# The same formulas in another order of operations: each step rounds differently in the last bit or
# two (fp32 has 24) of the parameter and of the update, whose size is about lr; momentum makes up to
# ten of it.
@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize(("name", "torchs", "arguments"), FAMILY)
def test_steps_are_torchs_within_rounding(name, torchs, arguments, steps):
    ours, theirs = small_model(), small_model()
    optimizer = getattr(ziggurat.torch, name)(ours.parameters(), **arguments)
    expected = torchs(theirs.parameters(), **arguments)
    step_alike((ours, theirs), (optimizer, expected), steps)
    assert_same_within_rounding(ours, theirs, steps)


GROUPS = [
    ("SGD", {"nesterov": True}, {"momentum": 0.5, "dampening": 0.2, "nesterov": False}),
    ("SGD", {"dampening": 0.4, "maximize": True}, {"weight_decay": 0.1, "maximize": False}),
    ("Adagrad", {"initial_accumulator_value": 0.2}, {"maximize": True, "lr_decay": 0.1}),
    ("AdamW", {"maximize": True}, {"maximize": False, "betas": (0.7, 0.9)}),
]


@pytest.mark.parametrize(("name", "arguments", "of_vectors"), GROUPS)
def test_groups_have_their_own_of_what_torchs_have(name, arguments, of_vectors):
    def made(model, module):
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() <= 1], **of_vectors},
        ]
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(module, name)(groups, lr=1e-2, **momentum, **arguments)

    ours, theirs = small_model(), small_model()
    optimizers = made(ours, ziggurat.torch), made(theirs, torch.optim)
    step_alike((ours, theirs), optimizers, 5)
    for optimizer in optimizers:  # from now on: read at every step
        for group in optimizer.param_groups:
            group["maximize"] = not group["maximize"]
            group["dampening"] = 0.1 if name == "SGD" and not group["nesterov"] else 0
    step_alike((ours, theirs), optimizers, 5)
    assert_same_within_rounding(ours, theirs, 10)


@pytest.mark.parametrize("state_format", ["fp32", "bf16-moments", "8bit", "split", "bf16"])
def test_adagrads_sum_begins_where_it_is_told_in_every_format(state_format):
    ours, theirs = small_model(torch.bfloat16), small_model(torch.bfloat16)
    arguments = {"lr": 1e-2, "initial_accumulator_value": 0.5}
    optimizer = ziggurat.torch.Adagrad(ours.parameters(), state_format=state_format, **arguments)
    expected = torch.optim.Adagrad(theirs.parameters(), **arguments)
    step_alike((ours, theirs), (optimizer, expected), 1)
    # Theirs rounds parameters of bf16, sums and updates of at most 0.01 to 2^-8, each once; ours
    # the parameter. Sums that began at zero would make nearly every update 0.01.
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)


def test_training_follows_torchs():
    ours, theirs = small_model(), small_model()
    losses = train(ours, ziggurat.torch.AdamW(ours.parameters(), lr=1e-3), 50)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), 50)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_groups_are_read_at_every_step():
    def groups(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)},
        ]

    ours, theirs = small_model(), small_model()
    for model, kind in [(ours, ziggurat.torch.AdamW), (theirs, torch.optim.AdamW)]:
        optimizer = kind(groups(model), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        for _ in range(10):
            train(model, optimizer, 1)
            schedule.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_written_parameter_is_not_used_by_a_graph_that_is_older():
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    tokens = torch.randint(61, (4, 8))
    loss = model(tokens).sum()
    model(tokens).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closure_is_called_with_gradients_enabled():
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    tokens = torch.randint(61, (4, 8))

    def closure():
        loss = model(tokens).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def test_every_step_on_nvme_is_durable(tmp_path):
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    train(model, optimizer, 3)
    optimizer.engine.make_durable()
    assert optimizer.engine.durable_generation == optimizer.engine.generation == 3


def test_a_store_that_is_there_is_refused(tmp_path):
    model = small_model()
    first = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    train(model, first, 1)
    first.close()
    second = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    with pytest.raises(ziggurat.InvalidArgument, match="there is a store already"):
        train(model, second, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placement": "disk"}, 'placement="disk"'),
        ({"placement": "nvme:"}, "with a directory"),
        ({"state_format": "float4"}, "state_format"),
        ({"host_memory": "a lot"}, "host_memory"),
        ({"lr": float("nan")}, "lr=nan: give 0 or more"),
        ({"lr": -1e-3}, "lr=-0.001: give 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"betas": (0.9, 1.0)}, "betas in"),
    ],
)
def test_what_makes_no_step_is_named(arguments, words):
    model = small_model()
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        train(model, ziggurat.torch.AdamW(model.parameters(), **arguments), 1)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_what_torchs_have_and_ours_do_not_is_refused(name):
    with pytest.raises(ziggurat.Unimplemented, match="amsgrad is not supported yet"):
        getattr(ziggurat.torch, name)(small_model().parameters(), amsgrad=True)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("SGD", {"nesterov": True}, "requires a momentum and zero dampening"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "and zero dampening"),
        ("SGD", {"momentum": -0.1}, "momentum=-0.1"),
        ("SGD", {"lr": -1.0}, "lr=-1.0"),
        ("Adagrad", {"initial_accumulator_value": -0.1}, "initial_accumulator_value=-0.1"),
        ("Adagrad", {"lr_decay": -0.1}, "lr_decay=-0.1"),
    ],
)
def test_what_torchs_refuse_ours_refuse(name, arguments, words):
    with pytest.raises(ValueError, match="."):
        getattr(torch.optim, name)(small_model().parameters(), **arguments)
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        getattr(ziggurat.torch, name)(small_model().parameters(), **arguments)


@pytest.mark.parametrize(
    "change", [{"lr": float("inf")}, {"dampening": float("nan")}, {"momentum": 1.5}]
)
def test_a_group_that_makes_no_step_is_refused_at_the_step(change):
    ours, theirs = small_model(), small_model()
    optimizer = ziggurat.torch.SGD(ours.parameters(), lr=1e-2, momentum=0.9)
    expected = torch.optim.SGD(theirs.parameters(), lr=1e-2, momentum=0.9)
    step_alike((ours, theirs), (optimizer, expected), 1)
    before = dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(change)
    with pytest.raises(ziggurat.InvalidArgument, match="generation 1 is still current"):
        optimizer.step()
    optimizer.param_groups[0].update(before)
    step_alike((ours, theirs), (optimizer, expected), 2)
    assert_same_within_rounding(ours, theirs, 3)


def test_flags_of_speed_are_taken_with_a_warning_and_others_are_not():
    with pytest.warns(UserWarning, match="fused=True has no effect"):
        ziggurat.torch.AdamW(small_model().parameters(), fused=True, foreach=False)
    with pytest.raises(TypeError, match="no argument 'placment'"):
        ziggurat.torch.AdamW(small_model().parameters(), placment="host")


def test_a_parameter_without_a_gradient_is_left_alone_as_pytorch_does(tmp_path):
    """No decay, no moment, no count of steps."""
    for placement in ("host", f"nvme:{tmp_path}/state"):
        ours, theirs = small_model(), small_model()
        optimizer = ziggurat.torch.AdamW(ours.parameters(), weight_decay=0.1, placement=placement)
        expected = torch.optim.AdamW(theirs.parameters(), weight_decay=0.1)
        for step in range(6):
            for model, its in ((ours, optimizer), (theirs, expected)):
                for index, param in enumerate(model.parameters()):
                    # The first has one in every second step, the second never.
                    absent = index == 1 or (index == 0 and step % 2 == 0)
                    param.grad = None if absent else torch.full_like(param, 0.1 * (step + 1))
                its.step()
        assert_same_within_rounding(ours, theirs, 6)
        first, second = list(ours.parameters())[:2]
        assert torch.equal(second, list(theirs.parameters())[1])
        assert optimizer.engine.steps_of(0) == 3
        assert optimizer.engine.steps_of(1) == 0
        assert not torch.equal(first, list(small_model().parameters())[0])


def test_types_may_differ_from_parameter_to_parameter(tmp_path):
    results = []
    for placement in ("host", f"nvme:{tmp_path}/state"):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(70, 5).to(dtype)) for dtype in
                  (torch.float32, torch.bfloat16, torch.float16)]
        optimizer = ziggurat.torch.AdamW(params, lr=1e-2, placement=placement)
        masters = [torch.nn.Parameter(param.detach().float()) for param in params]
        expected = torch.optim.AdamW(masters, lr=1e-2)
        for step in range(3):
            for param, master in zip(params, masters, strict=True):
                param.grad = torch.full_like(param, 0.25 * (step + 1))
                master.grad = param.grad.float()
            optimizer.step()
            expected.step()
        optimizer.close()
        for param, master in zip(params, masters, strict=True):
            # fp32 masters on both sides: the parameter is theirs, rounded once.
            assert torch.allclose(param.float(), master, rtol=2**-8, atol=1e-7)
        results.append([param.detach().clone() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_parameter_that_was_written_between_steps_goes_on_from_what_was_written(tmp_path):
    for placement in ("host", f"nvme:{tmp_path}/state"):
        ours, theirs = small_model(), small_model()
        optimizer = ziggurat.torch.AdamW(ours.parameters(), lr=1e-2, placement=placement)
        expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        step_alike((ours, theirs), (optimizer, expected), 1)
        for model in (ours, theirs):
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)  # in place
            model[2].weight.data = torch.ones_like(model[2].weight)  # elsewhere
        for step in (2, 3):
            step_alike((ours, theirs), (optimizer, expected), step)
        assert_same_within_rounding(ours, theirs, 3)


def test_masters_are_taken_at_the_first_step_and_not_before():
    ours, theirs = small_model(), small_model()
    optimizer = ziggurat.torch.AdamW(ours.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    loaded = {name: torch.full_like(value, 0.5) for name, value in ours.state_dict().items()}
    for model in (ours, theirs):
        model.load_state_dict(loaded)
    step_alike((ours, theirs), (optimizer, expected), 1)
    assert_same_within_rounding(ours, theirs, 1)


def test_a_layer_that_takes_its_shape_from_the_first_batch_is_trained():
    ends = []
    for library in (ziggurat.torch, torch.optim):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 2))
        optimizer = library.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)
            for _ in range(2):
                model(torch.randn(3, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(list(model.parameters()))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_step_without_gradients_is_none():
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    optimizer.step()
    assert optimizer.engine.generation == 0


def test_a_group_that_is_added_after_the_first_step_has_a_store_of_its_own(tmp_path):
    def trained(optim, **arguments):
        model = small_model()
        head = torch.nn.Parameter(torch.linspace(-1, 1, 61))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, **arguments)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [head], "lr": 0.1})
            torch.manual_seed(step)
            (model(torch.randint(61, (16, 8))) * head).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, head

    ours, head = trained(ziggurat.torch, placement=f"nvme:{tmp_path}/state")
    theirs, their_head = trained(torch.optim)
    assert (tmp_path / "state" / "added-1").is_dir()
    # Four steps through a whole model: differences of rounding are squared into the loss.
    assert torch.allclose(head, their_head, rtol=1e-4, atol=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_forward_waits_for_the_modules_that_it_reaches(tmp_path):
    """With model=, step() returns before the parameters are there, and no use of one is early."""
    results = []
    for waits in (False, True):
        model = small_model()
        optimizer = ziggurat.torch.AdamW(
            model.parameters(),
            lr=1e-2,
            placement=f"nvme:{tmp_path}/{waits}",
            model=model if waits else None,
        )
        train(model, optimizer, 3)
        pending = any(opened.pending for opened in optimizer._opened)
        assert pending == waits
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert not any(opened.pending for opened in optimizer._opened) or not waits
        results.append(state)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_use_that_nobody_waited_for_is_an_error(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), placement=f"nvme:{tmp_path}/state", model=model
    )

    def step(use):
        use(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model)
    with pytest.raises(ziggurat.ZigguratError, match="did not wait for the parameter's new value"):
        step(lambda x: torch.nn.functional.linear(model[0](x), model[1].weight))


def test_figures_are_of_what_was_done_since_they_were_asked_for(tmp_path):
    model = small_model()
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), placement=f"nvme:{tmp_path}/state", host_memory="8MiB"
    )
    assert optimizer.figures() == {}
    train(model, optimizer, 2)
    optimizer.engine.make_durable()
    first = optimizer.figures()
    assert first["generation"] == first["durable_generation"] == 2
    train(model, optimizer, 1)
    optimizer.engine.make_durable()
    second = optimizer.figures()
    assert second["generation"] == 3
    assert 2 * second["state_write_bytes"] == first["state_write_bytes"] > 0
    assert 0 < second["optimizer_cpu_s"] < 10
    assert 0 < second["host_used_bytes"] <= second["host_budget_bytes"]
    nothing = optimizer.figures()
    assert nothing["state_write_bytes"] == 0


def test_an_engine_that_does_not_open_is_no_obstacle_to_the_next(tmp_path):
    model = small_model()
    with pytest.raises(ziggurat.InvalidArgument):
        train(model, ziggurat.torch.AdamW(model.parameters(), state_format="float4"), 1)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
