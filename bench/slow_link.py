#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/slow_link.py: what do fewer bits gain where nodes are joined by a slow link?
"""Measures stage 3 as it is, with hpZ, and with ZeRO++'s quantized exchanges, on two network namespaces of two ranks
each, joined by a link of a stated rate. Prints tokens/s and what rank 0 sends in a step, beside the time that the link
alone would take for the bytes of both ranks of a node. Ends with exit code 77 (skipped) if network namespaces cannot be
made: they need root, iproute2 and the kernel's token bucket.

    slow_link.py ZIGGURAT TEXT [--mbit 400] [--model 12x256x8] [--steps 10]
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

NAMES = [f"slow-link-{os.getpid()}-{i}" for i in range(2)]
RENDEZVOUS = "10.213.78.1:29478"
WAYS = {
    "as they are": [],
    "hpz 2": ["--hpz", "2"],
    "int8 parameters": ["--quantized-weights"],
    "int4 gradients": ["--quantized-gradients", "4"],
    "all three": ["--hpz", "2", "--quantized-weights", "--quantized-gradients", "4"],
}


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def make_hosts(mbit):
    links = [f"slow{os.getpid() % 10**7}{i}" for i in "ab"]
    for name in NAMES:
        run("ip", "netns", "add", name)
    run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
    for i, (name, link) in enumerate(zip(NAMES, links)):
        run("ip", "link", "set", link, "netns", name)
        run("ip", "-n", name, "address", "add", f"10.213.78.{i + 1}/30", "dev", link)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", link, "up")
        run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", f"{mbit}mbit",
            "burst", "256kb", "latency", "200ms")


def mib(text):
    value, unit = text.split()
    return float(value) * {"KiB": 2**-10, "MiB": 1, "GiB": 2**10}[unit]


def train(args, folder, more):
    """Runs one job on both hosts; returns the median seconds of a step, the MiB that rank 0 sends in one within its
    node and beyond, and the held-out loss."""
    report = folder / "report.json"
    processes = []
    for node, name in enumerate(NAMES):
        command = ["ip", "netns", "exec", name, args.program, "launch", "--nproc", "2", "--nnodes", "2", "--node-rank", str(node),
                   "--rendezvous", RENDEZVOUS, "--", args.program, "train", "--model", args.model, "--data", args.text, "--store",
                   str(folder / f"store{node}"), "--resume", "never", "--steps", str(args.steps), "--batch", "2", "--accumulate", "1",
                   "--context", "128", "--zero-stage", "3", "--placement", "all=host", "--host-memory", "300MiB", "--device-memory",
                   args.device_memory, "--threads", "1", "--json", str(report), *more]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, ZIGGURAT_SECRET="of this run")))
    said = [process.communicate(timeout=1200)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a run failed")
    near, away = re.search(r"a step of rank 0 sent (\S+ \S+) within its host and (\S+ \S+) to other hosts", said[0]).groups()
    told = json.loads(report.read_text(encoding="utf-8"))
    seconds = statistics.median(step["wall_s"] for step in told["steps"][2:])
    return seconds, mib(near), mib(away), told["total"]["held_out_loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text")
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--model", default="12x256x8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device-memory", default="24MiB", help="budget of each rank; the default is too small to "
                                                                 "keep units from forward to backward")
    args = parser.parse_args()
    args.program = str(pathlib.Path(args.program).resolve())
    args.text = str(pathlib.Path(args.text).resolve())
    try:
        try:
            make_hosts(args.mbit)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"skipped: this machine has no network namespaces ({getattr(error, 'stderr', '') or error})")
            sys.exit(77)
        print(f"{args.model}, {args.steps} steps, two nodes of two ranks with {args.mbit} Mbit/s between them")
        print(f"{'':16} {'tokens/s':>9} {'s a step':>9} {'the link':>9} {'MiB away':>9} {'MiB near':>9} {'loss':>8}")
        for way, flags in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds, near, away, loss = train(args, pathlib.Path(folder), flags)
            link = 2 * away * 2**20 * 8 / (args.mbit * 1e6)
            print(f"{way:16} {4 * 2 * 128 / seconds:9.0f} {seconds:9.3f} {link:9.3f} {away:9.1f} {near:9.1f} {loss:8.4f}", flush=True)
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


if __name__ == "__main__":
    main()
