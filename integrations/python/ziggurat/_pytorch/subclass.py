# SPDX-License-Identifier: Apache-2.0
"""Makes the subclasses that objects of a model get, so that some of their methods do more, and copies of
such objects that are as they were before."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

OFFLOADED, CHUNKED_LOSS, FOLDER_OF_GRAD = "_offloaded", "_chunked_loss", "_folder_of_grad"
TILED = "_tiled"
_ADDED = frozenset({OFFLOADED, CHUNKED_LOSS, FOLDER_OF_GRAD, TILED})  #: what such objects have beside their own


def subclass(original: type[Any], members: Mapping[str, Any]) -> type[Any]:
    """Returns a subclass with `members` that has the names and the docstring of `original`. Copies and
    pickled objects are of `original`, unless `members` say otherwise, and so is what a call of the
    class makes, as a slice of torch.nn.Sequential does, which lacks what was added to the object."""

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = original
        self.__init__(*args, **kwargs)

    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"_made_of": original, "__init__": __init__, "__reduce_ex__": reduced}
    made = {**named, **own, **members}
    return type(original.__name__, (original,), made)


def reduced(module: Any, protocol: Any) -> Any:
    """Returns what ``__reduce_ex__()`` would, were the object what it was made of, without what was added
    to it."""
    made = plain = type(module)
    while "_made_of" in plain.__dict__:
        plain = plain.__dict__["_made_of"]
    # From protocol 2 on pickle refuses the class of another object.
    function, arguments, *more = plain.__reduce_ex__(module, min(protocol, 1))
    if more and isinstance(more[0], dict):
        more[0] = {name: value for name, value in more[0].items() if name not in _ADDED}
    return (function, tuple(plain if one is made else one for one in arguments), *more)
