#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/house/ptx_test.py OBJECT...: what nvcc made of our kernels computes as it is specified.
#
# Reads the PTX out of objects built with --no-compress. Refused: a product fused with a sum, an approximation, denormals
# flushed to zero, a contraction of precision (f16, bf16, tf32 arithmetic), and memory of a thread's own, into which registers
# or arrays have spilled.
import re
import sys
from pathlib import Path

MODULE = re.compile(rb"\.version [0-9.]+\n.*?\0", re.DOTALL)
ENTRY = re.compile(r"\.entry (\w+)")
REFUSED = [
    (re.compile(r"^(@!?%\w+ )?(fma|mad)(\.\w+)*\.(f32|f64|f16|f16x2|bf16|bf16x2)\b"), "a product fused with a sum"),
    (re.compile(r"\.approx\b"), "an approximation"),
    (re.compile(r"\.ftz\b"), "denormals flushed to zero"),
    (re.compile(r"\.(f16|f16x2|bf16|bf16x2|tf32)\b"), "arithmetic of less precision"),
    (re.compile(r"^\.local\b"), "memory of a thread's own: registers or arrays spilled"),
    (re.compile(r"^(@!?%\w+ )?(div|sqrt|rcp)(\.\w+)*\.full\b"), "a division that is not rounded to nearest"),
]


def modules(path):
    return [module.rstrip(b"\0").decode() for module in MODULE.findall(path.read_bytes())]


def problems(name, text):
    kernel = "?"
    for line in text.splitlines():
        entry = ENTRY.search(line)
        if entry:
            kernel = entry[1]
        code = line.strip()
        for pattern, what in REFUSED:
            if pattern.search(code):
                yield f"{name}: {kernel}: {what}: {code}"


def main(paths):
    found = []
    kernels = 0
    paths = [path for path in paths if ".cu." in path]  # a library of kernels has other sources too
    for path in map(Path, paths):
        texts = modules(path)
        if not texts:
            found.append(f"{path}: no PTX in it: was it built with --no-compress?")
        for text in texts:
            kernels += len(ENTRY.findall(text))
            found.extend(problems(path.name, text))
    for problem in found:
        print(problem)
    print(f"{kernels} kernels in {len(paths)} objects, {len(found)} problems")
    return 1 if found or kernels == 0 else 0


sys.exit(main(sys.argv[1:]))
