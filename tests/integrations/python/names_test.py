# SPDX-License-Identifier: Apache-2.0
"""Whose state is whose: names under torch.compile and wrappers, in another order, and made up.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import contextlib
import sys
import warnings

try:
    import pytest
    import torch
    from small_models import one_thread, small_model  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._pytorch.names import Named, matched, names_alone, names_in


class Blocks(torch.nn.Module):
    """Two layers of one shape, an embedding, and a head that is tied to it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.emb = torch.nn.Embedding(17, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.head = torch.nn.Linear(8, 17, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        hidden = self.emb(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


class Sized(Blocks):
    """A module that counts for nothing."""

    def __len__(self):
        return 0


class Own(torch.nn.Module):
    """A wrapper that is not PyTorch's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        return self.module(tokens)


def compiled_blocks(model):
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    return model


def whole(model):
    return torch.compile(model, backend="eager")


def plain(model):
    return model


def parallel(model):
    return torch.nn.DataParallel(model)


WRAPS = [plain, whole, compiled_blocks, parallel]


def run(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        tokens = torch.randint(17, (4, 5))
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def reference(steps):
    model = Blocks()
    with adamw(model.parameters()) as optimizer:
        run(model, optimizer, steps)
    return values(model)


@contextlib.contextmanager
def adamw(params, **settings):
    optimizer = ziggurat.torch.AdamW(params, lr=1e-2, **settings)
    yield optimizer
    optimizer.close()


@pytest.mark.parametrize("wrap", [whole, Sized], ids=["compiled", "of length 0"])
def test_any_module_is_a_model(wrap):
    model = wrap() if wrap is Sized else wrap(Blocks())
    with adamw(model.parameters(), model=model) as optimizer:
        run(model, optimizer, 2)
        names = [name for name, _, _ in optimizer._named()]
    assert names[0] == "emb.weight" and "layers.0.weight" in names
    assert same(values(model), reference(2))


def test_what_wrappers_add_goes_wherever_it_stands():
    names = ["_orig_mod.a.weight", "b._orig_mod.weight", "c.weight"]
    assert list(names_alone(names).values()) == ["a.weight", "b.weight", "c.weight"]
    assert list(names_alone(["module.a", "module.b"]).values()) == ["a", "b"]
    assert list(names_alone(["module.a", "b"]).values()) == ["module.a", "b"]


def test_names_that_would_become_equal_stay():
    assert list(names_alone(["a.weight", "_orig_mod.a.weight"]).values()) == [
        "a.weight",
        "_orig_mod.a.weight",
    ]


def test_the_module_of_a_wrapper_of_ones_own_stays():
    outer = torch.nn.DataParallel(Own(torch.nn.Linear(2, 2)))
    names = names_in(outer, dict(outer.named_parameters()))
    assert list(names.values()) == ["module.weight", "module.bias"]


@pytest.mark.parametrize("loads", WRAPS)
@pytest.mark.parametrize("saves", WRAPS)
def test_a_checkpoint_goes_on_however_the_model_is_wrapped(saves, loads, tmp_path):
    model = saves(Blocks())
    with adamw(model.parameters(), model=model) as optimizer:
        run(model, optimizer, 3)
        path = ziggurat.torch.save_checkpoint(tmp_path, optimizer, model)
    other = loads(Blocks())
    with adamw(other.parameters(), model=other) as optimizer:
        ziggurat.torch.load_checkpoint(path, optimizer, other)
        run(other, optimizer, 2, begin=3)
    assert same(values(other), reference(5))


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


def parallel_blocks(model):
    return parallel(compiled_blocks(model))


def as_it_is_spelled(model, names):
    """What earlier versions called the parameters of DataParallel and AveragedModel."""
    return {name: name for name in names}


@pytest.mark.parametrize(
    "saves, loads",
    [
        (parallel, parallel),
        (parallel, parallel_blocks),
        (parallel_blocks, parallel),
        (averaged, averaged),
        (parallel, whole),
    ],
)
def test_a_checkpoint_that_has_a_wrappers_name_goes_on(saves, loads, tmp_path, monkeypatch):
    model = saves(Blocks())
    with monkeypatch.context() as before, adamw(model.parameters(), model=model) as optimizer:
        before.setattr("ziggurat._foreign.plan.names_in", as_it_is_spelled)
        run(model, optimizer, 3)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        path = ziggurat.torch.save_checkpoint(tmp_path, optimizer, model)
    other = loads(Blocks())
    if loads is whole:  # whose names do not say what wrapped it
        with adamw(other.parameters()) as optimizer, pytest.raises(ziggurat.InvalidArgument):
            ziggurat.torch.load_checkpoint(path, optimizer, other)
        return
    with adamw(other.parameters(), model=other) as optimizer:
        found = ziggurat.torch.load_checkpoint(path, optimizer, other)
        assert optimizer.param_groups[0]["weight_decay"] == 0.5 and not found.notes
        optimizer.param_groups[0]["weight_decay"] = optimizer.defaults["weight_decay"]
        run(other, optimizer, 2, begin=3)
    assert same(values(other), reference(5))


def test_weights_of_an_averaged_model_are_taken_over(tmp_path):
    model = averaged(Blocks())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = averaged(Blocks())
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    with adamw(other.parameters()) as optimizer:
        ziggurat.torch.load_foreign_checkpoint(
            optimizer, other, tmp_path / "weights.pt", strict=False
        )
    assert same(values(model), values(other))


def test_a_checkpoint_of_another_wrapper_is_refused_by_name(tmp_path):
    model = Own(Blocks())
    with adamw(model.parameters(), model=model) as optimizer:
        run(model, optimizer, 1)
        path = ziggurat.torch.save_checkpoint(tmp_path, optimizer, model)
    other = Blocks()
    with adamw(other.parameters()) as optimizer:
        with pytest.raises(ziggurat.InvalidArgument, match=r"unexpected: module\.emb\.weight"):
            ziggurat.torch.load_checkpoint(path, optimizer, other)


def unnamed(model):
    return {"params": model.parameters()}


def with_model(model):
    return {"params": model.parameters(), "model": model}


def named(model):
    return {"params": model.named_parameters()}


NAMED = [unnamed, with_model, named]


@pytest.mark.parametrize("then", NAMED)
@pytest.mark.parametrize("wraps", [(plain, compiled_blocks), (whole, plain), (parallel, whole)])
@pytest.mark.parametrize("first", NAMED)
def test_a_store_goes_on_whatever_its_parameters_are_called(first, wraps, then, tmp_path):
    place = f"nvme:{tmp_path}/state"
    model = wraps[0](Blocks())
    with adamw(**first(model), placement=place) as optimizer:
        optimizer.open(resume=True)
        run(model, optimizer, 3)
    other = wraps[1](Blocks())
    with adamw(**then(other), placement=place) as optimizer:
        optimizer.open(resume=True)
        run(other, optimizer, 2, begin=3)
    assert same(values(other), reference(5))


def test_a_store_goes_on_by_names_in_another_order(tmp_path):
    place = f"nvme:{tmp_path}/state"
    model = Blocks()
    with adamw(model.named_parameters(), placement=place) as optimizer:
        optimizer.open(resume=True)
        run(model, optimizer, 3)
    model = Blocks()
    backwards = list(model.named_parameters())[::-1]
    with adamw(backwards, placement=place) as optimizer:
        optimizer.open(resume=True)
        run(model, optimizer, 2, begin=3)
    assert same(values(model), reference(5))


def test_a_store_of_other_parameters_is_refused_with_what_differs(tmp_path):
    place = f"nvme:{tmp_path}/state"
    model = Blocks()
    with adamw(model.named_parameters(), placement=place) as optimizer:
        run(model, optimizer, 1)
    model = Blocks()
    model.layers.append(torch.nn.Linear(8, 8))
    with adamw(model.named_parameters(), placement=place) as optimizer:
        with pytest.raises(
            ziggurat.InvalidArgument, match=r"not in the store: layers\.2\.weight, layers\.2\.bias"
        ):
            optimizer.open(resume=True)
    model = Blocks()
    model.layers[1] = torch.nn.Linear(8, 8, bias=False)
    with adamw(model.parameters(), placement=place) as optimizer:
        with pytest.raises(ziggurat.InvalidArgument, match="has 5 parameters, but this program trains 4"):
            optimizer.open(resume=True)


def test_pairs_of_name_and_parameter_are_taken_by_every_pytorch(tmp_path, monkeypatch):
    """torch.optim takes them from 2.6 on."""
    monkeypatch.setattr("ziggurat._optimizer.optimizer._TAKES_PAIRS", False)
    place = f"nvme:{tmp_path}/state"
    model = Blocks()
    with adamw(model.named_parameters(), placement=place) as optimizer:
        run(model, optimizer, 3)
        assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "emb.weight"
    other = Blocks()
    backwards = list(other.named_parameters())[::-1]
    groups = [{"params": iter(backwards[:2])}, {"params": backwards[2:], "weight_decay": 0.01}]
    with adamw(groups, placement=place) as optimizer:
        optimizer.open(resume=True)
        run(other, optimizer, 2, begin=3)
    assert same(values(other), reference(5))
    with adamw(model.parameters()) as optimizer:
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(3))})
        assert optimizer.param_groups[1]["params"][0].shape == (3,)
    mixed = [("a", torch.nn.Parameter(torch.zeros(3))), torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ziggurat.InvalidArgument, match="some without"):
        ziggurat.torch.AdamW(mixed, lr=1e-3)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_has_no_order_and_is_refused(kind, pairs, monkeypatch):
    """PyTorch refuses it in a group alone, and by its message a list is what it takes."""
    monkeypatch.setattr("ziggurat._optimizer.optimizer._TAKES_PAIRS", pairs)
    model = Blocks()
    for given in (model.parameters(), model.named_parameters()):
        params = kind(given)
        with pytest.raises(TypeError, match="as a set, .* give a list"):
            ziggurat.torch.AdamW(params)
        with pytest.raises(TypeError, match="as a set, .* give a list"):
            ziggurat.torch.AdamW([{"params": params}])
    with adamw([model.emb.weight]) as optimizer:
        with pytest.raises(TypeError, match="as a set"):
            optimizer.add_param_group({"params": kind(model.layers.parameters())})
        assert len(optimizer.param_groups) == 1


def test_order_counts_only_where_a_side_has_made_up_names():
    stored = [Named("group0.0", (2,)), Named("group0.1", (3,))]
    assert matched("s", stored, [[Named("a", (2,)), Named("b", (3,))]]) == [0, 1]
    with pytest.raises(ziggurat.InvalidArgument, match=r"group0\.0 is \(2,\) in the store and a is \(3,\)"):
        matched("s", stored, [[Named("a", (3,)), Named("b", (2,))]])
    with pytest.raises(ziggurat.InvalidArgument, match="not in the store: a; not in the program: c"):
        matched("s", [Named("c", (2,))], [[Named("a", (2,))]])


def pair(order):
    torch.manual_seed(5)
    params = {name: torch.nn.Parameter(torch.randn(6, 4)) for name in "ab"}
    return params, [(name, params[name]) for name in order]


def step_of(params, seed):
    torch.manual_seed(seed)
    for param in params.values():
        param.grad = torch.randn(param.shape)


def test_state_is_loaded_by_name_into_another_order():
    params, ordered = pair("ab")
    with adamw(ordered) as optimizer:
        for step in range(3):
            step_of(params, step)
            optimizer.step()
        saved = optimizer.state_dict()
        moments = {name: optimizer.state_of(params[name]) for name in "ab"}
    others, backwards = pair("ba")
    with adamw(backwards) as optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved)
        for name in "ab":
            found = optimizer.state_of(others[name])
            assert all(torch.equal(found[key], moments[name][key]) for key in found)
        assert optimizer.param_groups[0]["param_names"] == ["b", "a"]


def test_groups_settings_follow_their_parameters():
    params, _ = pair("ab")
    groups = [{"params": [(name, params[name])], "lr": lr} for name, lr in [("a", 0.1), ("b", 0.2)]]
    with adamw(groups) as optimizer:
        step_of(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
    others, _ = pair("ab")
    groups = [{"params": [(name, others[name])]} for name in "ba"]
    with adamw(groups) as optimizer:
        optimizer.load_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_without_a_name_in_common_the_order_counts_and_that_is_said():
    params, ordered = pair("ab")
    with adamw(ordered) as optimizer:
        step_of(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
    others, _ = pair("ab")
    with adamw([("c", others["a"]), ("d", others["b"])]) as optimizer:
        with pytest.warns(UserWarning, match="names none of this optimizer's parameters"):
            optimizer.load_state_dict(saved)
        assert torch.equal(optimizer.state_of(others["a"])["exp_avg"], saved["state"][0]["exp_avg"])
        assert optimizer.param_groups[0]["param_names"] == ["c", "d"]


def test_some_names_in_common_are_refused():
    params, ordered = pair("ab")
    with adamw(ordered) as optimizer:
        step_of(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
    others, _ = pair("ab")
    with adamw([("a", others["a"]), ("c", others["b"])]) as optimizer:
        with pytest.raises(ziggurat.InvalidArgument, match="not in the state dict: c; not in the optimizer: b"):
            optimizer.load_state_dict(saved)


@pytest.mark.parametrize("wrap", [whole, compiled_blocks])
def test_names_under_torch_compile_are_the_same_names(wrap):
    model = Blocks()
    with adamw(model.named_parameters()) as optimizer:
        run(model, optimizer, 2)
        saved, weights = optimizer.state_dict(), model.state_dict()
    other = Blocks()
    other.load_state_dict(weights)
    other = wrap(other)
    backwards = list(other.named_parameters())[::-1]
    with adamw(backwards) as optimizer:
        optimizer.load_state_dict(saved)
        run(other, optimizer, 2, begin=2)
    assert same(values(other), reference(4))


def test_weights_of_a_compiled_model_are_taken_over(tmp_path):
    model = whole(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    other = compiled_blocks(Blocks())
    with adamw(other.parameters()) as ours:
        ziggurat.torch.load_foreign_checkpoint(ours, other, tmp_path / "c")
        assert same(values(other), values(model))


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
