# SPDX-License-Identifier: Apache-2.0
"""Reads the fp32 weights of a checkpoint without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed import _files, _state_folder

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns the module's ``state_dict()`` in fp32: the optimizer's masters, and the values that
    have no master.

    All masters are in memory, so `lazy_mode` has no effect. Errors: InvalidArgument if
    ziggurat.deepspeed saved no checkpoint there; DataLoss if a byte is damaged.
    """
    folder = Path(checkpoint_dir) / (_newest(checkpoint_dir) if tag is None else str(tag))
    path = folder / "mp_rank_00_model_states.pt"
    if not path.is_file():
        raise InvalidArgument(
            f"{path} does not exist: give the folder that holds `latest`, or a tag"
        )
    saved = _files.read(path)
    own = saved["ziggurat"]
    module = saved["module"]
    # A tied weight has several names, but its master has the first of them.
    masters = {
        _place(module[name]): master
        for name, master in _masters(folder, own).items()
        if name in module
    }
    weights: dict[str, torch.Tensor] = {}
    for name, value in module.items():
        if value.dtype != torch.float32 and _place(value) in masters:
            weights[name] = masters[_place(value)]
        elif not exclude_frozen_parameters or name not in own["frozen"]:
            weights[name] = value.float() if value.is_floating_point() else value
    return weights


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Returns where the values lie: the same for all names of a tied weight."""
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _masters(folder: Path, own: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the masters by their names in the module."""
    if own["format"] == 1:
        state = _files.read_state(folder, own["files"])
        return {own["names"][i]: one["master"] for i, one in state.items() if "master" in one}
    if own["state"] is None:
        return {}
    names = {its: own["names"][number] for number, its in own["state"]["names"].items()}
    return {
        names[owner]: values for owner, values in _state_folder.masters(folder / own["state"]["folder"])
    }


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Loads the fp32 weights into `model`, which becomes fp32 on the CPU, and returns it."""
    model = model.cpu().float()
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    **_: Any,
) -> None:
    """Writes the fp32 weights to ``output_dir/pytorch_model.bin``."""
    weights = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters
    )
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    _files.write(Path(output_dir) / "pytorch_model.bin", weights)


def _newest(checkpoint_dir: str | Path) -> str:
    latest = Path(checkpoint_dir) / "latest"
    if not latest.is_file():
        raise InvalidArgument(f"{latest} does not exist: give a tag")
    return latest.read_text().strip()
