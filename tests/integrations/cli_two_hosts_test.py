#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_two_hosts_test.py: two hosts train together over a network that fails for a while, and is cut.
"""Hosts are network namespaces joined by a veth pair, so nothing reaches the other but through real TCP over that link, and a link
set down drops packets without a word to either side, as a pulled cable does.

    cli_two_hosts_test.py ZIGGURAT

Exit code 77 (skipped) where namespaces cannot be made: it takes root and iproute2.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
STEPS = 400
FAILS_AFTER = 10
FAILS_SECONDS = 6  # a switch that fails over
CUT_AFTER = 40
SECRET = "of this test only"
RENDEZVOUS = "10.213.77.1:29477"


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


class TwoHosts:
    """Namespaces NAME-0 and NAME-1, 10.213.77.1 and .2."""

    def __init__(self):
        self.names = [f"ziggurat-{os.getpid()}-{i}" for i in range(2)]
        self.links = [f"zig{os.getpid() % 10**7}{i}" for i in "ab"]

    def __enter__(self):
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for i, (name, link) in enumerate(zip(self.names, self.links)):
                run("ip", "link", "set", link, "netns", name)
                run("ip", "-n", name, "address", "add", f"10.213.77.{i + 1}/30", "dev", link)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.set_link("up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            print(f"skipped: no network namespaces here ({getattr(error, 'stderr', '') or error})")
            sys.exit(SKIPPED)
        return self

    def __exit__(self, *unused):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def set_link(self, state):
        for name, link in zip(self.names, self.links):
            run("ip", "-n", name, "link", "set", link, state)


class Host:
    """One host's half of the job, its output in a file."""

    def __init__(self, hosts, node, program, folder, text):
        self.node = node
        self.log = folder / f"host{node}.log"
        launch = [program, "launch", "--nproc", "1", "--nnodes", "2", "--node-rank", str(node), "--rendezvous", RENDEZVOUS, "--"]
        command = ["ip", "netns", "exec", hosts.names[node], *launch, *train(program, folder / f"store{node}", text)]
        with open(self.log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT,
                                            env=dict(os.environ, ZIGGURAT_SECRET=SECRET))

    def output(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def end(self):
        try:
            return self.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"host {self.node} hangs; it said:\n{self.output()}") from None


def train(program, store, text):
    return [program, "train", "--model", "2x64x2", "--data", str(text), "--store", str(store), "--steps", str(STEPS), "--batch", "2",
            "--accumulate", "2", "--context", "64", "--zero-stage", "2", "--eval-every", "0", "--print-loss-bits",
            "--device-memory", "64MiB", "--host-memory", "64MiB", "--threads", "1"]


def losses(output):
    """Bits of the loss by step."""
    return dict(re.findall(r"step (\d+) loss-bits (0x[0-9a-f]{8})", output))


def start(hosts, program, folder, text):
    return [Host(hosts, node, program, folder, text) for node in range(2)]


def wait_for_step(host, step):
    while str(step) not in losses(host.output()):
        if host.process.poll() is not None:
            raise AssertionError(f"host {host.node} ended before step {step}; it said:\n{host.output()}")
        time.sleep(0.02)


def expect(good, what, *hosts):
    if not good:
        raise AssertionError(what + "".join(f"\n--- host {h.node}:\n{h.output()}" for h in hosts))


def main():
    program = os.path.abspath(sys.argv[1])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="two-hosts-", dir=os.getcwd()))
    text = folder / "text"
    text.write_bytes(bytes((i * i // 7 + i) % 251 for i in range(40_000)))
    try:
        one_host = subprocess.run([*train(program, folder / "store", text), "--nproc", "2"], capture_output=True, text=True,
                                  check=True, timeout=300)
        wanted = losses(one_host.stdout)
        assert len(wanted) == STEPS, one_host.stdout
        with TwoHosts() as hosts:
            both = start(hosts, program, folder, text)
            wait_for_step(both[0], FAILS_AFTER)
            hosts.set_link("down")
            time.sleep(FAILS_SECONDS)
            hosts.set_link("up")
            wait_for_step(both[0], CUT_AFTER)
            hosts.set_link("down")
            cut = time.monotonic()
            codes = [host.end() for host in both]
            print(f"cut after step {max(int(step) for step in losses(both[0].output()))}, both ended {time.monotonic() - cut:.1f} s "
                  "later:", *(line for host in both for line in host.output().splitlines() if "rror" in line), sep="\n  ")
            expect(all(code != 0 for code in codes), f"a cut link ends both hosts with an error, not {codes}", *both)
            for host in both:
                expect(re.search(rf"rank {1 - host.node}\b", host.output()), "the error names the rank out of reach", *both)
            seen = losses(both[0].output())

            hosts.set_link("up")
            both = start(hosts, program, folder, text)
            codes = [host.end() for host in both]
            expect(codes == [0, 0], f"with the link back the job goes on to its end: {codes}", *both)
            expect("resumed at step" in both[0].output(), "it goes on from the last finished step", *both)
            seen.update(losses(both[0].output()))
        expect(seen == wanted, f"two hosts and a cut link change no bit of the loss: {seen} instead of {wanted}", *both)
    finally:
        shutil.rmtree(folder)
    print("two hosts: trained together, reported the cut, went on with the same bits")


if __name__ == "__main__":
    main()
