# SPDX-License-Identifier: Apache-2.0
"""What the command has measured of a drive is what plan() takes: the file is written by the one and read by the other.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing. Needs the command: ZIGGURAT_COMMAND.
"""

import json
import os
import subprocess
import sys

try:
    import pytest
    import torch
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._plan.drive_profile import measured_rate

COMMAND = os.environ.get("ZIGGURAT_COMMAND", "")


@pytest.mark.skipif(not COMMAND, reason="ZIGGURAT_COMMAND is not set")
def test_plan_takes_what_the_command_has_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    drive = tmp_path / "drive"
    drive.mkdir()
    assert measured_rate(str(drive)) is None
    flags = ["--measure", "--seconds", "0.05", "--size", "16MiB", "--path", str(drive)]
    measured = subprocess.run([COMMAND, "profile", *flags], capture_output=True, text=True, check=False)
    assert measured.returncode == 0, measured.stderr
    profile = json.loads((tmp_path / "config/ziggurat/profile.json").read_text())
    rate = measured_rate(str(drive / "below"))
    assert rate == profile["drives"][0]["sweep_gb_per_s"] * 1e9
    assert rate > 0
    assert measured_rate(str(tmp_path)) is None
    plan = ziggurat.torch.plan(
        torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))),
        tokens=4,
        memory="8MiB",
        optimizer_placement=f"nvme:{drive}",
    )
    assert plan.drive_bytes_per_s == rate
    assert "measured by `ziggurat bench io`" in plan.drive_rate_from


def test_what_is_no_profile_is_no_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ziggurat").mkdir()
    for text in ("", "[]", '{"ziggurat_profile": 2, "drives": []}', '{"ziggurat_profile": 1, "drives": [{}]}'):
        (tmp_path / "ziggurat/profile.json").write_text(text)
        assert measured_rate("/anywhere") is None


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
