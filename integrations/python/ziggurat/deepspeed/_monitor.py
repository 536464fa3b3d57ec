# SPDX-License-Identifier: Apache-2.0
"""Writes figures of a run for TensorBoard, CSV files and Weights & Biases, under DeepSpeed's names.

Rank 0 writes them. A CSV file is ``output_path/job_name/Train_Samples_lr.csv``; TensorBoard's
files are in ``output_path/job_name``.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed._config import Config

Event = tuple[str, float, int]  #: name, value, number of samples so far


class _Writer(Protocol):
    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class _Csv:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            path = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([samples, value])

    def close(self) -> None:
        pass


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        module = _package("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, settings: Any) -> None:
        self._wandb = _package("wandb", "wandb")
        self._wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._wandb.log({name: value}, step=samples)

    def close(self) -> None:
        self._wandb.finish()


def _package(module: str, section: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidArgument(
            f'"{section}" is enabled in the configuration, but its package cannot be imported '
            f"({error}): run pip install {section}, or disable it"
        ) from error


class Monitor:
    """Writes to all monitors that are enabled. Errors: InvalidArgument if a monitor's package is
    missing."""

    def __init__(self, config: Config, rank: int) -> None:
        self._writers: list[_Writer] = []
        if rank != 0:
            return
        settings = config.monitor
        kinds: tuple[tuple[Any, type[Any]], ...] = (
            (settings.tensorboard, _TensorBoard),
            (settings.csv_monitor, _Csv),
        )
        for files, kind in kinds:
            if files.enabled:
                self._writers.append(kind(Path(files.output_path) / files.job_name))
        if settings.wandb.enabled:
            self._writers.append(_Wandb(settings.wandb))

    @property
    def enabled(self) -> bool:
        return bool(self._writers)

    def write_events(self, events: Sequence[Event]) -> None:
        for writer in self._writers:
            writer.write(events)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()
