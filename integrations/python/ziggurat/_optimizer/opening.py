# SPDX-License-Identifier: Apache-2.0
"""Opens the engines of an optimizer: decides when and where."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ziggurat._exchange.parts import Nothing, Part
from ziggurat._gradients.gradient_content import Slot
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import (
    InvalidArgument,
    MemoryChoice,
    Param,
    PlacementChoice,
    ResourceExhausted,
    Runtime,
    Unimplemented,
)
from ziggurat._memory.loose_memory import resident_bytes
from ziggurat._memory.memory import free_bytes
from ziggurat._memory.placement import (
    Homes,
    chosen,
    fits_host,
    has_store,
    host_or_drive,
    room_beside_nvme,
    say,
)
from ziggurat._optimizer.auto_said import say_choice
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.rounding import draws_noise, require_runs
from ziggurat._optimizer.stored_order import StoredOrder
from ziggurat._plan.asked_of import choose_for, here_bytes
from ziggurat._ranks.ranks import several_ranks
from ziggurat._streaming.adapters import bring_for_adapters
from ziggurat._streaming.streaming import Streaming, streaming_around, streaming_of

# What open(resume=...) means to the engine.
_RESUMES: dict[bool | str, str] = {
    False: "new",
    True: "auto",
    "auto": "auto",
    "reshard": "reshard",
    "never": "never",
}
_GIVEN = {"new": "False", "auto": '"auto"', "reshard": '"reshard"', "never": '"never"'}
_SOMEWHERE = 4096  # an address that fits each type
_GOES_ON = ("auto", "reshard")  #: go on from a store that is there


def _in_model(param: torch.Tensor) -> str | None:
    """Returns the parameter's name in a model that was offloaded."""
    found = streaming_of(param)
    return None if found is None else found[1].name


class Opening(StoredOrder):
    """The part of an engine's optimizer that opens engines."""

    placement: str
    _tier: str
    _closed: bool
    _lost: bool
    _figures: dict[str, int]
    _slot_of: dict[torch.Tensor, Slot]
    _load: Callable[[Sequence[Part]], tuple[int, dict[str, Any]]] | None
    _memory: MemoryChoice | None = None  # what the planner has chosen for the engine that opens
    _begin_bytes: int | None = None  # what the process had then beside the model
    _model_has_values = False  # whether open() leaves offloaded parameters their values

    def _in_order(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Sorts the parameters in the model's order."""
        raise NotImplementedError

    def _attach(self, params: Sequence[torch.Tensor]) -> None:
        """Makes the gradients of `params` wait for the step from now on."""
        raise NotImplementedError

    def open(self, *, resume: bool | str = False) -> None:
        """Takes masters from all parameters that are trained and not yet known, into a new store.

        The first ``step()`` calls it. A store that is there is an error, unless `resume` says what
        is done with it: "auto" (or True) opens it and writes its values to the parameters, and
        refuses a store of other ranks; "reshard" first divides it among the ranks that are there,
        if they differ; "never" replaces it by a new one.
        """
        how = _RESUMES.get(resume)
        if how is None:
            raise InvalidArgument(f'resume="{resume}": give "auto", "reshard" or "never"')
        if self._to_load:  # the last open() may have failed before it had given all
            for opened in self._opened:
                self._give_loaded(opened)
        known = self._opened_with
        if len(known) == len(self._order):
            return  # all are known: a step of many parameters looks at none of them
        new = [one for one in self._named() if one[1].requires_grad and one[1] not in known]
        if not new:
            return
        named = {one[1]: one for one in new}
        new = [named[param] for param in self._in_order(named)]
        self.need_open()
        self.share_offloaded()
        self.check_divided()
        # Each way has calls of its own that all ranks make together.
        self._sharing.require_alike("open()", f"resume={_GIVEN[how]}")
        if self._resume is not None:
            raise Unimplemented(
                f"parameter '{new[0][0]}' was added after Resume, so the store has no state for "
                "it. Adding parameters to a store is not supported yet: train all parameters from "
                "the beginning, or give this one an optimizer of its own"
            )
        self._attach([param for param in named if self._slot_of[param].handle is None])
        if self._sharing.feeder is not None:
            self._sharing.attach(self._slot_of[param] for param in named)
        if how == "reshard" and self._sharing.ranks is None and several_ranks():
            raise InvalidArgument(
                'open(resume="reshard"): this process is one of several, but its optimizer is '
                "alone, so the store would become that of one rank: wrap the model, or give "
                "group=, before"
            )
        trained = [(_in_model(param) or name, param) for name, param, _ in new]
        self._sharing.before_open(trained, self._frozen_beside(named))
        if how != "new" and self._tier == "auto":
            self.need_store(f"open(resume={resume!r})")
        self._choose_memory([param for _, param, _ in new])
        if self._tier == "auto":
            opened = self._open_auto(new)
        else:
            opened = self._open(new, self._path, how)
        self._opened.append(opened)
        if len(self._opened) == 1:
            self._figures = opened.figures()
        self._opened_with |= dict.fromkeys(opened.members, opened)
        self._sharing.opened(opened)
        self._give_loaded(opened)

    def _frozen_beside(self, trained: Container[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what an offloaded model has beside what is `trained`, of which ranks keep slices too."""
        streaming = streaming_around(self._order)
        return [] if streaming is None else streaming.kept_beside(trained)

    def need_open(self) -> None:
        """Checks that the optimizer still has its state, because nobody asked it to start from the
        beginning. Errors: InvalidArgument if the state is gone."""
        if self._closed or self._lost:
            raise InvalidArgument(
                "the optimizer was closed and has no state any more: make a new optimizer"
            )

    def _open(
        self, new: list[tuple[str, torch.Tensor, int]], path: str | None, resume: str = "new"
    ) -> Opened:
        settings = self._settings | {"resume": resume}
        settings["placement"] = "optimizer=host" if path is None else "optimizer=nvme"
        streaming = self._streaming(new, path)
        if streaming is None and not self._opened:
            self._check_not_offloaded()
        if streaming is not None:
            streaming.place_tables(path or streaming.folder)
        if streaming is not None and streaming.gives_some:
            grads = streaming.place_gradients([param for _, param, _ in new], path or streaming.folder)
            settings["placement"] += f",params={streaming.tier},grads={grads}"
            settings["device_memory"] = streaming.engine_bytes
            settings |= streaming.limits
            if self.hpz is not None and self._sharing.ranks is not None:
                settings["hpz"] = self.hpz
            if path is None and streaming.needs_directory:
                # State that is in memory is not copied there: such a run goes on from checkpoints.
                settings |= {"store": streaming.folder, "durable_every": 0}
        if path is not None:
            added = f"/added-{len(self._opened)}" if self._opened else ""
            settings["store"] = path + added
            if resume == "never" and not self._opened:
                self._require_none_added(path)
            if "host_memory" not in settings and self._memory is not None and self._memory.host_memory:
                settings["host_memory"] = self._memory.host_memory
            elif "host_memory" not in settings:
                trained = [param for _, param, _ in new]
                choice = self._choice(trained, path)
                room = room_beside_nvme(choice, 0 if streaming is None else streaming.room_bytes(trained))
                if room is not None:
                    settings["host_memory"] = room
            if resume in _GOES_ON:
                new = self._as_stored(settings["store"], new, resume)
        names, params, groups = zip(*new, strict=True)
        parts = [self._part(param) for param in params]
        settings["run"] = self._sharing.run(names, params)

        def runtime() -> Runtime:
            return self._sharing.runtime(self._workers(params))

        keeps = resume == "auto" and path is not None and self._has_store(settings["store"])
        if draws_noise(settings) and not keeps:
            require_runs(parts, names)
        for part in parts:
            part.slot = self._slot_of[part.param]
        with self._sharing.waiting("open()"):
            return Opened(
                parts,
                names,
                groups,
                self._hooks,
                runtime,
                settings,
                self._load,
                streaming,
                self._model_has_values,
            )

    def _streaming(
        self, new: list[tuple[str, torch.Tensor, int]], path: str | None
    ) -> Streaming | None:
        """Returns what keeps the offloaded ones of `new`, or None if there are none. Errors: by
        name, if this optimizer cannot have them."""
        found = [(name, kept[0]) for name, param, _ in new if (kept := streaming_of(param))]
        streaming = streaming_around([param for _, param, _ in new])
        if streaming is None:
            return None
        if (model := streaming.model()) is not None:
            bring_for_adapters(model)
        if not found and streaming.is_open:  # which has what is frozen around these
            return None
        streaming.begin_opening(self, [name for name, _ in found] or [new[0][0]])
        streaming.divide_among(self._sharing.ranks, self.quantized_weights)
        streaming.divide_memory(self._settings["state_format"], (param for _, param, _ in new))
        other = [name for name, kept in found if kept is not streaming]
        if other:
            raise Unimplemented(
                f"parameters '{found[0][0]}' and '{other[0]}' are of two offloaded models: give "
                "each model an optimizer of its own"
            )
        if path is None:
            self._require_directory(streaming, streaming.homes)
        return streaming

    def _require_directory(self, streaming: Streaming, homes: Homes) -> None:
        """Checks that something of a model can be on a drive, for a state in host memory. Errors:
        InvalidArgument."""
        if streaming.folder is None and "nvme" in homes:
            raise InvalidArgument(
                f"offload() was told to keep parameters or gradients in the directory of the "
                f'optimizer\'s state, which placement="{self.placement}" puts into host memory: give '
                'the optimizer "nvme:/path", or offload() "host"'
            )

    def _open_auto(self, new: list[tuple[str, torch.Tensor, int]]) -> Opened:
        """Opens the state in host memory if it fits, else on the drive. What is added later goes to
        the same tier."""
        if self._memory is not None:
            fits = "optimizer=host" in self._memory.placement  # on all ranks
        else:
            held = self._held(param for _, param, _ in new)
            fits = self._sharing.together(
                'placement="auto"', lambda: fits_host(held, self._settings, self._path)
            )
            fits = self._sharing.all_of(fits)
        if fits:
            try:
                opened = self._open(new, None)
                self._tier = self.placement = "host"
                self._path = None
                return opened
            # the given budget or a limit of the process refused the memory
            except ResourceExhausted as error:
                if self._path is None or self._sharing.ranks is not None:
                    raise
                say(f"nvme:{self._path}", f"host memory was refused: {error}")
        opened = self._open(new, self._path)
        self.need_store("open()")
        return opened

    def _choose_memory(self, new: Sequence[torch.Tensor]) -> None:
        """Lets the planner choose what offload() and this optimizer leave to it, the same on all ranks: rank 0
        decides, by the least memory that is free on one of them."""
        self._memory = None
        streaming = streaming_around(new)
        if streaming is None or streaming.is_open or not streaming.leaves_choice:
            return
        streaming.divide_among(self._sharing.ranks, self.quantized_weights)
        streaming.division.leave_in_files(set(new))
        if self._path is None:
            self._require_directory(streaming, streaming.given_homes)
        here = here_bytes(streaming, self)
        free = min(self._sharing.told(free_bytes()))
        begin_bytes = resident_bytes() - here
        choice = MemoryChoice(**self._sharing.decided(lambda: asdict(choose_for(streaming, self, free, here))))
        streaming.settle(choice)
        self._memory = choice
        ranks = self._sharing.ranks
        if ranks is None or ranks.rank == 0:
            say_choice(choice, self._path)
            self._begin_bytes = begin_bytes

    def given_for_plan(self) -> tuple[dict[str, Any], str | None, str]:
        """Returns the settings of the state, its directory, if it has one, and "host", "nvme" or "auto"."""
        tier = self._tier
        if tier == "auto" and self._path is not None and has_store(self._path):
            tier = "nvme"  # which goes on from there
        return self._settings, None if tier == "host" else self._path, tier

    def _choice(self, params: Iterable[torch.Tensor], path: str | None) -> PlacementChoice:
        """Returns where the engine would keep this process's part of the state."""
        return chosen(self._held(params), self._settings, path)

    def _held(self, params: Iterable[torch.Tensor]) -> list[Param]:
        """Returns this process's parts, for which a place is chosen. Offloaded ones are among them
        as if they stayed, because what they take is in memory already."""
        parts = [self._part(param).memory() for param in params]
        here = [part for part in parts if part.numel() > 0] or [Nothing().memory()]
        return [
            # The engine refuses other types later, by name. No address is followed.
            Param(str(i), tuple(part.shape), DTYPES.get(part.dtype, "fp32"), part.data_ptr() or _SOMEWHERE)
            for i, part in enumerate(here)
        ]

    def planned_with(self) -> tuple[dict[str, Any], str | None]:
        """Returns the settings of the state, and its directory, or None if it is in host memory or
        "auto" would choose that now."""
        in_host = self._tier == "host"
        if self._tier == "auto":
            held = self._held(param for _, param, _ in self._named() if param.requires_grad)
            in_host, _ = host_or_drive(held, self._settings, self._path)
        return self._settings, None if in_host else self._path

    def trains(self) -> frozenset[torch.Tensor]:
        """Returns the parameters that a step changes."""
        return frozenset(param for _, param, _ in self._named() if param.requires_grad)

    def trained_beside(self) -> tuple[tuple[str, Any], ...]:
        """Returns the parameters with elements that are trained and not among those that were offloaded."""
        return tuple(
            (name, param)
            for name, param, _ in self._named()
            if param.requires_grad and param.numel() > 0 and streaming_of(param) is None
        )

    def need_store(self, who: str) -> None:
        """Requires a store for a caller that has no use without one. "auto" then means its
        directory.

        Errors: InvalidArgument if no directory was named.
        """
        if self._path is None:
            raise InvalidArgument(
                f'{who}: with placement="{self.placement}" no step is durable: give "nvme:/path", '
                'or "auto:/path", which then always keeps the state on the drive'
            )
        self._tier, self.placement = "nvme", f"nvme:{self._path}"
