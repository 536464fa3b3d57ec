# SPDX-License-Identifier: Apache-2.0
# tests/integrations/launchers.py: launchers of others that a test starts ranks under, where they are installed.
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time

SKIPPED = 77
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


def mpirun(ranks):
    """The command that starts them on this host, more than it has cores too, and whether it is Open MPI's."""
    require("mpirun")
    command = ["mpirun", "-n", str(ranks)]
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    is_open_mpi = "Open MPI" in version
    if is_open_mpi:
        command.append("--oversubscribe")
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command, is_open_mpi


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
