# SPDX-License-Identifier: Apache-2.0
"""Divides a model into units: modules whose parameters are brought and let go together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat._library.packing import TILE, in_records, staggered
from ziggurat._memory.frozen_files import LEAST_BYTES, FileMappings, FileRange
from ziggurat._ranks.cuts import Cut
from ziggurat._units.refusals import check_params
from ziggurat._units.tile_choice import Rows, Tiles, require_own, rows_of, tiled_in
from ziggurat._units.unit_choice import Choice, chosen_in, experts_in, is_table, used_uncalled

ROOT = "(root)"  #: the unit of all parameters that no other unit has

_CPU = torch.device("cpu")
_SPARE_BYTES = 1 << 20
PRINT_WORDS = 256  #: of 8 bytes in a row of what a unit is compared with (_streaming/prints.py)
_STAGED = 2  # units on their way to a GPU: one is put together, one is copied
_LINE = 64  # bytes: where a whole parameter can begin (core/engine/lent/whole_layout.cc)


class UnitPart(NamedTuple):
    """Parameters of a unit that share a record: one, or several small ones."""

    first: str  #: the first one's name
    elements: int  #: with the gaps between parameters
    tiles: int
    members: int
    itemsize: int
    trained: bool
    by_rows: bool  #: whether the engine is lent it, and brings nothing of it
    whole_bytes: int  #: what is brought of it: of slices, the whole parameters
    added: bool = False  #: whether it came after offload(), and stays in PyTorch's memory

    @property
    def home_bytes(self) -> int:
        """Returns the bytes of the parameters, or of this rank's slices, where they are kept."""
        return self.whole_bytes if self.by_rows else self.tiles * TILE * self.itemsize


class Unit:
    """Parameters that are brought together. Which module has them, an Entry says."""

    def __init__(self, index: int, name: str, is_expert: bool = False) -> None:
        self.index = index
        self.name = name
        self.is_expert = is_expert  #: whether a forward calls it for some batches only
        self.params: list[tuple[str, torch.nn.Parameter]] = []
        #: whether those that are trained have gaps between them, for blocks of 8-bit codes
        self.own_blocks = False
        #: those that the engine does not have
        self.in_files: frozenset[torch.nn.Parameter] = frozenset()
        self.is_table = False  #: whether it is an embedding's weight, which nothing else uses
        #: whether a forward reads the rows of a table where they lie, and nothing brings the whole
        self.by_rows = False
        self.is_linear = False  #: whether it is a linear layer, which nothing else uses
        #: if it is one that is used tile by tile: which rows of its weight each has. It is read by rows too.
        self.tiles: list[Rows] = []
        self.number = index  #: in the engine, which has only units of which it has something
        self.ranks = 1  #: of which each keeps a slice of each parameter
        #: what the optimizer trains whose engine has the unit; None: what requires a gradient
        self.trained: frozenset[torch.Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        """Returns the memory that the unit takes while it is pinned."""
        return sum(self.pieces()) + self.bytes_in_files

    @property
    def bytes_in_files(self) -> int:
        """Returns the memory that it takes of what the engine does not bring."""
        if self.tiles:
            return self.tile_bytes
        return 0 if self.by_rows else sum(param.nbytes for param in self.in_files)

    @property
    def prints_bytes(self) -> int:
        """Returns what the unit is compared with as it is let go: of each parameter sums of rows and of columns, and
        the bytes that make no row."""
        row_bytes = 8 * PRINT_WORDS
        sizes = [param.nbytes for _, param in self.params if self.keeps(param)]
        return sum(row_bytes + 8 * (size // row_bytes) + size % row_bytes for size in sizes)

    @property
    def weight(self) -> torch.nn.Parameter:
        """Returns the matrix of a linear layer."""
        return next(param for _, param in self.params if param.dim() == 2)

    @property
    def tile_bytes(self) -> int:
        """Returns the bytes of the largest tile."""
        weight = self.weight
        return max(end - begin for begin, end in self.tiles) * (weight.nbytes // len(weight))

    def pieces(self) -> list[int]:
        """Returns the bytes of each piece of the engine's memory that the unit takes."""
        if self.by_rows:
            return []
        if self.ranks == 1:
            return [staggered(part.home_bytes) for part in self.parts()]
        return [staggered(self.whole_bytes)] if self.whole_bytes else []

    @property
    def whole_bytes(self) -> int:
        """Returns the bytes of the unit as it is put together of several ranks' slices."""
        return sum(-(-param.nbytes // _LINE) * _LINE for _, param in self.params if self.keeps(param))

    def keeps(self, param: torch.Tensor) -> bool:
        """Returns whether the engine keeps the parameter, which is one of these."""
        return not self.by_rows and param not in self.in_files

    def trains(self, param: torch.Tensor) -> bool:
        return param.requires_grad if self.trained is None else param in self.trained

    def parts(self) -> list[UnitPart]:
        """Returns what the engine brings and updates as one, of each type in the parameters' order.
        What is read by rows it only updates."""
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, int]]] = {}
        for name, param in self.params:
            if param in self.in_files:
                continue
            kind = (param.dtype, self.trains(param))
            kinds.setdefault(kind, []).append((name, param.numel()))
        return [part for kind, members in kinds.items() for part in self._parts_of(*kind, members)]

    def _parts_of(self, dtype: torch.dtype, trained: bool, members: list[tuple[str, int]]) -> list[UnitPart]:
        wholes = [count for _, count in members]
        own = [min(count, Cut(count, self.ranks).slice) for count in wholes] if self.ranks > 1 else wholes
        found = []
        for record in in_records(own, self.own_blocks and trained):
            whole = record.tiles * TILE  # with what lies between
            if self.ranks > 1:
                whole = sum(wholes[place] for place in record.places)
            found.append(
                UnitPart(
                    members[record.place][0],
                    record.end,
                    record.tiles,
                    record.members,
                    dtype.itemsize,
                    trained,
                    self.by_rows,
                    whole * dtype.itemsize,
                )
            )
        return found


class Entry:
    """A module at whose call units are pinned: its own, and those of parameters that it shares."""

    def __init__(
        self, module: torch.nn.Module, units: list[Unit], around: list[Unit], is_expert: bool
    ) -> None:
        self.module = module
        self.units = units
        self.around = around  #: the units of the entries that this one lies in
        self.is_expert = is_expert

    def pinned(self) -> set[Unit]:
        """Returns all units that are pinned while the module runs."""
        return {*self.units, *self.around}

    def between(self, pieces_of: Mapping[Unit, list[int]]) -> int:
        """Returns the most bytes that are of no use to the unit that comes last: beside the pieces
        of others there is one hole more than pieces, each smaller than the unit's largest piece."""
        pinned = self.pinned()
        count = sum(len(pieces_of[unit]) for unit in pinned)
        # Those around are there first. What is there alone lies in a row.
        last = [pieces_of[unit] for unit in self.units if len(pinned) > 1 and pieces_of[unit]]
        return max(((count - len(own) + 1) * max(own) for own in last), default=0)


class Division:
    """A model's units, and the entries in the order of the model's modules.

    `outer` are the modules around units, such as an encoder, that pin the root's unit if they are
    called by themselves."""

    def __init__(
        self,
        units: list[Unit],
        entries: list[Entry],
        outer: list[torch.nn.Module],
        brings_all: bool = False,
    ) -> None:
        self.units = units
        self.entries = entries
        self.outer = outer
        self.brings_all = brings_all  #: whether nothing can be used where it lies

    def require(self, memory_bytes: float, own_blocks: bool = False) -> None:
        """Checks the memory for units; `own_blocks` if the state is in 8 bits. Tables that it has no room
        for are read by rows, the largest first. Errors: InvalidArgument if it is too little, which says
        what works."""
        for unit in self.units:
            unit.own_blocks = own_blocks
        smallest, of_what = self.smallest()
        while smallest > memory_bytes and self.read_a_table_by_rows():
            smallest, of_what = self.smallest()
        if memory_bytes < smallest:
            raise InvalidArgument(
                f"memory={int(memory_bytes)} is too small for offload(): the smallest that works "
                f"is {smallest}, for {of_what}; give so much, or smaller units{self._tiles_that_help(memory_bytes)}"
            )
        number = 0
        for unit in self.units:
            unit.number = number
            number += not unit.by_rows and any(param not in unit.in_files for _, param in unit.params)

    def read_a_table_by_rows(self) -> bool:
        """Lets rows of the largest table that is still brought be read where they lie. Returns whether there was one."""
        tables = [unit for unit in self.units if unit.is_table and not unit.by_rows and not self.brings_all]
        largest = max(tables, key=lambda unit: unit.size_bytes, default=None)
        if largest is not None:
            largest.by_rows = True
        return largest is not None

    def _tiles_that_help(self, memory_bytes: float) -> str:
        """Returns words for the linear layer that too little memory would do for if it had tiles, if there is
        such a layer."""
        layers = [unit for unit in self.units if unit.is_linear and not unit.tiles]
        largest = max(layers, key=lambda unit: unit.size_bytes, default=None)
        if largest is None:
            return ""
        before, rows = largest.by_rows, len(largest.weight)
        try:
            for count in (1 << power for power in range(1, rows.bit_length())):
                largest.by_rows, largest.tiles = True, rows_of(rows, count)
                if self.smallest()[0] <= memory_bytes:
                    return f'; or tiles={{"{largest.name}": {count}}}, which brings that linear layer in {count} tiles'
        finally:
            largest.by_rows, largest.tiles = before, []
        return ""

    def set_ranks(self, ranks: int) -> None:
        """Sets how many ranks have a slice of each parameter."""
        for unit in self.units:
            unit.ranks = ranks

    def set_trained(self, trained: Iterable[torch.Tensor] | None) -> None:
        """Sets what an optimizer trains, while its engine is open. None: again what requires a gradient."""
        its = None if trained is None else frozenset(trained)
        for unit in self.units:
            unit.trained = its

    @property
    def staged_bytes(self) -> int:
        """Returns the host memory in which the engine puts units together of several ranks' slices, for a GPU
        (core/plan/host_plan.cc)."""
        return staggered(_STAGED * max(unit.whole_bytes for unit in self.units))

    def fits(self, memory_bytes: int) -> bool:
        """Returns whether there is room for all units at once."""
        return sum(unit.size_bytes for unit in self.units) <= memory_bytes

    def stays(self, memory_bytes: int) -> bool:
        """Returns whether all units that ranks have put together stay until a step changes all of them, so
        that there are never holes between them."""
        return self.fits(memory_bytes) and all(unit.trains(param) for unit in self.units for _, param in unit.params)

    def keeps_tiles(self, unit: Unit, memory_bytes: int) -> bool:
        """Returns whether there is room for all tiles of a unit beside all other units."""
        left_bytes = memory_bytes - sum(one.size_bytes for one in self.units)
        return left_bytes >= unit.weight.nbytes - unit.tile_bytes

    def leave_in_files(
        self, trained: Container[torch.Tensor], also_meta: bool = False
    ) -> dict[torch.Tensor, FileRange]:
        """Takes the large parameters that are not `trained` from the engine if their memory is a mapping
        of a file, and `also_meta` those that have no memory yet. Returns where they are."""
        mappings, places = FileMappings(), {}
        for unit in () if self.brings_all else self.units:
            large = [param for _, param in unit.params if param.nbytes >= LEAST_BYTES]
            found = {param: mappings.of(param) for param in large if param not in trained}
            stay = {param: place for param, place in found.items() if place is not None}
            unit.in_files = frozenset(stay).union(param for param in found if also_meta and param.is_meta)
            unit.by_rows = bool(unit.tiles) or (unit.is_table and bool(unit.in_files))
            places.update(stay)
        return places

    def smallest(self) -> tuple[int, str]:
        """Returns the least memory with which every entry runs while the next one is brought, and
        words that say for what."""
        return self._smallest(lambda unit: unit.bytes_in_files)

    def _smallest(self, beside: Callable[[Unit], int]) -> tuple[int, str]:
        """Does what smallest() does, of what the engine has and what is `beside` it."""
        pieces = {unit: unit.pieces() for unit in self.units}
        sizes = {unit: sum(own) + beside(unit) for unit, own in pieces.items()}
        needs = [
            (sum(sizes[unit] for unit in one | other), one, other - one, 0)
            for one, other in self._following()
        ]
        # What is there already may lie anywhere, so that of each hole a part is of no use.
        apart = [(entry.pinned(), entry.between(pieces)) for entry in self.entries]
        needs += [
            (sum(sizes[unit] for unit in one) + between, one, set(), between)
            for one, between in apart
        ]
        most, units, following_units, between = max(needs, key=lambda need: need[0])
        words = [_told(unit) for unit in sorted(units, key=lambda unit: unit.name != ROOT)]
        words += [f"the next, {_told(unit)}" for unit in following_units]
        if between:
            words.append(f"and {between} bytes between what lies apart")
        return most, ", ".join(words)

    def taken_by_engine(self, memory_bytes: int, all_stay: bool) -> int:
        """Returns what the engine takes of the memory for units, at once. Where `all_stay` it has no use for more
        than they need, and where they come and go for little more."""
        if not any(unit.pieces() for unit in self.units):
            return 0
        share_bytes = min(memory_bytes, self.share_of_engine(memory_bytes))
        most = self.all_bytes if all_stay else max(self.smallest()[0], 2 * self.all_bytes)
        return min(share_bytes, most)

    def share_of_engine(self, memory_bytes: int) -> int:
        """Returns how much of the memory, which is enough, the engine gets: what it needs for all that
        it has, as far as what stays in files leaves so much."""
        if not any(unit.in_files or unit.tiles for unit in self.units):
            return memory_bytes
        least, _ = self._smallest(lambda unit: 0)
        return max(least, min(memory_bytes - self._most_in_files(), self.all_bytes))

    @property
    def all_bytes(self) -> int:
        """Returns what all units take of the engine's memory."""
        # Pieces differ in their low bits of the address, and the last ends with a page.
        return sum(sum(unit.pieces()) for unit in self.units) + _SPARE_BYTES

    @property
    def ample_bytes(self) -> int:
        """Returns the memory with which all units are there at once, wherever what comes and goes lies."""
        return max(self.smallest()[0], self.all_bytes, sum(unit.size_bytes for unit in self.units))

    def _following(self) -> list[tuple[set[Unit], set[Unit]]]:
        """Returns what is pinned together, and what is brought meanwhile."""
        pinned = [entry.pinned() for entry in self.entries]
        return [*pairwise(pinned[1:]), *((one, set()) for one in pinned)]  # after the root's

    @property
    def prints_bytes(self) -> int:
        """Returns what the units in use are compared with, at most."""
        return self._most_of({unit: unit.prints_bytes for unit in self.units})

    def _most_in_files(self) -> int:
        return self._most_of({unit: unit.bytes_in_files for unit in self.units})

    def _most_of(self, sizes: Mapping[Unit, int]) -> int:
        return max(sum(sizes[unit] for unit in one | other) for one, other in self._following())


def divide(
    model: torch.nn.Module,
    choice: Choice,
    *,
    tiles: Tiles | None = None,
    also_meta: bool = False,
    device: torch.device = _CPU,
    brings_all: bool = False,
    checks: bool = True,
) -> Division:
    """Divides `model` as `choice` says: "auto", names of modules, or whether the module of a name is
    a unit. Linear layers that have `tiles` are units too. `also_meta`: parameters may have no values.
    `device`: where units are brought to. `brings_all`: whether it cannot read a file, or the CPU's memory.
    `checks`: whether parameters must be such as the engine can keep; without, the division only tells what units are.
    Errors: InvalidArgument for a name that the model does not have, and parameters that cannot be in
    a unit; Unimplemented for a layer that cannot have tiles."""
    tiled = tiled_in(model, tiles or {})
    asked = chosen_in(model, choice) | {module: name for module, (name, _) in tiled.items()}
    chosen = {module: asked[module] for module in model.modules() if module in asked}
    named = _named_once(model)
    if checks:
        check_params(named, device, also_meta)
    homes: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    found = list(_innermost(model, chosen))
    for module, innermost in found:
        for user in (module, *used_uncalled(module)):
            for param in user.parameters(recurse=False):
                if param in named and innermost not in homes.setdefault(param, []):
                    homes[param].append(innermost)
    experts = experts_in(model)
    units = {model: Unit(0, ROOT)}
    for module, name in chosen.items():
        units[module] = Unit(0, name, module in experts)
    for param, name in named.items():
        # What the rest of the model uses as well is there as long as the model runs.
        owner = model if model in homes[param] else homes[param][0]
        units[owner].params.append((name, param))
    for module, (name, _) in tiled.items():
        require_own(module, name, named, homes)
    for module, unit in units.items():
        is_alone = all(homes[param] == [module] for _, param in unit.params)
        unit.is_table = is_table(module) and is_alone
        unit.is_linear = type(module) is torch.nn.Linear and module is not model and is_alone
        if module in tiled:
            unit.by_rows, unit.tiles = True, tiled[module][1]
    kept = [unit for unit in units.values() if unit.params]
    for index, unit in enumerate(kept):
        unit.index = unit.number = index
    outer = _outer((module for module, innermost in found if innermost is model), units)
    return Division(kept, _entries(model, units, homes), outer, brings_all)


def _outer(
    modules: Iterable[torch.nn.Module], units: Container[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Returns those of `modules` that are no units, and around some."""
    known: dict[torch.nn.Module, bool] = {}

    def has_units(module: torch.nn.Module) -> bool:
        if module not in known:
            known[module] = any(one in units or has_units(one) for one in module.children())
        return known[module]

    return [one for one in modules if one not in units and has_units(one)]


def _nesting(
    model: torch.nn.Module, units: Container[torch.nn.Module]
) -> dict[torch.nn.Module, list[torch.nn.Module]]:
    """Returns for each unit's module those of the units in which it lies."""
    within: dict[torch.nn.Module, dict[torch.nn.Module, None]] = {}
    stack: list[tuple[torch.nn.Module, tuple[torch.nn.Module, ...]]] = [(model, ())]
    seen = set()
    while stack:
        module, around = one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if module in units:
            within.setdefault(module, {}).update(dict.fromkeys(around))
            around = (*around, module)
        stack.extend((child, around) for child in module.children())
    return {module: list(others) for module, others in within.items()}


def _entries(
    model: torch.nn.Module,
    units: dict[torch.nn.Module, Unit],
    homes: dict[torch.nn.Parameter, list[torch.nn.Module]],
) -> list[Entry]:
    used: dict[torch.nn.Module, list[Unit]] = {module: [] for module in units}
    for unit in units.values():
        for _, param in unit.params:
            for module in homes[param]:
                if unit not in used[module]:
                    used[module].append(unit)
    within = _nesting(model, units)
    entries = []
    for module, unit in units.items():
        around = [own for other in within[module] for own in used[other]]
        # The root has an entry without parameters too: it opens the engine.
        if used[module] or module is model:
            around = list(dict.fromkeys(around))
            entries.append(Entry(module, used[module], around, unit.is_expert))
    return entries


def _innermost(
    model: torch.nn.Module, chosen: dict[torch.nn.Module, str]
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Yields each module, as often as it is in the model, with the innermost unit around it."""
    stack = [(model, model)]
    seen = set()
    while stack:
        module, around = stack.pop()
        around = module if module in chosen else around
        if (module, around) in seen:
            continue
        seen.add((module, around))
        yield module, around
        stack.extend((child, around) for child in reversed(list(module.children())))


def _named_once(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Returns the parameters that have elements. The others stay where they are."""
    return {param: name for name, param in model.named_parameters() if param.numel()}


def _told(unit: Unit) -> str:
    return f"unit '{unit.name}' with {unit.size_bytes} bytes"
