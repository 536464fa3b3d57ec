# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun, mpirun, srun and `accelerate launch` start are one job, with the same bits.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

try:
    import pytest
    import torch  # noqa: F401
    from rank_runs import free_port
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

sys.path.append(str(Path(__file__).parents[1]))
import launchers

RANKS = 2
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


@contextlib.contextmanager
def started_by(launcher, folder):
    """The command that starts ranks, and what their environment has."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        if launcher == "torchrun":
            yield [*TORCHRUN, "--"], {}
        elif launcher == "accelerate launch":
            # Several processes of the CPU it gives to mpirun, those of accelerators to torchrun.
            pytest.importorskip("accelerate")
            launchers.require("mpirun")
            hosts = folder / "hosts"
            hosts.write_text(f"localhost slots={RANKS}\n")
            command = [PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
            command += ["--num_processes", str(RANKS), "--mpirun_hostfile", str(hosts)]
            command += ["--main_process_ip", meeting["MASTER_ADDR"]]
            command += ["--main_process_port", meeting["MASTER_PORT"]]
            command += ["--mixed_precision", "no", "--num_cpu_threads_per_process", "1"]
            as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            yield command, as_root
        elif launcher == "mpirun":
            yield [*launchers.mpirun(RANKS)[0], PYTHON], meeting
        else:
            with launchers.one_node_slurm(folder / "slurm") as environment:
                yield (
                    ["srun", "--ntasks", str(RANKS), "--overcommit", PYTHON],
                    meeting | environment,
                )
    except SystemExit as ended:
        if ended.code != launchers.SKIPPED:
            raise AssertionError(f"{launcher}: {ended}") from ended
        pytest.skip(f"no {launcher} here")


def said_under(launcher, way, folder):
    """By each rank."""
    folder.mkdir()
    script = Path(__file__).with_name("launched.py")
    with started_by(launcher, folder) as (command, environment):
        done = subprocess.run(
            [*command, str(script), str(folder), way],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [(folder / f"rank{rank}").read_text().splitlines() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory):
    return functools.cache(
        lambda way: said_under("torchrun", way, tmp_path_factory.mktemp("torchrun") / way)
    )


@pytest.mark.parametrize(
    ("launcher", "way"),
    [
        ("mpirun", "deepspeed"),
        ("srun", "deepspeed"),
        ("accelerate launch", "deepspeed"),
        ("accelerate launch", "accelerate"),
    ],
)
def test_ranks_train_alike_whoever_started_them(launcher, way, under_torchrun, tmp_path):
    expected = under_torchrun(way)
    assert [rank[0] for rank in expected] == ["0 of 2, here 0", "1 of 2, here 1"]
    assert all(len(rank) == 5 for rank in expected) and expected[0][1:] != expected[1][1:]
    assert said_under(launcher, way, tmp_path / "other") == expected


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
