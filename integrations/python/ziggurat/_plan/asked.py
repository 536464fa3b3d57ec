# SPDX-License-Identifier: Apache-2.0
"""A run of an offloaded model as offload() and its optimizer are asked for it, from which its plan
follows: by the division into units, the placement and the engine's own sizes of records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import (
    HostMemoryPlan,
    InvalidArgument,
    MemoryChoice,
    Param,
    ResourceExhausted,
    plan_host_memory,
)
from ziggurat._library.state_kinds import has_codes
from ziggurat._memory.memory import size_text
from ziggurat._memory.placement import (
    Homes,
    added_stores,
    bytes_in_store,
    chosen,
    fits_half,
    room_beside_nvme,
    sums_bytes,
)
from ziggurat._plan.drive_profile import measured_rate
from ziggurat._plan.from_ranks import Sized, Wire, brought_from, gradient_bytes
from ziggurat._plan.places import IN_SLOTS, IN_USE, Places
from ziggurat._plan.plan_page import Plan, PlayedStep
from ziggurat._plan.played_step import played_step
from ziggurat._plan.step_bound import step_bound
from ziggurat._plan.times import Times
from ziggurat._plan.traffic import Settings, State, StepBytes, step_bytes
from ziggurat._ranks.cuts import Cut
from ziggurat._units.units import Division, Unit, UnitPart

_SOMEWHERE = 64  #: stands for an address, which nobody follows
_PLENTY = 1 << 60  #: memory in which any state fits


@dataclass(frozen=True)
class Asked:
    """A run, as the arguments of offload() and of the optimizer make it."""

    division: Division
    homes: Homes
    memory_bytes: int
    optimizer: str
    state_format: str
    state_on_drive: bool
    path: str | None  #: the state's directory, if it is known
    host_memory: int | None
    accumulation: int
    clips: bool
    free: int  #: bytes of memory that the run may take
    here: int = 0  #: of these, what PyTorch's memory has now, as that of every other rank has
    recomputes: bool = False
    #: the parameters that are trained and came after offload(), as adapters may
    added: tuple[tuple[str, torch.nn.Parameter], ...] = ()
    is_open: bool = False  #: whether an engine has the units, as they are divided
    buffer_bytes: int = 0  #: of the model's buffers, which stay in PyTorch's memory
    activation_bytes: int = 0  #: for what backward needs of a forward, beyond which it goes to files
    ranks: int = 1  #: of which each has a slice of each parameter and of its state
    replicas: int = 1  #: how many groups of so many ranks there are
    hpz: int | None = None  #: how many ranks share copies of what others have
    wire: Wire = Wire()  #: how ranks send each other parameters and gradients
    gpu: str | None = None  #: that units are brought to; None: they are brought to the CPU
    folder: str | None = None  #: of parameters and gradients on a drive, if the state is in memory

    def plan(
        self,
        tokens: int = 0,
        rate: tuple[float, str] | None = None,
        compute: tuple[float, float] | None = None,
        has_room: bool = False,
        times: Times | None = None,
    ) -> Plan:
        """Returns the run's plan. `compute`: the seconds of forward and backward. `has_room`: it has what
        it takes already. `times`: of the model as it is, by which a step is played."""
        self.require_directory()
        if not self.is_open:  # or the engine's units would get other numbers
            self.division.require(self.memory_bytes, own_blocks=has_codes(self.state_format))
        where = self.path or self.folder
        if rate is None and where is not None:
            found = measured_rate(where)
            rate = None if found is None else (found, "measured by `ziggurat bench io`")
        state_bytes = self._state_bytes(self.listed())
        grads = self.grads_on_drive
        budget = self._budget(grads)
        places = Places(self, budget, grads)
        if not has_room:
            self._require_room(places)
        step = step_bytes(
            self.division,
            self._added_parts(),
            self._settings(grads),
            State(state_bytes, budget.records, budget.read_bytes) if self.state_on_drive else None,
        )
        step = self._with_ranks(step)
        if times is not None:
            passes = (times.seconds_of(backward=False), times.seconds_of(backward=True))
            compute = (passes[0] * self.accumulation, passes[1] * self.accumulation)
        bound = None
        if rate is not None and compute is not None:
            # What stays is written whenever the drive has time, until the next step makes it anew.
            stays = state_bytes - budget.read_bytes
            leased = budget.items * budget.item_bytes + max(0, stays) if self.state_on_drive else 0
            bound = step_bound(step, *compute, rate[0], leased)
        played = "" if times is None else played_step(self, times, None if rate is None else rate[0])
        params = [param for unit in self.division.units for _, param in unit.params]
        params += [param for _, param in self.added]
        return Plan(
            params=sum(param.numel() for param in params),
            trained=sum(param.numel() for param in params if param.requires_grad),
            units=len(self.division.units),
            experts=sum(unit.is_expert for unit in self.division.units),
            frozen_in_files=sum(param.nbytes for unit in self.division.units for param in unit.in_files),
            by_rows=tuple(unit.name for unit in self.division.units if unit.by_rows and not unit.tiles),
            tiles={unit.name: len(unit.tiles) for unit in self.division.units if unit.tiles},
            optimizer=self.optimizer,
            state_format=self.state_format,
            tokens=tokens * self.accumulation,
            accumulation=self.accumulation,
            memory_bytes=self.memory_bytes,
            smallest_memory_bytes=self.division.smallest()[0],
            all_fits=self.division.fits(self.memory_bytes),
            in_host_memory=places.in_memory,
            on_drive=places.on_drive,
            gpu=self.gpu,
            on_gpu=places.on_gpu,
            step=step,
            drive_bytes_per_s=None if rate is None else rate[0],
            drive_rate_from="" if rate is None else rate[1],
            drive_s=None if rate is None else (step.read + step.written) / rate[0],
            compute_s=None if compute is None else sum(compute),
            bound=bound,
            played=played if isinstance(played, PlayedStep) else None,
            played_needs=played if isinstance(played, str) else "",
        )

    def with_choice(self, choice: MemoryChoice) -> Asked:
        """Returns the run with what the planner has chosen."""
        its = dict(part.split("=") for part in choice.placement.split(","))
        in_host = its["optimizer"] == "host"
        return replace(
            self,
            homes=Homes("nvme" if its["params"] == "nvme" else "host", its["grads"]),
            memory_bytes=choice.memory,
            host_memory=choice.host_memory or self.host_memory,
            state_on_drive=not in_host,
            path=None if in_host else self.path,
        )

    def sized(self) -> list[Sized]:
        """Returns the parameters that the engine keeps, and brings."""
        return [
            Sized(param.numel(), param.element_size(), unit.trains(param))
            for unit in self.division.units
            for _, param in unit.params
            if unit.keeps(param)
        ]

    def _with_ranks(self, step: StepBytes) -> StepBytes:
        if self.ranks == 1 and self.replicas == 1:
            return step
        once = brought_from(self.sized(), self.ranks, self.wire)
        brought = step.brought_forward + step.brought_backward
        trained = [Sized(param.numel(), param.element_size(), True) for _, param in self.trained()]
        return replace(
            step,
            params_from_ranks=brought * once.given // max(1, once.whole),
            grads_from_ranks=self.accumulation * gradient_bytes(trained, self.ranks * self.replicas, self.wire),
        )

    def _settings(self, grads_on_drive: bool) -> Settings:
        return Settings(
            memory_bytes=self.memory_bytes,
            params_on_drive=self.homes.params == "nvme",
            live_in_units=self.lives_in_units,
            grads_on_drive=grads_on_drive,
            grads_are_sums=self.ranks > 1,
            accumulation=self.accumulation,
            clips=self.clips,
            recomputes=self.recomputes,
        )

    def require_directory(self) -> None:
        """Errors: InvalidArgument if something is on the drive of a state that is not, and has no directory."""
        if not self.state_on_drive and self.folder is None and "nvme" in (self.homes.params, self.homes.grads):
            raise InvalidArgument(
                "plan(): parameters or gradients are in the directory of the optimizer's state, which "
                'optimizer_placement="host" does not have: give it "nvme:/path", or placement="host"'
            )

    def _params(self, trained: bool) -> list[tuple[Unit, str, torch.nn.Parameter]]:
        return [
            (unit, name, param)
            for unit in self.division.units
            for name, param in unit.params
            if unit.trains(param) == trained and param not in unit.in_files
        ]

    def parts(self, trained: bool) -> list[UnitPart]:
        """Returns what is trained, or what is frozen."""
        all_parts = (part for unit in self.division.units for part in unit.parts())
        found = [part for part in all_parts if part.trained == trained]
        return [*found, *self._added_parts()] if trained else found

    def _added_parts(self) -> list[UnitPart]:
        """Returns what the engine is lent beside the units' parameters."""
        lent = Unit(0, "(added)")
        lent.params, lent.own_blocks, lent.ranks = list(self.added), has_codes(self.state_format), self.ranks
        return [part._replace(added=True) for part in lent.parts()]

    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns what the optimizer trains of the model."""
        return [*((name, param) for _, name, param in self._params(True)), *self.added]

    def listed(self) -> list[Param]:
        """Returns the parameters as the engine is given them: those of tables are lent, and of no use to it
        if they are frozen."""
        kept = [
            Param(name, self._shape(param), DTYPES[param.dtype], None, unit=unit.number, frozen=not unit.trains(param))
            for unit, name, param in self._in_order()
        ]
        return [*self._lent(self._beside_units()), *kept]

    def numbers(self) -> dict[torch.Tensor, int]:
        """Returns the parameters' numbers in the engine."""
        params = [*(param for _, param in self._beside_units()), *(param for _, _, param in self._in_order())]
        return {param: number for number, param in enumerate(params)}

    def _in_order(self) -> list[tuple[Unit, str, torch.nn.Parameter]]:
        """Returns what the engine brings. What is frozen comes last."""
        return [one for trained in (True, False) for one in self._params(trained) if one[0].keeps(one[2])]

    def _beside_units(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [*self.added, *((name, param) for unit, name, param in self._params(True) if unit.by_rows)]

    def _lent(self, params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Param]:
        return [Param(name, self._shape(one), DTYPES[one.dtype], _SOMEWHERE) for name, one in params]

    def _shape(self, param: torch.nn.Parameter) -> tuple[int, ...]:
        """Returns the shape of what the first rank has, which has most."""
        return tuple(param.shape) if self.ranks == 1 else (min(param.numel(), Cut(param.numel(), self.ranks).slice),)

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of the engine that its sizes depend on."""
        return {"optimizer": self.optimizer, "state_format": self.state_format}

    def _state_bytes(self, params: Sequence[Param]) -> int:
        """Returns what the engine says of the optimizer's records."""
        return chosen(params, self.engine_settings(), ".", _PLENTY).state_bytes

    @property
    def grads_on_drive(self) -> bool:
        if not self.state_on_drive or self.homes.grads is not None:
            return self.homes.grads == "nvme"
        if self.ranks > 1:
            return False
        return not fits_half(sums_bytes(param for _, param in self.trained()), self.free)

    def _room(self) -> int | None:
        """Returns the engine's host_memory; None: the engine chooses."""
        if self.host_memory is not None or not self.state_on_drive:
            return self.host_memory
        choice = chosen(self._lent(self.trained()), self.engine_settings(), ".", self.free)
        on_drive = self.homes.params == "nvme"
        beside = self._largest_frozen() if on_drive else 0 if self.lives_in_units else self._model_bytes()
        return room_beside_nvme(choice, beside + self.staged_bytes)

    def _budget(self, grads_on_drive: bool) -> HostMemoryPlan:
        """Returns how the engine divides its host memory."""
        budget = self._divided(grads_on_drive, self._room())
        if budget.budget_bytes < budget.smallest_bytes:
            raise InvalidArgument(
                f"host_memory={self.host_memory} is too small: the smallest that works is "
                f"{budget.smallest_bytes}"
            )
        return budget

    def _divided(self, grads_on_drive: bool, host_memory: int | None = None) -> HostMemoryPlan:
        settings = self._placed(grads_on_drive)
        if self.ranks > 1:
            settings["wholes"] = self._wholes()
        return plan_host_memory(self.listed(), settings, host_memory, on_gpu=self.gpu is not None)

    def _placed(self, grads_on_drive: bool) -> dict[str, Any]:
        params = "device" if self.lives_in_units else self.homes.params
        grads = "nvme" if grads_on_drive else "host"
        state = "nvme" if self.state_on_drive else "host"
        return self.engine_settings() | {"placement": f"optimizer={state},params={params},grads={grads}"}

    def opening(self) -> dict[str, Any]:
        """Returns the settings with which one rank's engine is opened."""
        settings, room = self._placed(self.grads_on_drive), self._room()
        units = self.division.taken_by_engine(self.memory_bytes, self.lives_in_units)
        if units:
            settings["device_memory"] = units
        if room is not None:
            settings["host_memory"] = room
        return settings | ({"store": self.path or "."} if self.state_on_drive else {})

    def _wholes(self) -> list[dict[str, Any]]:
        """Returns the parameters of which each rank keeps a slice, as the engine is given them."""
        return [
            {"name": name, "count": param.numel(), "dtype": DTYPES[param.dtype], "unit": unit.number}
            for unit in self.division.units
            for name, param in unit.params
            if unit.keeps(param)
        ]

    def host_memory_for_all(self) -> int:
        """Returns the host_memory with which all records stay, of a state on NVMe."""
        return self._divided(self.grads_on_drive).all_bytes

    def least_host_memory(self) -> int:
        """Returns the smallest host_memory with which a state on NVMe works."""
        return self._divided(self.grads_on_drive).smallest_bytes

    @property
    def staged_bytes(self) -> int:
        """Returns the host memory in which units are put together of the ranks' slices for a GPU."""
        return 0 if self.gpu is None or self.ranks == 1 else self.division.staged_bytes

    @property
    def lives_in_units(self) -> bool:
        """Returns whether the parameters live in the memory for units."""
        return self.ranks == 1 and self.homes.lives_in_units(self.division.fits(self.memory_bytes))

    def _kept(self) -> list[torch.nn.Parameter]:
        """Returns the parameters that the engine keeps."""
        units = self.division.units
        return [param for unit in units for _, param in unit.params if unit.keeps(param)]

    def _largest_frozen(self) -> int:
        return max((param.nbytes for param in self._kept() if not param.requires_grad), default=0)

    def _model_bytes(self) -> int:
        return sum(param.nbytes for param in self._kept())

    def _require_room(self, places: Places) -> None:
        in_memory, on_drive = places.in_memory, places.on_drive
        needed = sum(in_memory.values())
        if needed > self.free:
            rows = ", ".join(f"{size_text(its)} for {what}" for what, its in in_memory.items())
            raise ResourceExhausted(
                f"host memory has no room for this run: it takes {size_text(needed)} without "
                f"activations ({rows}), and {size_text(self.free)} are free: "
                f"{self._advice(needed, in_memory)}"
            )
        if self.path is None:
            return
        folder = os.path.abspath(self.path)
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        # A run that goes on from a store writes into its files. Parameters and gradients have others, which
        # are made at each start.
        stored = sum(bytes_in_store(store) for store in (self.path, *added_stores(self.path)))
        needed, free = sum(on_drive.values()), shutil.disk_usage(folder).free
        there = min(stored, on_drive.get(IN_SLOTS, 0))
        if needed > free + there:
            beside = f" beside {size_text(there)} of the store that is there" if there else ""
            raise ResourceExhausted(
                f"the drive of {self.path} has no room for this run: it takes {size_text(needed)} there, and "
                f"{size_text(free)} are free{beside}: give a directory on another drive, or free some space"
            )

    def _advice(self, needed: int, in_memory: dict[str, int]) -> str:
        smallest = self.division.smallest()[0]
        fitting = in_memory.get(IN_USE, 0) - (needed - self.free)
        if self.homes.params == "host" and not self.lives_in_units:
            units = max(smallest, sum(unit.size_bytes for unit in self.division.units))
            larger = replace(self, memory_bytes=units).plan(has_room=True)
            if sum(larger.in_host_memory.values()) <= self.free:
                return f"give memory={units}, in which all parameters then live, once"
        if fitting >= smallest:
            return f"give memory={fitting}, or less; the smallest that works is {smallest}"
        if not self.state_on_drive:
            return 'give the optimizer placement="nvme:/path"'
        if self.homes.params == "host":
            return 'give offload() placement="nvme"'
        if self.homes.grads != "nvme":
            return 'give offload() placement="params=nvme,grads=nvme"'
        return f"memory={smallest} is the smallest that works, and host_memory may be less"
