#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_launchers_test.py: `train` under a launcher of others has the bits of `train --nproc 2`.
"""    cli_launchers_test.py ZIGGURAT mpirun|torchrun|srun

Exit code 77 (skipped) where the launcher is not installed. For srun a Slurm of one node is started, in a folder, and ended:
that takes root.
"""
import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
STEPS = 4
PATIENCE_S = 120


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def require(*programs):
    for program in programs:
        if shutil.which(program) is None:
            skip(f"no {program} here")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(what, condition, patience_s=30):
    give_up = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up:
            sys.exit(f"{what} did not come within {patience_s} s")
        time.sleep(0.1)


class Run:
    def __init__(self, ziggurat, folder):
        self.ziggurat = ziggurat
        self.folder = folder
        self.count = 0
        text = folder / "text.txt"
        text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 400)
        self.train = [ziggurat, "train", "--model", "2x64x2", "--data", text, "--steps", STEPS, "--batch", 2, "--context", 32,
                      "--device-memory", "16MiB", "--host-memory", "32MiB", "--print-loss-bits"]

    def bits(self, launcher, *more, environment=None):
        """The fp32 loss of every step, and what was said."""
        self.count += 1
        command = [*launcher, *self.train, "--store", self.folder / f"store{self.count}", *more]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                              env={**os.environ, **(environment or {})})
        if done.returncode != 0:
            sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        found = re.findall(r"step (\d+) loss-bits (0x[0-9a-f]+)", done.stdout)
        if len(found) != STEPS:
            sys.exit(f"{command}: {len(found)} losses of {STEPS}: rank 0 alone should print\n{done.stdout}")
        return found, done.stdout


def check(what, expected, got):
    if got != expected:
        sys.exit(f"{what}: {got}, where --nproc 2 has {expected}")
    print(f"{what}: the bits of --nproc 2")


def under_mpirun(run, expected):
    require("mpirun")
    # What MPI leaves behind at the end is not ours to count.
    os.environ["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    mpirun = ["mpirun", "-n", "2"]
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" in version:
        mpirun.append("--oversubscribe")
        if os.geteuid() == 0:
            mpirun.append("--allow-run-as-root")
    check("mpirun", expected, run.bits(mpirun)[0])
    if (pathlib.Path(run.ziggurat).parent.parent / "lib" / "libziggurat_mpi.so").exists():
        got, said = run.bits(mpirun, "--collectives", "mpi", "--zero-stage", "3")
        check("mpirun, through MPI", expected, got)
        if "ranks talk through messages of" not in said:
            sys.exit(f"it does not say that MPI carries them:\n{said}")
        # Each rank on one core of its own, where there are two.
        if "Open MPI" in version and os.cpu_count() > 1:
            check("mpirun, bound", expected, run.bits([*mpirun, "--bind-to", "core"])[0])


def under_torchrun(run, expected):
    require("torchrun")
    check("torchrun", expected, run.bits(["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"])[0])


@contextlib.contextmanager
def one_node_slurm(folder):
    """The environment in which srun finds a Slurm that lives as long as this."""
    require("srun", "slurmctld", "slurmd", "munged")
    if os.geteuid() != 0:
        skip("slurmd wants root")
    folder.mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    munge = folder / "munge.socket"
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(f"""ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
""")
    environment = {"SLURM_CONF": str(conf)}
    daemons = []

    def start(*command):
        log = open(folder / f"{command[0]}.log", "w", encoding="utf-8")
        daemons.append(subprocess.Popen([str(part) for part in command], stdout=log, stderr=log,
                                        env={**os.environ, **environment}))

    try:
        start("munged", "--foreground", "--force", "--key-file", key, "--socket", munge, "--pid-file", folder / "munged.pid",
              "--log-file", folder / "munged.out", "--seed-file", folder / "munged.seed")
        wait_until("munged", munge.exists)
        start("slurmctld", "-D", "-f", conf)
        start("slurmd", "-D", "-f", conf, "-N", host)

        def idle():
            said = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False,
                                  env={**os.environ, **environment})
            return said.stdout.strip() == "idle"

        wait_until("an idle node of Slurm", idle)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def under_srun(run, expected):
    with one_node_slurm(run.folder / "slurm") as environment:
        srun = ["srun", "--ntasks", "2", "--overcommit"]
        check("srun", expected, run.bits(srun, environment=environment)[0])


def main():
    ziggurat, launcher = sys.argv[1:]
    under = {"mpirun": under_mpirun, "torchrun": under_torchrun, "srun": under_srun}[launcher]
    with tempfile.TemporaryDirectory(dir=".", prefix="launchers-") as folder:
        run = Run(ziggurat, pathlib.Path(folder).resolve())
        expected, _ = run.bits([], "--nproc", 2)
        under(run, expected)


main()
