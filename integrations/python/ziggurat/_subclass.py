# SPDX-License-Identifier: Apache-2.0
"""Makes the subclasses that objects of a model get, so that some of their methods do more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def subclass(original: type[Any], members: Mapping[str, Any]) -> type[Any]:
    """Returns a subclass with `members` that has the names and the docstring of `original`."""
    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {**named, **members})
