# SPDX-License-Identifier: Apache-2.0
"""Reads what was measured of a drive and of this machine (core/plan/machine_profile.h)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_VERSION = 1


def is_measured() -> bool:
    """Returns whether `ziggurat profile --measure` has measured this machine's cores."""
    return isinstance(_profile().get("compute"), dict)


def measured_rate(folder: str) -> float | None:
    """Returns the bytes a second, reads and writes together, that the drive of `folder` moved in an
    optimizer's pass, or None if that was not measured there."""
    try:
        return _rate_in(_profile(), Path(folder).absolute())
    except (AttributeError, KeyError, TypeError, ValueError):  # it is no profile
        return None


def _rate_in(whole: dict[str, Any], path: Path) -> float | None:
    if whole.get("ziggurat_profile") != _VERSION:
        return None
    found = [one for one in whole.get("drives", ()) if path.is_relative_to(one["path"])]
    if not found:
        return None
    drive = max(found, key=lambda one: len(one["path"]))
    rate = float(drive.get("sweep_gb_per_s") or drive.get("mix_gb_per_s") or 0)
    return rate * 1e9 or None


def _profile() -> dict[str, Any]:
    config = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(config) if config.startswith("/") else Path.home() / ".config"
    try:
        whole: dict[str, Any] = json.loads((base / "ziggurat" / "profile.json").read_text())
    except (OSError, ValueError):
        return {}
    return whole
