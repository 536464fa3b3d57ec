# SPDX-License-Identifier: Apache-2.0
"""What training loops do with an optimizer, with gradients that are the same on every device.

A weight's gradient is a drawn tensor times 1, so no order of sums decides its bits. Each case
returns the values of all parameters that it saw, in forward and after steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import ziggurat.torch
from torch import nn

SHAPES = {
    "one": ((130, 61), torch.float32),
    "two": ((48,), torch.bfloat16),
    "three": ((), torch.float32),
    "four": ((33, 9), torch.bfloat16),
    "five": ((7, 3), torch.float16),
}


class Layer(nn.Module):
    def __init__(self, lab: Lab, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        self._lab = lab

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._lab.seen.append(self.weight.detach().clone())
        return (self.weight * gradient).float().sum()


class Model(nn.Module):
    def __init__(self, lab: Lab):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleDict({n: Layer(lab, *kind, draw) for n, kind in SHAPES.items()})
        self._lab = lab

    def forward(self, number: int, without: tuple[str, ...] = ()) -> torch.Tensor:
        """The loss whose gradients are those of `number`."""
        loss = torch.zeros((), device=self._lab.device)
        for name, layer in self.layers.items():
            gradient = self._lab.gradient(number, name)
            if name not in without:
                loss = loss + layer(gradient)
        return loss


@dataclass
class Lab:
    device: str
    folder: Path
    waits: bool = False
    placement: str = "host"
    seen: list[torch.Tensor] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)

    def gradient(self, number: int, name: str) -> torch.Tensor:
        shape, dtype = SHAPES[name]
        draw = torch.Generator().manual_seed(1000 * number + list(SHAPES).index(name))
        return torch.randn(shape, generator=draw).to(dtype).to(self.device)

    def model(self) -> Model:
        return Model(self).to(self.device)

    def optimizer(self, model: nn.Module, params: Any = None, **more: Any) -> Any:
        store = f"nvme:{self.folder}/{len(self.optimizers)}"
        where = {"placement": "host" if self.placement == "host" else store} | more
        waits = model if self.waits else None
        params = model.parameters() if params is None else params
        made = ziggurat.torch.AdamW(params, lr=1e-2, threads=1, model=waits, **where)
        self.optimizers.append(made)
        return made

    def look(self, model: nn.Module) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()
        self.seen += [param.detach().clone() for param in model.parameters()]


def train(model: Any, optimizer: Any, numbers: Any, **forward: Any) -> None:
    for number in numbers:
        model(number, **forward).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(lab: Lab) -> None:
    model = lab.model()
    train(model, lab.optimizer(model), range(4))
    lab.look(model)


def clipping(lab: Lab) -> None:
    """Gradients whose norms are powers of two: no order of additions changes a bit."""
    model = lab.model()
    optimizer = lab.optimizer(model)
    for number in range(4):
        loss = torch.zeros((), device=lab.device)
        for name, layer in model.layers.items():
            signs = lab.gradient(number, name).sign()
            quarter = 1
            while 4 * quarter <= signs.numel():
                quarter *= 4
            signs.view(-1)[quarter:] = 0
            loss = loss + layer(signs)
        loss.backward()
        lab.seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    lab.look(model)


def accumulation(lab: Lab) -> None:
    """Over as many backwards as the step before had, more, and fewer."""
    model = lab.model()
    optimizer, number = lab.optimizer(model), 0
    for backwards in (1, 1, 3, 3, 3, 1, 2, 1):
        for _ in range(backwards):
            model(number).backward()
            number += 1
        optimizer.step()
        optimizer.zero_grad()
    lab.look(model)


def without_zero_grad(lab: Lab) -> None:
    model = lab.model()
    optimizer = lab.optimizer(model)
    for number in range(4):
        model(number).backward()
        optimizer.step()
    lab.look(model)


def scaling(lab: Lab) -> None:
    """One step is skipped, since its gradients are infinite."""
    model = lab.model()
    model.layers["five"].float()  # GradScaler takes no fp16
    optimizer = lab.optimizer(model)
    scaler = torch.amp.GradScaler(lab.device, init_scale=2.0**10, growth_interval=2)
    for number in range(6):
        scaler.scale(model(number) * (float("inf") if number == 3 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    lab.look(model)


def skipped(lab: Lab) -> None:
    """A batch whose gradients no step takes."""
    model = lab.model()
    optimizer = lab.optimizer(model)
    for number in range(6):
        model(number).backward()
        if number % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
    lab.look(model)


def without_gradient(lab: Lab) -> None:
    model = lab.model()
    optimizer = lab.optimizer(model)
    train(model, optimizer, range(2), without=("one", "four"))
    train(model, optimizer, range(2, 4), without=("two",))
    train(model, optimizer, range(4, 6))
    lab.look(model)


def zero_gradients(lab: Lab) -> None:
    """Steps one behind another, with nothing computed between: weights decay, moments fade."""
    model = lab.model()
    optimizer = lab.optimizer(model)
    train(model, optimizer, range(2))
    model(2).backward()
    optimizer.zero_grad(set_to_none=False)
    other = torch.ones(SHAPES["two"][0], dtype=SHAPES["two"][1], device=lab.device)
    for _ in range(4):
        optimizer.step()
    optimizer.synchronize()
    model.layers["two"].weight.data = other
    for _ in range(2):
        optimizer.step()
    lab.look(model)


def gradients_written_after_backward(lab: Lab) -> None:
    """Backward may have begun to copy them."""
    model = lab.model()
    optimizer = lab.optimizer(model)
    writes: list[Callable[[torch.Tensor], Any]] = [
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.clamp_(-0.5, 0.5),
        lambda grad: grad.add_(1.0),
        lambda grad: torch.ops.ziggurat_test.untold(grad),
        lambda grad: grad.zero_(),
    ]
    for number, write in enumerate(writes * 2):
        model(number).backward()
        for param in model.parameters():
            write(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    lab.look(model)


def gradients_given(lab: Lab) -> None:
    """By hand, in place of those of backward, in another order of memory; and those put back."""
    model = lab.model()
    optimizer = lab.optimizer(model)
    for number in range(9):
        model(number).backward()
        for name, layer in model.layers.items():
            if number % 3 == 1:
                kept, grad = layer.weight.grad, lab.gradient(100 + number, name)
                layer.weight.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad
                layer.put_back = kept
            elif number % 3 == 2:
                layer.weight.grad = layer.put_back
        optimizer.step()
        optimizer.zero_grad()
    lab.look(model)


def parameters_written(lab: Lab) -> None:
    model = lab.model()
    optimizer = lab.optimizer(model)
    for number in range(6):
        train(model, optimizer, [number])
        optimizer.synchronize()
        with torch.no_grad():
            for param in list(model.parameters())[number % 2 :: 2]:
                if number % 3 == 0:
                    param.mul_(0.5)
                elif number % 3 == 1:
                    param.data = param.data.clone() + 1
    lab.look(model)


def loaded_before_the_first_step(lab: Lab) -> None:
    model, other = lab.model(), lab.model()
    train(other, lab.optimizer(other), range(2))
    lab.look(other)
    optimizer = lab.optimizer(model)
    model.load_state_dict(other.state_dict())
    train(model, optimizer, range(2))
    lab.look(model)


def state_dicts(lab: Lab) -> None:
    """Into another of ours before its first step and after, with masters."""
    model = lab.model()
    optimizer = lab.optimizer(model)
    train(model, optimizer, range(3))
    lab.look(model)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        lab.seen += [value for _, value in sorted(entry.items())]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for steps in (0, 2):
        other = lab.model()
        second = lab.optimizer(other)
        train(other, second, range(10, 10 + steps))
        second.load_state_dict(saved)
        other.load_state_dict(values)
        train(other, second, range(3, 6))
        lab.look(other)


def resumed(lab: Lab) -> None:
    """From a store, into a model that has other weights."""
    model = lab.model()
    store = f"nvme:{lab.folder}/resumed"
    optimizer = lab.optimizer(model, placement=store)
    train(model, optimizer, range(3))
    optimizer.close()
    again = lab.model()
    for param in again.parameters():
        param.data.zero_()
    optimizer = lab.optimizer(again, placement=store)
    optimizer.open(resume=True)
    lab.look(again)
    train(again, optimizer, range(3, 6))
    lab.look(again)


def two_optimizers(lab: Lab) -> None:
    model = lab.model()
    params = list(model.parameters())
    waits, lab.waits = lab.waits, False  # of half of a model each
    one, two = lab.optimizer(model, params[:2]), lab.optimizer(model, params[2:])
    lab.waits = waits
    for number in range(4):
        model(number).backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
    lab.look(model)


def unfrozen(lab: Lab) -> None:
    """Parameters that are trained later have an engine, and staging, of their own."""
    model = lab.model()
    for name in ("one", "two"):
        model.layers[name].weight.requires_grad_(False)
    optimizer = lab.optimizer(model)
    train(model, optimizer, range(2))
    model.requires_grad_(True)
    train(model, optimizer, range(2, 5))
    lab.look(model)


CASES = [
    plain,
    clipping,
    accumulation,
    without_zero_grad,
    scaling,
    skipped,
    without_gradient,
    zero_gradients,
    gradients_written_after_backward,
    gradients_given,
    parameters_written,
    loaded_before_the_first_step,
    state_dicts,
    resumed,
    two_optimizers,
    unfrozen,
]

def _doubled(x: torch.Tensor) -> None:
    x.data.mul_(2)


_library = torch.library.Library("ziggurat_test", "DEF")
_library.define("untold(Tensor x) -> ()")  # as c10d's: it does not say that it writes
_library.impl("untold", _doubled, "CompositeExplicitAutograd")


def run(case: Callable[[Lab], None], lab: Lab) -> list[torch.Tensor]:
    case(lab)
    for optimizer in lab.optimizers:
        optimizer.close()
    return [tensor.cpu() for tensor in lab.seen]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape
        same = one.contiguous().view(-1).view(torch.uint8) == other.view(-1).view(torch.uint8)
        assert same.all(), f"the {at}th of {len(found)} values differs: {one} is not {other}"
