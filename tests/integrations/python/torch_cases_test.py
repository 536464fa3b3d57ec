# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own cases for its optimizers (torch.testing._internal.common_optimizers), run on ours.

Run by pytest; as a script it exits with 77 where PyTorch, its cases or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    from torch.testing._internal.common_optimizers import optim_db
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch

NAMES = ("AdamW", "Adam", "Adagrad", "SGD")
NO_MEANING = ("foreach", "fused", "capturable", "differentiable")
TAKEN = ("foreach=True", "betas must be either both floats")  # what ours takes


def cases(kind: str):
    """Name and the case, of PyTorch's optimizers that we have too."""
    found = []
    for info in optim_db:
        name = info.optim_cls.__name__
        if name in NAMES:
            for case in getattr(info, f"optim_{kind}_func")(device="cpu", dtype=torch.float32):
                about = case.desc if kind == "inputs" else str(case.error_regex)
                found.append(pytest.param(name, case, id=f"{name}-{about}".replace(" ", "_")))
    return found


def arguments_of(case):
    arguments = {k: v for k, v in case.kwargs.items() if k not in NO_MEANING}
    if arguments.pop("amsgrad", False):
        pytest.skip("amsgrad is not supported")
    return arguments


def model_of() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))


def run(kind, arguments, groups=False):
    model = model_of()
    params = [{"params": [p]} for p in model.parameters()] if groups else model.parameters()
    optimizer = kind(params, **arguments)
    for step in range(6):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        if step == 4:  # as PyTorch's cases do: one is without a gradient
            next(iter(model.parameters())).grad = None
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize(("name", "case"), cases("inputs"))
@pytest.mark.parametrize("groups", [False, True])
def test_steps_are_torchs(name, case, groups):
    arguments = arguments_of(case)
    if case.params is not None:
        pytest.skip("its parameters are of the case's own")
    ours = run(getattr(ziggurat.torch, name), arguments, groups)
    theirs = run(getattr(torch.optim, name), arguments, groups)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=4e-6, atol=4e-7)


@pytest.mark.parametrize(("name", "case"), cases("error_inputs"))
def test_what_torchs_refuse_ours_refuse(name, case):
    one = case.optimizer_error_input
    if any(words in case.error_regex for words in TAKEN):
        pytest.skip("ours takes it")
    arguments = {k: v for k, v in one.kwargs.items() if k not in NO_MEANING}
    params = one.params if one.params is not None else model_of().parameters()
    if not isinstance(params, torch.Tensor):
        params = list(params)
    with pytest.raises((ValueError, TypeError)):
        optimizer = getattr(ziggurat.torch, name)(params, **arguments)
        for param in params:  # what the constructor takes, the first step refuses
            param.grad = torch.ones_like(param)
        optimizer.step()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
