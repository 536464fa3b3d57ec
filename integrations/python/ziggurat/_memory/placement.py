# SPDX-License-Identifier: Apache-2.0
"""Decides where an optimizer's state is kept: what ``placement`` names, or what the engine chooses
for "auto"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ziggurat._library.native import InvalidArgument, Param, PlacementChoice, choose_placement
from ziggurat._library.standard_error import stderr
from ziggurat._library.words import in_arguments
from ziggurat._memory.memory import free_bytes


def parsed(placement: str) -> tuple[str, str | None]:
    """Returns the tier ("auto" if it is not chosen yet), and the directory if one was named."""
    if placement in ("host", "auto"):
        return placement, None
    tier, _, path = placement.partition(":")
    if tier in ("nvme", "auto") and path:
        return tier, path
    raise InvalidArgument(
        f'placement="{placement}": give "host", "nvme:/path" with a directory, "auto", or '
        '"auto:/path"'
    )


AUTO = "auto"  #: in place of a tier or a size: the planner chooses it


class Homes(NamedTuple):
    """Where an offloaded model's parameters and their gradients are: "host" or "nvme"."""

    params: str  #: AUTO until it is chosen
    grads: str | None  #: None: where there is room

    def lives_in_units(self, fits: bool) -> bool:
        """Returns whether parameters live in the memory for units, because it is given in memory that the
        parameters are in anyway, and `fits` them all. Then nothing is brought, and nothing is there twice."""
        return self.params == "host" and fits

    @classmethod
    def of(cls, placement: str) -> Homes:
        """Reads "host", "nvme", "auto", or "params=nvme,grads=nvme". Errors: InvalidArgument for anything
        else."""
        named = placement if "=" in placement else f"params={placement}"
        given = {name: tier for name, _, tier in (part.partition("=") for part in named.split(","))}
        repeated = named.count("=") != len(given)
        if not repeated and given.keys() <= {"params", "grads"} and set(given.values()) <= {"host", "nvme", AUTO}:
            grads = given.get("grads", AUTO)
            return cls(given.get("params", "host"), None if grads == AUTO else grads)
        raise InvalidArgument(
            f'offload(placement="{placement}"): give "host", or "nvme" to keep parameters in the '
            'directory of the optimizer\'s state; with gradients, as in "params=nvme,grads=nvme"; or "auto"'
        )


def chosen(
    params: Sequence[Param],
    settings: Mapping[str, Any],
    path: str | None,
    free: int | None = None,
) -> PlacementChoice:
    """Returns what the engine would choose for the state of `params`, with a drive if there is a
    `path`, while `free` bytes of memory are free; None: those that are now. Errors: InvalidArgument or
    ResourceExhausted if the state does not fit and there is no directory."""
    store = {} if path is None else {"store": path}
    free = free_bytes() if free is None else free
    return choose_placement(params, {**settings, **store}, free, words=in_arguments)


def room_beside_nvme(choice: PlacementChoice, streamed_bytes: int) -> int | None:
    """Returns the host_memory of a state on NVMe if nobody gives it; None: what the engine takes by
    itself. `streamed_bytes` are what an offloaded model's parameters take there beside it."""
    room = choice.beside_nvme_bytes
    return room + streamed_bytes if room else None


def fits_half(size_bytes: int, free: int) -> bool:
    """Returns whether something that nobody has placed may take so much memory: half of what is
    free."""
    return size_bytes <= free / 2


def sums_bytes(trained: Iterable[Any]) -> int:
    """Returns what the gradients of parameters take if they are sums of several backwards."""
    return sum(4 * int(param.numel()) for param in trained)


def has_store(path: str) -> bool:
    return ranks_in(path) > 0


def ranks_in(path: str) -> int:
    """Counts the ranks that have a file of the store in `path`: on node-local storage, those of
    this node."""
    return len(_files_of_ranks(path))


def bytes_in_store(path: str) -> int:
    """Returns what the store in `path` takes of the drive: nothing if there is none."""
    return sum(512 * file.stat().st_blocks for file in _files_of_ranks(path))


def _files_of_ranks(path: str) -> list[Path]:
    return list(Path(path).glob("rank*.ziggurat"))


def added_stores(path: str) -> list[str]:
    """Returns the directories in `path` that have stores of parameters that were added later."""
    return sorted(str(folder) for folder in Path(path).glob("added-*") if has_store(str(folder)))


def host_or_drive(
    params: Sequence[Param], settings: Mapping[str, Any], path: str | None
) -> tuple[bool, str]:
    """Returns whether "auto" takes host memory, else the drive, and why.

    Errors: those of chosen().
    """
    if path is not None and has_store(path):
        # Keeps to the store: a machine with more free memory than before would silently start from
        # the beginning.
        return False, "the directory already has a store"
    choice = chosen(params, settings, path)
    return "optimizer=host" in choice.placement, in_arguments(choice.why)


def fits_host(params: Sequence[Param], settings: Mapping[str, Any], path: str | None) -> bool:
    """Returns whether "auto" takes host memory, as host_or_drive() does, and prints the choice."""
    fits, why = host_or_drive(params, settings, path)
    say("host" if fits else f"nvme:{path}", why)
    return fits


def say(placement: str, why: str) -> None:
    """Prints a choice on standard error, where a job's log has it too. Logging would hide it by
    default, and a choice is no reason for a warning."""
    print(f'ziggurat: placement "{placement}": {why}', file=stderr())
