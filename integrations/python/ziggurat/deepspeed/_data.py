# SPDX-License-Identifier: Apache-2.0
"""The loader that ``initialize(training_data=...)`` returns, and a loader that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ziggurat._library.native import InvalidArgument

_WORKERS = 2  # DeepSpeed's number of loader workers for each rank


class RepeatingLoader:
    """Yields batches of `loader` without end: after the last batch it starts from the beginning."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader(DataLoader[Any]):
    """Yields the batches of micro-steps: this rank's share of the data, shuffled.

    As in DeepSpeed, the order is the same in every epoch unless the script calls
    ``loader.data_sampler.set_epoch(epoch)``.
    """

    @property
    def data_sampler(self) -> Any:
        return self.sampler


def loader_of(
    dataset: Any,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    drop_last: bool,
    shuffle: bool = True,
    pin_memory: bool = True,
    sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    workers: int | None = None,
) -> DeepSpeedDataLoader:
    """Makes the loader of `dataset`. Errors: InvalidArgument if it is no dataset."""
    iterable = isinstance(dataset, IterableDataset)
    if not iterable and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InvalidArgument(
            f"training data of type {type(dataset).__name__} cannot be loaded: give a torch "
            "Dataset, with __getitem__ and __len__"
        )
    if sampler is None and not iterable:
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle)
    return DeepSpeedDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=_WORKERS if workers is None else workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
        drop_last=drop_last,
    )
