#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_own_names_test.py: two hosts whose own names resolve to loopback on themselves, as Debian has it.
"""Two ranks on each of two network namespaces meet at the name of the first, which is 127.0.1.1 there and its address elsewhere.

    cli_own_names_test.py ZIGGURAT

Exit code 77 (skipped) where namespaces cannot be made: it takes root and iproute2.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from cli_two_hosts_test import SECRET, TwoHosts, expect, losses

STEPS = 3
NAMES = ["zig-north", "zig-south"]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]


class OwnNames:
    """/etc/hosts of each namespace: `ip netns exec` puts it in place."""

    def __init__(self, hosts):
        self.folders = [pathlib.Path("/etc/netns") / name for name in hosts.names]

    def __enter__(self):
        for own, folder in enumerate(self.folders):
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost"]
            lines += [f"{'127.0.1.1' if i == own else address} {name}" for i, (name, address) in enumerate(zip(NAMES, ADDRESSES))]
            (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self

    def __exit__(self, *unused):
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


class Node:
    """One host's two ranks, its output in a file."""

    def __init__(self, hosts, node, program, folder, text, environment):
        self.node = node
        self.log = folder / f"host{node}.log"
        train = [program, "train", "--model", "2x64x2", "--data", str(text), "--store", str(folder / f"store{node}"), "--steps", str(STEPS),
                 "--batch", "1", "--context", "64", "--zero-stage", "2", "--eval-every", "0", "--print-loss-bits",
                 "--device-memory", "64MiB", "--host-memory", "64MiB", "--threads", "1"]
        launch = [program, "launch", "--nproc", "2", "--nnodes", "2", "--node-rank", str(node), "--rendezvous", f"{NAMES[0]}:29478", "--"]
        with open(self.log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(["ip", "netns", "exec", hosts.names[node], *launch, *train], stdout=out,
                                            stderr=subprocess.STDOUT, env=environment)

    def output(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def end(self):
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "a time-out"


def main():
    program = os.path.abspath(sys.argv[1])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="own-names-", dir=os.getcwd()))
    text = folder / "text"
    text.write_bytes(bytes((i * i // 7 + i) % 251 for i in range(40_000)))
    without = {name: value for name, value in os.environ.items() if not name.startswith("ZIGGURAT_")}
    try:
        with TwoHosts() as hosts, OwnNames(hosts):
            nodes = [Node(hosts, node, program, folder, text, dict(without, ZIGGURAT_SECRET=SECRET)) for node in range(2)]
            codes = [node.end() for node in nodes]
            expect(codes == [0, 0], f"all four ranks get to each other and train: {codes}", *nodes)
            expect(len(losses(nodes[0].output())) == STEPS, "every step has its loss", *nodes)

            alone = Node(hosts, 0, program, folder, text, without)
            expect(alone.end() not in (0, "a time-out"), "without a secret nobody listens on a network", alone)
            expect("there is no secret" in alone.output(), "the error says what is missing", alone)
    finally:
        shutil.rmtree(folder)
    print("own names: four ranks of two hosts met at a name that is loopback on its own host")


if __name__ == "__main__":
    main()
