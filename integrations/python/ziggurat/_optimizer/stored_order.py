# SPDX-License-Identifier: Apache-2.0
"""Finds in a store the names and the order of an optimizer's parameters, as an earlier run has written them."""

from __future__ import annotations

import math

import torch

from ziggurat._exchange.parts import Part
from ziggurat._library.native import InvalidArgument, Runtime, stored_params, stored_wholes
from ziggurat._memory.placement import added_stores, has_store, ranks_in
from ziggurat._optimizer.among_ranks import AmongRanks
from ziggurat._optimizer.kept import Kept, KeptSlice
from ziggurat._optimizer.state import StateDicts
from ziggurat._pytorch.names import Named, made_up, matched
from ziggurat._streaming.streaming import kept_by_engine


class StoredOrder(AmongRanks, StateDicts):
    """The part of an engine's optimizer that looks into a store before it opens it."""

    _spelled: dict[torch.Tensor, str]

    def _given_names(self) -> dict[torch.Tensor, str]:
        """Returns the names as the script gave them."""
        raise NotImplementedError

    def _part(self, param: torch.Tensor) -> Part:
        found = kept_by_engine(param)
        if found is None:
            return self._sharing.part(param)
        unit, ranks = found[1].unit.unit, self._sharing.ranks
        if ranks is not None:
            return KeptSlice(param, unit.number, unit.is_expert, ranks)
        return Kept(param, unit.number, optional=unit.is_expert)

    def _require_none_added(self, path: str) -> None:
        """Errors: InvalidArgument if an earlier run has left stores of parameters that it added,
        because a run that begins anew would meet them when it adds its own."""
        found = self._sharing.decided(lambda: added_stores(path))
        if found:
            raise InvalidArgument(
                f'open(resume="never"): {path} also has stores of parameters that an earlier run '
                f"added to its optimizer, which are not replaced: remove {', '.join(found)}, or give "
                "another directory"
            )

    def _has_store(self, store: str) -> bool:
        """Returns whether the store exists. A store keeps the rounding that it was made with."""
        return bool(self._sharing.decided(lambda: has_store(store)))

    def _as_stored(
        self, store: str, new: list[tuple[str, torch.Tensor, int]], resume: str
    ) -> list[tuple[str, torch.Tensor, int]]:
        """Returns `new` with the names and in the order of the store, if there is one. Reads rank
        0's file, which has a part of every parameter."""
        _, params, _ = zip(*new, strict=True)
        runtime = self._sharing.runtime(self._workers(params))
        order = self._sharing.decided(lambda: self._order_in(store, runtime, new, resume))
        if order is None:
            return new
        placed = {place for place, _ in order}
        empty = [(place, one[0]) for place, one in enumerate(new) if place not in placed]
        return [(name, *new[place][1:]) for place, name in [*order, *empty]]

    def _order_in(
        self,
        store: str,
        runtime: Runtime,
        new: list[tuple[str, torch.Tensor, int]],
        resume: str,
    ) -> list[tuple[int, str]] | None:
        """Returns for each parameter of the store its place in `new` and its name in the store.
        None if there is no store, or if it has just these parameters. What is divided anew is
        compared as whole parameters."""
        wholes = stored_wholes(runtime, {"store": store})
        if resume == "reshard" and wholes is not None:
            stored = [Named(*one) for one in wholes]
            shapes = [tuple(param.shape) for _, param, _ in new]
        else:
            stored = [Named(*one) for one in stored_params(runtime, {"store": store})]
            shapes = [tuple(self._part(param).memory().shape) for _, param, _ in new]
        here = [place for place, shape in enumerate(shapes) if math.prod(shape) > 0]
        ours = [Named(new[place][0], shapes[place]) for place in here]
        if not stored or not here or stored == ours:
            return None
        given = self._given_names()
        as_given = [
            Named(given.get(param) or self._spelled.get(param) or name, shapes[place])
            for place in here
            for name, param, _ in [new[place]]
        ]
        if len(self.param_groups) > 1 and made_up(one.name for one in ours) and not made_up(
            one.name for one in stored
        ):
            raise InvalidArgument(
                f"the store {store} knows its parameters by name, but this optimizer has several "
                "groups without names, whose order may differ: give the optimizer model=, or "
                "named parameters"
            )
        # The parameters' places in the groups' order, by which names are made up.
        position = {param: i for i, param in enumerate(self._order)}
        in_groups = sorted(range(len(here)), key=lambda i: position[new[here[i]][1]])
        spellings = [[own[i] for i in in_groups] for own in (ours, as_given)]
        try:
            found = matched(f"the store {store}", stored, spellings)
        except InvalidArgument:
            ranks = self._sharing.ranks
            if resume == "reshard" or ranks_in(store) != (1 if ranks is None else ranks.size):
                return None  # slices of another number of ranks; the engine reports what differs
            here_too = {Named(name, tuple(param.shape)) for name, param, _ in new}
            if {Named(*one) for one in wholes or ()} != here_too:
                raise
            raise InvalidArgument(
                f"the store {store} has these parameters, but its ranks divide them in another way "
                'than this run does: give Resume or optimizer.open() resume="reshard" to divide the '
                "store anew, or another directory"
            ) from None
        return [
            (here[in_groups[at]], one.name) for at, one in zip(found, stored, strict=True)
        ]
