# SPDX-License-Identifier: Apache-2.0
"""Keeps in every generation what a run needs beside the engine's state to continue with the same
bits."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from ziggurat._library.native import DataLoss, InvalidArgument, ZigguratError
from ziggurat._library.standard_error import stderr
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.state import Groups

_FORMAT = 1
_BYTES_MAX = 1 << 20  # what a store holds beside the state: kTrainerBlobBytes of the engine


def accelerators() -> Iterator[tuple[str, Any]]:
    """Yields the kinds of accelerator on this machine that have random generators of their own."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            yield name, module


def random_states() -> dict[str, Any]:
    """Returns the state of every generator that a script uses without naming it."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    for name, module in accelerators():
        states[name] = module.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    for name, module in accelerators():
        if name in states:
            module.set_rng_state_all(states[name])


def _seed_of(kept: dict[str, Any], *facts: object) -> int:
    """Returns a seed made from that of PyTorch's generator in the random states `kept`, and from
    `facts`."""
    before = torch.Generator()
    before.set_state(kept["torch"])
    text = " ".join(str(fact) for fact in (before.initial_seed(), *facts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _seed_anew(seed: int) -> None:
    """Seeds every generator that a script uses without naming it."""
    torch.manual_seed(seed)  # of accelerators, too
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators that a loader's order is drawn from, in a fixed order."""
    samplers = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[2], "sampler", None))
    found: list[torch.Generator] = []
    for holder in samplers:
        generator = getattr(holder, "generator", None)
        if generator is not None and all(generator is not other for other in found):
            found.append(generator)
    return found


def _bytes_of(state: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


class _PackedNames:
    """The names of the optimizer's parameters, compressed: names of many thousand are alike."""

    def __init__(self) -> None:
        self._names: list[list[str] | None] | None = None
        self._packed = torch.empty(0, dtype=torch.uint8)

    def take_from(self, groups: dict[str, Any]) -> torch.Tensor:
        """Takes the names out of the groups' state dict, and returns them compressed. Compresses
        only when they have changed, because every step asks."""
        found = [group.pop("param_names", None) for group in groups["param_groups"]]
        names = [None if its is None else list(its) for its in found]
        if names != self._names:
            packed = bytearray(zlib.compress(json.dumps(names).encode()))
            self._names, self._packed = names, torch.frombuffer(packed, dtype=torch.uint8)
        return self._packed


def _put_names_back(groups: dict[str, Any], packed: torch.Tensor) -> None:
    names = json.loads(zlib.decompress(packed.numpy().tobytes()))
    for group, its in zip(groups["param_groups"], names, strict=True):
        if its is not None:
            group["param_names"] = its


class Resume:
    """Continues a script where it was, at whatever instant it was killed.

        resume = ziggurat.torch.Resume(optimizer, scheduler, loader)
        for epoch in resume.epochs(3):
            for batch in resume:
                model(batch).loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    Opens the optimizer's store. If the store has a state, everything is restored to its newest
    step: parameters, moments, groups, `scheduler`, `scaler`, what `more` names, random states and
    the place in `loader`. All of these are kept with each step, as they are when the loop asks for
    the next batch, in whatever order the loop makes its calls. Pass whatever else the script
    changes while it trains in `more`: objects with ``state_dict()`` and ``load_state_dict()``. All
    that is kept takes at most 1 MiB; save what is larger, such as averages of the parameters, with
    ``torch.save()`` beside the store.

    The epoch's batches that were already consumed are loaded again and dropped, so that
    augmentation in workers draws the same random numbers.

    A store that other ranks have made is refused, unless `resume` is "reshard": then it is divided
    among the ranks that are there, in place. With "never" the run begins anew, and replaces a store
    that is there. After a division all ranks go on from what rank 0 had kept, each with random
    generators that begin anew from (rank 0's seed, rank, step), which it says on standard error.
    Where a loader's order or its workers' seeds are not a ``DistributedSampler``'s, the rest of the
    epoch is rank 0's on rank 0, and drawn anew on the others.

    With `checkpoint_every` and `checkpoint_dir` every so many steps are also saved in the
    background, when the loop asks for the next batch, as ``save_checkpoint(checkpoint_dir, ...,
    background=True)`` does, with `scheduler`, `scaler` and `more`; the newest `keep_last` of them
    stay, or all. The optimizer must have been given ``model=model``. A save that fails is a
    warning, and the loop goes on.
    """

    def __init__(
        self,
        optimizer: EngineOptimizer,
        scheduler: Any = None,
        loader: Iterable[Any] | None = None,
        *,
        scaler: Any = None,
        checkpoint_every: int = 0,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        keep_last: int = 0,
        resume: str = "auto",
        **more: Any,
    ) -> None:
        if optimizer.engine is not None:
            raise InvalidArgument(
                "the optimizer is already in use: make Resume before the optimizer's first step()"
            )
        optimizer.need_store("Resume")
        _check_saves(optimizer, loader, checkpoint_every, checkpoint_dir)
        self._every, self._folder, self._keep_last = checkpoint_every, checkpoint_dir, keep_last
        self._optimizer = optimizer
        self._loader = loader
        # Keeps only the groups, because the store has the state itself.
        groups = Groups(optimizer)
        self._kept = {"optimizer": groups, "scheduler": scheduler, "scaler": scaler} | more
        self._kept = {name: kept for name, kept in self._kept.items() if kept is not None}
        self._names = _PackedNames()
        self.epoch = 0  #: number of finished passes through the loader
        self.batch = 0  #: number of batches of this pass that are consumed
        self._at_epoch: dict[str, Any] | None = None  # random states before iter(loader)
        # random states to continue with, once the place is found
        self._then: dict[str, Any] | None = None
        self.awaited = False  #: whether the newest step's state is not known yet
        optimizer.share_offloaded()
        # Refuses what is too large before there is a store.
        optimizer._sharing.together("Resume", self._state)
        optimizer.open(resume=resume)
        engine = optimizer.engine
        assert engine is not None
        self.resumed = engine.resumed and engine.generation > 0  #: whether an earlier run continues
        if self.resumed:
            kept = self._restore(engine.blob)
            if engine.blob_ranks:
                self._begin_among(engine.blob_ranks, kept)
        optimizer._resume = self

    @property
    def steps(self) -> int:
        """The number of finished optimizer steps."""
        engine = self._optimizer.engine
        return engine.generation if engine is not None else 0

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the passes that are left of `count`, which count from 0; the first may be half
        done."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:
                raise InvalidArgument(
                    "Resume.epochs(): the loop did not finish a pass over Resume: iterate over "
                    "Resume once in each epoch"
                )

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            raise InvalidArgument("Resume has no loader to iterate over: give it loader=")
        iterator = self._found()
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            self.batch += 1
            yield batch
            self.before_step()
        self.epoch, self.batch, self._at_epoch = self.epoch + 1, 0, None

    def _found(self) -> Iterator[Any]:
        """Returns an iterator over the loader that begins after the consumed batches."""
        assert self._loader is not None
        generators = _generators(self._loader)
        if self._then is None:
            drawn = [generator.get_state() for generator in generators]
            self._at_epoch = {"default": random_states(), "own": drawn}
            return iter(self._loader)
        assert self._at_epoch is not None
        set_random_states(self._at_epoch["default"])
        for generator, state in zip(generators, self._at_epoch["own"], strict=True):
            generator.set_state(state)
        iterator = iter(self._loader)
        for _ in range(self.batch):
            next(iterator, None)
        set_random_states(self._then)
        self._then = None
        return iterator

    def _state(self) -> bytes:
        """Returns what is kept with a step. Errors: InvalidArgument, which names what is large, if
        it is more than a store holds."""
        kept = {name: one.state_dict() for name, one in self._kept.items()}
        state = {
            "format": _FORMAT,
            "epoch": self.epoch,
            "batch": self.batch,
            "at_epoch": self._at_epoch,
            "random": random_states(),
            "kept": kept,
            "names": self._names.take_from(kept["optimizer"]),
        }
        saved = _bytes_of(state)
        if len(saved) <= _BYTES_MAX:
            return saved
        needed = f"Resume: what is kept with each step takes {len(saved)} bytes"
        sizes = {name: len(_bytes_of(its)) for name, its in kept.items() if name != "optimizer"}
        name = max(sizes, key=lambda name: sizes[name], default="")
        if len(saved) - sum(sizes.values()) > max(_BYTES_MAX, sizes.get(name, 0)):
            raise InvalidArgument(
                f"{needed}, most of it groups and names of the optimizer's parameters, but a store "
                f"holds at most {_BYTES_MAX}: give the optimizer fewer groups or unnamed parameters, "
                "or save with save_checkpoint() instead"
            )
        raise InvalidArgument(
            f"{needed}, of which {name} takes {sizes[name]}, but a store holds at most {_BYTES_MAX}: "
            f"leave {name} out of Resume, and save it with torch.save() beside the store"
        )

    def _restore(self, blob: bytes) -> dict[str, Any]:
        """Takes over what was kept with the newest step, and returns the random states in it."""
        if not blob:
            raise DataLoss(
                "the store was made without Resume, so it has no random states and no place in the "
                "data: give another directory"
            )
        # weights_only admits plain data and tensors alone: loading a store runs no code.
        state = torch.load(io.BytesIO(blob), weights_only=True)
        if state["format"] != _FORMAT:
            raise InvalidArgument(
                f"the store's Resume has format {state['format']}, but this version reads only "
                f"{_FORMAT}: continue with the version that made the store"
            )
        if missing := state["kept"].keys() - self._kept.keys():
            raise InvalidArgument(
                f"Resume: the store has a state of {', '.join(sorted(missing))}, but this run gives "
                "Resume no object of that name: give one"
            )
        if missing := self._kept.keys() - state["kept"].keys():
            raise InvalidArgument(
                f"Resume: the store has no state of {', '.join(sorted(missing))}: leave it out"
            )
        if "names" in state:  # a store of an earlier version has them in the groups
            _put_names_back(state["kept"]["optimizer"], state["names"])
        for name, kept in self._kept.items():
            kept.load_state_dict(state["kept"][name])
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._at_epoch = state["at_epoch"]
        if self._at_epoch is None:
            set_random_states(state["random"])
        else:
            self._then = state["random"]
        random_kept: dict[str, Any] = state["random"]
        return random_kept

    def _begin_among(self, ranks_before: int, kept: dict[str, Any]) -> None:
        """Goes on from what rank 0 of another number of ranks had kept. As many batches of the
        epoch are consumed as these ranks have read together, of all batches of the present ones."""
        ranks = self._optimizer._sharing.ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        before, together = self.batch, self.batch * ranks_before
        self.batch = together // size
        if isinstance(self._loader, Sized) and -(-together // size) >= len(self._loader):
            self.batch = len(self._loader)  # the epoch was done
        _seed_anew(_seed_of(kept, rank, self.steps))
        drawn = ""
        if self._at_epoch is not None:
            self._then = random_states()
            drawn = self._draw_apart(kept, rank)
        if rank == 0:
            print(
                f"ziggurat: the store {self._optimizer._path} of {ranks_before} ranks goes on with "
                f"{size} at step {self.steps}: random generators begin anew from (seed, rank, "
                f"step){drawn}, and epoch {self.epoch} goes on at batch {self.batch} of each rank "
                f"(batch {before} before)",
                file=stderr(),
            )

    def _draw_apart(self, kept: dict[str, Any], rank: int) -> str:
        """Lets each rank draw its own order and seeds of workers where the loader begins the epoch
        again: rank 0 those that it had, the others new ones. Generators that the script has seeded
        alike on all ranks stay alike. Returns what is said of it."""
        assert self._at_epoch is not None and self._then is not None
        ranks, generators = self._optimizer._sharing, _generators(self._loader)
        seeds = ranks.told([generator.initial_seed() for generator in generators])
        apart = any(its != seeds[0] for its in seeds)
        if rank > 0:
            _seed_anew(_seed_of(kept, rank, self.steps, "loader"))
            own = self._at_epoch["own"]
            if apart:
                own = [
                    torch.Generator(generator.device)
                    .manual_seed(_seed_of(kept, rank, self.steps, "loader", place))
                    .get_state()
                    for place, generator in enumerate(generators)
                ]
            self._at_epoch = {"default": random_states(), "own": own}
            set_random_states(self._then)
        if len(seeds) == 1:
            return ""
        also = " and the loader's own" if apart else ""
        return (
            f", on ranks from 1 on also those{also} from which the loader draws this epoch's order "
            "and its workers' seeds"
        )

    def after_step(self) -> None:
        """Called when the optimizer has made a step whose other state is not known yet."""
        self.awaited = True

    def before_step(self) -> None:
        """Gives the newest step its state, because nothing more belongs to that step."""
        if not self.awaited:
            return
        engine = self._optimizer.engine
        assert engine is not None
        engine.give_blob(self._state())
        self.awaited = False
        if self._every > 0 and self.steps % self._every == 0:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        from ziggurat._checkpoint.checkpoint import save_checkpoint  # it needs this file

        assert self._folder is not None
        optimizer = self._optimizer
        kept = {name: one for name, one in self._kept.items() if name != "optimizer"}
        try:
            save_checkpoint(
                self._folder,
                optimizer,
                optimizer._model,
                keep_last=self._keep_last,
                background=True,
                **kept,
            )
        except ZigguratError as error:
            if optimizer.engine is None:
                raise  # the engine has ended, and with it the run
            warnings.warn(f"step {self.steps} is not saved: {error}", stacklevel=4)


def _check_saves(optimizer: EngineOptimizer, loader: Any, every: int, folder: Any) -> None:
    """Errors: InvalidArgument if steps are to be saved, but it is not said where or of what."""
    if every < 0:
        raise InvalidArgument(f"Resume: checkpoint_every is {every}: give a number of steps, or 0")
    if (every > 0) != (folder is not None):
        raise InvalidArgument(
            "Resume: give both checkpoint_every and checkpoint_dir to save checkpoints, or neither"
        )
    if every > 0 and loader is None:
        raise InvalidArgument(
            "Resume: checkpoint_every saves when the loop asks for the next batch: give Resume the "
            "loader, or call save_checkpoint() after the step"
        )
    if every > 0 and optimizer._model is None:
        raise InvalidArgument(
            "Resume: checkpoint_every saves the model too: give the optimizer model=model"
        )
