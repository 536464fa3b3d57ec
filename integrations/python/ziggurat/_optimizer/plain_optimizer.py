# SPDX-License-Identifier: Apache-2.0
"""Makes the class of an optimizer that the engine has and ziggurat.torch says nothing more of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ziggurat._library.state_kinds import Optimizer
from ziggurat._optimizer.optimizer import EngineOptimizer


def plain_optimizer(its: Optimizer) -> type[EngineOptimizer]:
    """Returns a class whose arguments are the settings that the optimizer reads."""

    def __init__(self: Any, params: Iterable[Any], lr: float = its.settings["lr"], **arguments: Any) -> None:
        own = {name: arguments.pop(name) for name in its.settings if name in arguments}
        EngineOptimizer.__init__(self, params, its.settings | own | {"lr": lr}, **arguments)

    names = ", ".join(f"{name}={value}" for name, value in its.settings.items())
    content = {
        "__init__": __init__,
        "__doc__": f"The engine's {its.title}. Its settings are {names}.",
        "__module__": "ziggurat.torch",
        "_kind": its.name,
    }
    return type(its.title, (EngineOptimizer,), content)
