# SPDX-License-Identifier: Apache-2.0
"""Reads the state of an optimizer's parameters from the engine, as torch.optim has it, and loads
it.

Records of an engine do not change between two steps. Loaded state is written into them by the next
step, as a whole, so a process that is killed before that leaves the old generation.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ziggurat._library.native import InvalidArgument, ResourceExhausted, Unimplemented
from ziggurat._library.state_kinds import moments_of, optimizers
from ziggurat._memory.memory import free_bytes, size_text
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.sharing import Alone
from ziggurat._pytorch.dtensor import is_dtensor, local_of
from ziggurat._pytorch.names import made_up, ours_by_number

_REFERENCE = "ziggurat"  #: the key in a state dict that says where the state is

Entry = Mapping[str, Any]  #: what torch.optim keeps for one parameter


class StateOfParams(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """``optimizer.state`` as scripts read it. Each access reads the entry from the engine into a
    copy, so a write changes only the copy. It must not look empty, because PyTorch's functions for
    distributed checkpoints then make a step."""

    def __init__(self, optimizer: StateDicts) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._optimizer.state_of(param)  # empty if there is no state, as in PyTorch

    def __setitem__(self, param: torch.Tensor, entry: Entry) -> None:
        """Accepts what the engine has already, as scripts write that move the state to a device.
        Errors: InvalidArgument for another value."""
        now = self[param]
        if now.keys() != entry.keys() or not all(
            torch.equal(torch.as_tensor(entry[name]).cpu(), torch.as_tensor(now[name]).cpu())
            for name in now
        ):
            raise InvalidArgument(
                "optimizer.state cannot be changed by assignment, because the engine has the state: "
                "change it with load_state_dict()"
            )

    def __contains__(self, param: object) -> bool:
        return isinstance(param, torch.Tensor) and self._optimizer._has_state(param)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for param in self._optimizer._order if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)


class StateDicts(torch.optim.Optimizer):
    """The part of an engine's optimizer that reads and loads its state."""

    _kind: str
    _path: str | None
    _settings: dict[str, Any]
    _opened: list[Opened]
    _opened_with: dict[torch.Tensor, Opened]
    _sharing: Alone
    _order: list[torch.Tensor]
    _resume: Any
    _without_state = False  #: while PyTorch makes a state dict of the groups alone
    #: Advice for an error that refuses a reference.
    _other_store = (
        "load the checkpoint that was saved then, because a store keeps only its newest "
        'generation; state="full" saves the whole state'
    )

    def _named(self) -> Iterable[tuple[str, torch.Tensor, int]]:
        raise NotImplementedError

    def open(self, *, resume: bool | str = False) -> None:
        raise NotImplementedError

    def need_store(self, who: str) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError

    def _awaits_ddp(self) -> bool:
        raise NotImplementedError

    def _keep_state_in(self, where: str) -> None:
        """Chooses at construction what state dicts hold: "full" is the state, "store" the name of
        its store."""
        if where not in ("full", "store"):
            raise InvalidArgument(f'state="{where}": give "full" or "store"')
        if where == "store" and self._path is None:
            raise InvalidArgument(
                'state="store" needs a store, but placement="host" makes none: give '
                'placement="nvme:/path", or state="full"'
            )
        self._by_reference = where == "store"
        if self._by_reference:
            self.need_store('state="store"')
        self._to_load: dict[torch.Tensor, Entry] = {}  # state of parameters that no engine has yet
        self._reference: Mapping[str, Any] | None = None  # loaded before the ranks were known

    # Reading

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        return {} if self._without_state else StateOfParams(self)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value or self.state:  # torch.optim.Optimizer's constructor assigns an empty state
            raise InvalidArgument(
                "optimizer.state cannot be assigned, because the engine has the state: change it "
                "with load_state_dict(), or make a new optimizer to begin without state"
            )

    def _has_state(self, param: torch.Tensor) -> bool:
        opened = self._opened_with.get(param)
        if opened is None:
            return param in self._to_load
        return opened.steps_of(param) > 0 or self._begins_with_state()

    def has_state_of(self, param: torch.Tensor) -> bool:
        """Returns whether state_of() returns something, without reading it."""
        if param not in self._opened_with:
            return bool(self._to_load.get(param))
        return self._begins_with_state() or self._opened_with[param].steps_of(param) > 0

    def _begins_with_state(self) -> bool:
        """Returns whether there is state before the first step, as Adagrad's sums."""
        return optimizers()[self._kind].initial_accumulator

    def state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what ``torch.optim`` has in ``optimizer.state[param]``, in fp32: "step", the
        moments under their names there, and "master" if the parameter is not fp32. Empty before its
        first step. The state is on the CPU, because it may not fit elsewhere; PyTorch moves what it
        loads.

        For a parameter that is divided among ranks it is the whole state; the other ranks need not
        call anything. For FSDP2's parameters the tensors are DTensors like the parameter."""
        if param not in self._opened_with:
            return dict(self._to_load.get(param, {}))
        if not self.has_state_of(param):
            return {}
        opened = self._opened_with[param]
        state = {"step": torch.tensor(float(opened.steps_of(param)), device="cpu")}
        for name in moments_of(self._kind):
            state[name] = self._sharing.whole_state(opened, param, name)
        if param.dtype != torch.float32:
            loaded = opened.masters.get(param)
            if loaded is None:
                state["master"] = self._sharing.whole_state(opened, param, "master")
            else:
                state["master"] = loaded.detach().to("cpu", torch.float32, copy=True)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Returns a state dict like ``torch.optim``'s, with every parameter's state
        (:meth:`state_of`), in memory.

        With ``state="store"`` it is :meth:`reference` instead. Loaded state is in no store before
        the next step, so until then the state dict holds it. Errors: ResourceExhausted if the
        state does not fit into the free memory.
        """
        loaded = bool(self._to_load) or any(opened.loaded for opened in self._opened)
        if self._by_reference and not loaded:
            return self.reference()
        self.look_at_memory(param for param in self.state if param in self._opened_with)
        return super().state_dict()

    def look_at_memory(self, params: Iterable[torch.Tensor]) -> None:
        """Checks the free memory first, because the kernel would end the process in mid-save.
        Errors: ResourceExhausted if the whole state of `params` does not fit beside what is in
        memory."""
        moments = len(moments_of(self._kind))
        needed = sum(4 * p.numel() * (moments + (p.dtype != torch.float32)) for p in params)
        if needed > (free := free_bytes()):
            raise ResourceExhausted(
                f"state_dict(): the whole state takes {size_text(needed)} of memory beside the "
                f'optimizer\'s own, but only {size_text(free)} are free: give '
                'placement="nvme:/path" and state="store", which saves the store\'s name instead'
            )

    def reference(self) -> dict[str, Any]:
        """Returns a state dict that names the store, its generation and a checksum of the
        parameters.

        ``load_state_dict()`` can load it as long as the store is at that generation. All ranks
        call this, because it makes the store durable; with FSDP2 each rank gets its own. Errors:
        InvalidArgument if a parameter has another value than its master in the store.
        """
        self.synchronize()
        self._look_at_written()
        for opened in self._opened:
            # With Resume, a step becomes durable once the loop continues.
            if self._resume is None or not self._resume.awaited:
                opened.engine.make_durable()
        reference = {
            "store": os.path.abspath(str(self._path)),
            "ranks": 1 if self._sharing.ranks is None else self._sharing.ranks.size,
            "generations": self._generations(),
            "checksum": self._checksum(),
        }
        return Groups(self).state_dict() | {_REFERENCE: reference}

    def _look_at_written(self) -> None:
        """Compares with the whole master, because Trainer lets one rank alone make a state dict."""
        for opened in self._opened:
            names = opened.loaded_names()
            for param in opened.written():
                master = self._sharing.whole_state(opened, param, "master")
                master = local_of(master) if is_dtensor(master) else master
                if not opened.rounds_to(master, self._sharing.values(param)):
                    names.append(opened.name_of(param))
            if names:
                raise InvalidArgument(
                    f"state_dict(): parameter '{names[0]}' was written since the newest step, so the "
                    'store does not have its value: make a step first, or use state="full"'
                )

    def _generations(self) -> list[int]:
        return [opened.engine.generation for opened in self._opened]

    def _checksum(self) -> int:
        """Returns a checksum of all parameters, because stores of two runs may be at the same
        generation."""
        return self._sharing.checksum(self._opened_with)

    # Loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict that :meth:`state_dict` or ``torch.optim``'s optimizer gave.

        Parameters are matched by ``param_names`` if the state dict has the names of this
        optimizer's parameters. They are matched in PyTorch's order if it has none of these names,
        or no names.

        The next step uses the loaded state, and makes it durable. A "master" is used if it rounds
        to the parameter as it is at that step; in bf16 the parameter may be either neighbour of the
        "master". Otherwise, or without a "master", the parameter becomes the master. Parameters
        without an entry start from the beginning. Errors: InvalidArgument for another optimizer's
        state, for a state dict that has some of the names and lacks others, and for a store that is
        at another generation.
        """
        self._between_hooks(self._take_over, state_dict)

    def _between_hooks(
        self, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
    ) -> None:
        """Calls `load` between the hooks that a script has registered, because PyTorch would call
        the hooks with an empty state."""
        state_dict = dict(state_dict)
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        load(state_dict)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        reference = state_dict.get(_REFERENCE)
        if reference is not None and "checkpoint" in reference:
            folder = reference["checkpoint"]
            raise InvalidArgument(
                f"load_state_dict(): the state is not in this state dict but in the folder {folder} of "
                "the same checkpoint of Trainer: make Trainer's optimizer with ziggurat.hf.optimizer(), or "
                "load the folder with ziggurat.torch.load_checkpoint()"
            )
        state_dict = self.in_order(state_dict)
        entries = self._entries(state_dict)
        if reference is not None:
            self._look_at_ranks(reference)
            if self._awaits_ddp() and reference["generations"]:
                self._reference = reference  # the store belongs to DDP's ranks
            else:
                self._look_at_reference(reference)
        self._load_groups(state_dict)
        if reference is None:
            self._to_load = {param: entry for param, entry in entries.items() if entry}
            for opened in self._opened:
                self._give(opened, entries)

    def in_order(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Puts a state dict's groups and their parameters into this optimizer's order, if both name
        them.

        Errors: InvalidArgument if only some of the names are the same."""
        groups, ours = state_dict["param_groups"], {name: p for name, p, _ in self._named()}
        if not all("param_names" in group for group in groups) or made_up(ours):
            return state_dict
        saved = {
            number: name
            for group in groups
            for number, name in zip(group["params"], group["param_names"], strict=True)
        }
        if not saved or len(set(saved.values())) < len(saved):
            return state_dict
        found = ours_by_number(saved, ours)
        if found is None:
            warnings.warn(
                "load_state_dict(): the state dict names none of this optimizer's parameters, so "
                "they are matched in their order, as in PyTorch",
                stacklevel=3,
            )
            return state_dict
        numbers = {param: number for number, param in found.items()}
        members = [{found[number] for number in group["params"]} for group in groups]
        wanted = [set(group["params"]) for group in self.param_groups]
        if all(own in members for own in wanted):  # groups may have changed places, too
            settings = [groups[members.index(own)] for own in wanted]
        elif [len(own) for own in wanted] == [len(own) for own in members]:
            settings = groups
        else:
            return state_dict  # PyTorch reports groups that do not fit
        ordered = [
            {**its, "params": [numbers[param] for param in group["params"]]}
            for its, group in zip(settings, self.param_groups, strict=True)
        ]
        return {**state_dict, "param_groups": ordered}

    def _load_groups(self, state_dict: dict[str, Any]) -> None:
        """Loads the groups' settings; `state_dict` comes from in_order()."""
        names = [group.get("param_names") for group in self.param_groups]
        hooks = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        try:
            super().load_state_dict({**state_dict, "state": {}})
        finally:
            pre, post = hooks
            self._optimizer_load_state_dict_pre_hooks = pre
            self._optimizer_load_state_dict_post_hooks = post
        for group, own in zip(self.param_groups, names, strict=True):
            # PyTorch would take the saved names, which may belong to another order of parameters.
            if own is None:
                group.pop("param_names", None)
            else:
                group["param_names"] = own
            # settings that another optimizer's groups may lack
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def _look_at_ranks(self, reference: Mapping[str, Any]) -> None:
        made_by, here = reference.get("ranks"), 1
        if self._sharing.ranks is not None:
            here = self._sharing.ranks.size
        elif self._awaits_ddp():
            here = dist.get_world_size()
        if made_by in (None, here) or not reference["generations"]:
            return
        raise InvalidArgument(
            f"load_state_dict(): the state is in the store {reference['store']} of {made_by} "
            f"ranks, but this run has {here}: start {made_by} ranks, or save with "
            'state="full", whose checkpoints any number of ranks can load'
        )

    def ddp_attached(self) -> None:
        """Checks a loaded reference that waited for the ranks, which are known now."""
        reference, self._reference = self._reference, None
        if reference is not None:
            self._look_at_reference(reference)

    def _look_at_reference(self, reference: Mapping[str, Any]) -> None:
        store, wanted = reference["store"], list(reference["generations"])
        if wanted and not self._opened:
            if self._path is None or not os.path.isdir(self._path):
                raise InvalidArgument(
                    "load_state_dict(): the state is not in this checkpoint but in the store "
                    f'{store}: give placement="nvme:{store}", or save with state="full"'
                )
            self.open(resume=True)
        self.synchronize()
        found = self._generations()
        if found != wanted or self._checksum() != reference["checksum"]:
            other = f"is at generation {found}" if found != wanted else "has other parameters"
            raise InvalidArgument(
                f"load_state_dict(): the checkpoint belongs to generation {wanted} of the store "
                f"{store}, but the store {self._path} {other}: {self._other_store}"
            )

    def _entries(self, state_dict: Mapping[str, Any]) -> dict[torch.Tensor, Entry]:
        """Returns what is to be loaded for each parameter that has an entry. Errors: what does not
        fit."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise Unimplemented("load_state_dict(): amsgrad is not supported yet")
        entries: dict[torch.Tensor, Entry] = {}
        # PyTorch reports different numbers of parameters.
        for index, (name, param, _) in zip(saved, self._named(), strict=False):
            entry = state_dict["state"].get(index, {})
            kept = {key: value for key, value in entry.items() if value is not None}
            if set(kept) - {"step"}:
                self._look_at_entry(name, param, kept)
                entries[param] = kept
        return entries

    def _look_at_entry(self, name: str, param: torch.Tensor, entry: Entry) -> None:
        wanted = moments_of(self._kind)
        if missing := [moment for moment in wanted if moment not in entry]:
            raise InvalidArgument(
                f"load_state_dict(): the state of parameter '{name}' has {', '.join(entry)}, but "
                f"no {', '.join(missing)}: it is not the state of an optimizer of the kind "
                f"{self._kind}"
            )
        for key in (*wanted, "master"):
            if key in entry and entry[key].shape != param.shape:
                raise InvalidArgument(
                    f"load_state_dict(): '{key}' of parameter '{name}' has the shape "
                    f"{tuple(entry[key].shape)}, but the parameter has {tuple(param.shape)}"
                )

    def _first_entry(self, param: torch.Tensor) -> Entry:
        """Returns the state of a parameter that has made no step."""
        begin = torch.full(
            param.shape, self._settings.get("initial_accumulator", 0.0), dtype=torch.float32
        )
        return {name: begin for name in moments_of(self._kind)} | {"step": 0}

    def _give_loaded(self, opened: Opened) -> None:
        """Gives loaded state to an engine that was just opened; an engine that resumed has its
        own."""
        given = {p: self._to_load[p] for p in opened.members if p in self._to_load}
        if not opened.engine.resumed:
            self._give(opened, given, fresh=True)
        for param in given:
            self._to_load.pop(param, None)

    def _give(
        self, opened: Opened, entries: Mapping[torch.Tensor, Entry], fresh: bool = False
    ) -> None:
        loaded = opened.loaded
        for param in opened.members:
            entry = entries.get(param)
            if entry is None:
                if fresh or not (loaded or opened.steps_of(param)):
                    continue  # the parameter starts from the beginning without a state
                entry = self._first_entry(param)
            opened.loaded = True
            for name in moments_of(self._kind):
                opened.write_state(param, name, entry[name])
            # PyTorch's SGD counts no steps: all steps but the first are alike.
            opened.set_steps(param, int(entry.get("step", 1)))
            opened.masters.pop(param, None)
            if param.dtype != torch.float32:
                if "master" in entry:
                    opened.masters[param] = entry["master"]
                else:
                    opened.becomes_master(param)
            self._to_load.pop(param, None)


class Groups:
    """The groups of an optimizer alone, for those who keep them beside its store."""

    def __init__(self, optimizer: StateDicts) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        self._optimizer._without_state = True  # PyTorch would put all of it into the state dict
        try:
            return torch.optim.Optimizer.state_dict(self._optimizer)
        finally:
            self._optimizer._without_state = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        its = self._optimizer
        its._between_hooks(lambda given: its._load_groups(its.in_order(given)), state_dict)
