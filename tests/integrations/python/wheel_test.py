# SPDX-License-Identifier: Apache-2.0
"""A wheel of scripts/build-wheel, in environments that have nothing else, and that have PyTorch.

ZIGGURAT_WHEEL=WHEEL [ZIGGURAT_TEST_TORCH=SITE-PACKAGES] wheel_test.py ROOT

Exits with 77 if no wheel is given. Without ZIGGURAT_TEST_TORCH, a directory with PyTorch in it, nothing is trained. A wheel
that was built without CUDA is a good one too, if it says so.
"""

import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

if "ZIGGURAT_WHEEL" not in os.environ:
    print("skipped: ZIGGURAT_WHEEL=build/wheels/... names the wheel to try (scripts/build-wheel)")
    sys.exit(77)

root = Path(sys.argv[1]).resolve()
wheel = Path(os.environ["ZIGGURAT_WHEEL"]).resolve()
started_in = Path.cwd()
beside_torch = os.environ.get("ZIGGURAT_TEST_TORCH")
problems: list[str] = []

# What every Linux with glibc and C++ has; the tag of the wheel says from which version on.
SYSTEM = re.compile(r"linux-vdso|ld-linux|lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s|z)\.so")
OPENED_LATE = re.compile(r"dnnl|gomp|omp|mpi|OpenCL|cuda|nccl")
SIZE_MAX = 60 * 10**6
HEAVY = ["torch", "numpy", "subprocess", "asyncio", "multiprocessing", "tempfile", "importlib.metadata"]
IMPORTED = f"""
import sys
import ziggurat
print([name for name in {HEAVY} if name in sys.modules], "libziggurat" in open("/proc/self/maps").read())
"""


def expect(holds: bool, what: str) -> None:
    if not holds:
        problems.append(what)


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ZIGGURAT", "LD_"))}
    return subprocess.run(words, env=clean, text=True, capture_output="stdout" not in options, **options)


def said(*command: object) -> str:
    done = run(*command)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path, beside: str = "") -> tuple[Path, Path]:
    """A new one with the wheel, and what `beside` has: its Python, and its site-packages."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    said(python, "-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check", wheel)
    site = next(folder.glob("lib/python*/site-packages"))
    if beside:
        (site / "beside.pth").write_text(beside + "\n")
    return python, site


def check_import(python: Path) -> None:
    found = said(python, "-c", IMPORTED).strip()
    expect(found == "[] False", f"import ziggurat loads what it need not (modules, engine): {found}")
    bare: list[float] = []
    imported: list[float] = []
    for _ in range(5):
        for program, seconds in (("pass", bare), ("import ziggurat", imported)):
            began = time.perf_counter()
            said(python, "-c", program)
            seconds.append(time.perf_counter() - began)
    took = statistics.median(imported) - statistics.median(bare)
    print(f"import ziggurat: {took:.3f} s, beside {statistics.median(bare):.3f} s of Python itself (medians of 5)")


def check_command(python: Path, site: Path) -> None:
    command = site / "ziggurat" / "bin" / "ziggurat"
    ways: list[list[object]] = [[command], [python.parent / "ziggurat"], [python, "-m", "ziggurat"]]
    engine = said(python, "-c", "import ziggurat; print(ziggurat.version())")
    package = said(python, "-c", "from importlib import metadata; print(metadata.version('ziggurat'))")
    versions = {said(*way, "--version") for way in ways} | {engine, package}
    expect(len(versions) == 1, f"versions of the command, the engine and the package differ: {versions}")

    doctor = said(python, "-m", "ziggurat", "doctor")
    print(doctor)
    for what in ("CPU", "SIMD", "compute", "GPU", "memlock", "limits", "degraded"):
        expect(re.search(rf"^{what} ", doctor, re.MULTILINE) is not None, f"doctor says nothing of {what}")
    expect(re.search(r"^compute +unknown", doctor, re.MULTILINE) is None, "oneDNN does not compute")

    for way in ways:  # the exit code of a wrong flag, and the end by a signal, are the command's own
        wrong = run(*way, "train", "--modle", "tiny").returncode
        expect(wrong == 2, f"{way}: exit code {wrong} for a wrong flag")
        reading, writing = os.pipe()
        os.close(reading)
        cut = run(*way, "--help", stdout=writing).returncode
        os.close(writing)
        expect(cut == -13, f"{way}: ends with {cut} where nobody reads what it says, not by SIGPIPE")


def check_linking(site: Path) -> None:
    package = site / "ziggurat"
    library = package / "lib" / "libziggurat.so.0"
    command = package / "bin" / "ziggurat"
    for file in [command, *sorted(package.glob("lib/*")), *sorted(site.glob("ziggurat.libs/*"))]:
        paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", said("readelf", "-d", file))
        expect(all(p.startswith("$ORIGIN") for p in ":".join(paths).split(":") if p), f"{file.name}: run path {paths}")
        needed = said("ldd", file)
        for line in needed.splitlines():
            expect(f"=> {site}/" in line or SYSTEM.search(line) is not None, f"{file.name}: {line.strip()} is not in the wheel")
        if file in (library, command):
            print(f"ldd {file.name}:\n{needed}")
            expect(not OPENED_LATE.search(needed), f"{file.name} needs a library that is to be opened when it is used")
    symbols = root / "tests/integrations/c/symbols_test.py"
    said(sys.executable, symbols, package / "include/ziggurat.h", library, "nm", package / "_library/header.py")


def kernels(program: Path) -> dict[int, set[int]]:
    """For which architectures there is machine code (2) and PTX (1) in a program, by the headers of nvcc's fat binaries, of which
    some have less than others; returned is what all have."""
    content = program.read_bytes()
    binaries: list[dict[int, set[int]]] = []
    begin = content.find(b"\x50\xed\x55\xba\x01\x00")
    while begin >= 0:
        header, size = struct.unpack_from("<HQ", content, begin + 6)
        found: dict[int, set[int]] = {1: set(), 2: set()}
        at = begin + header
        while at < begin + header + size:
            kind, _, header_size, code_size = struct.unpack_from("<HHIQ", content, at)
            found[kind].add(struct.unpack_from("<I", content, at + 28)[0])
            at += header_size + code_size
        binaries.append(found)
        begin = content.find(b"\x50\xed\x55\xba\x01\x00", at)
    return {kind: set.intersection(*(found[kind] for found in binaries)) if binaries else set() for kind in (1, 2)}


def check_cuda(python: Path, site: Path) -> None:
    """CUDA's runtime, NVIDIA's terms, and kernels for all GPUs are in a wheel together, or none of them is."""
    info = next(site.glob("ziggurat-*.dist-info"))
    doctor = said(python, "-m", "ziggurat", "doctor")
    with_cuda = re.search(r"^CUDA +runtime ", doctor, re.MULTILINE) is not None
    print(f"built with CUDA: {with_cuda}")
    terms = info / "licenses" / "third-party" / "nvidia-cuda-runtime"
    expect(terms.is_file() == with_cuda, f"CUDA is in the wheel: {with_cuda}; NVIDIA's terms: {terms.is_file()}")
    if with_cuda:
        expect("libcudart_static.a" in terms.read_text(), f"{terms} does not list the static runtime as what may be passed on")
        found = kernels(site / "ziggurat" / "lib" / "libziggurat.so.0")
        print(f"kernels: sm_{sorted(found[2])}, PTX of {sorted(found[1])}")
        expect({75, 80, 90, 100, 120} <= found[2], f"kernels only for {sorted(found[2])}")
        expect(bool(found[1]) and max(found[1]) >= 120, f"PTX only of {sorted(found[1])}: no GPU to come can use it")
    else:
        expect("built without CUDA" in doctor, "doctor does not say why no GPU is used")


def check_licences(site: Path) -> None:
    info = next(site.glob("ziggurat-*.dist-info"))
    for ours in ("LICENSE", "NOTICE"):
        expect((info / "licenses" / ours).is_file(), f"{ours} is missing")
    parts = [part for list_ in info.glob("sboms/*.json") for part in json.loads(list_.read_text())["components"]]
    names = {part["name"] for part in parts if part["purl"].startswith("pkg:deb")}
    onednn = [path.name for path in (info / "licenses" / "third-party").glob("libdnnl*")]
    expect(len(onednn) == 1, f"licences of oneDNN: {onednn}")
    missing = {name for name in names if not (info / "licenses" / "third-party" / name).is_file()}
    expect(not missing, f"no licence of {sorted(missing)}")
    copied = {re.sub(r"-[0-9a-f]{8}\.", ".", file.name) for file in site.glob("ziggurat.libs/*")}
    expect(len(parts) > len(copied) > 0, f"of {sorted(copied)} only {sorted(names)} are listed as parts")
    print(f"inside: {', '.join(sorted(copied))}")


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)  # nothing of the tree is found from here
    expect(re.fullmatch(r"ziggurat-[\d.]+-py3-none-manylinux\w+\.whl", wheel.name) is not None, f"tag of {wheel.name}")
    expect(wheel.stat().st_size < SIZE_MAX, f"the wheel has {wheel.stat().st_size} bytes, more than {SIZE_MAX}")
    python, site = environment(Path(folder) / "clean")
    check_import(python)
    check_command(python, site)
    check_linking(site)
    check_cuda(python, site)
    check_licences(site)
    if beside_torch is not None:
        trainer, _ = environment(Path(folder) / "torch", str(started_in / beside_torch))
        print(said(trainer, "-c", "import torch; print('PyTorch', torch.__version__)"), end="")
        pages = (root / name for name in ("integrations/python/README.md", "README.md", "integrations/python/MODELS_LARGER_THAN_MEMORY.md"))
        print(said(trainer, root / "tests/integrations/python/readme_test.py", *pages))
    else:
        print("not trained: ZIGGURAT_TEST_TORCH names no directory with PyTorch")

sys.exit("\n".join(problems) or 0)
