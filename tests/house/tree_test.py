#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/house/tree_test.py: the tree is built as ARCHITECTURE.md says. One check a name: tree_test.py ROOT CHECK.
#
# includes   every #include "..." goes to the same floor or down, and the files form no circle
# openings   every source opens with its licence and its own path, and keeps to 100 columns
# messages   no message of a library names a flag: settings have names, and the command line adds the dashes
# comments   no line of a comment begins with "Of": a sentence names its subject first
# headers    every header compiles on its own (needs CXX: the compiler)
# rooms      every module of the Python package imports from its own room or from one below, and the modules form no circle
# documents  links, commands and the example program in the documents are real
import ast
import itertools
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The floors, lowest first. A folder uses those before it; base/topology and base/runtime stand side by side.
FLOORS = [
    "base", "base/numerics", "base/topology", "base/runtime", "aio", "tiers/pool", "tiers/device", "tiers/store", "optimizer",
    "collectives", *(f"collectives/{folder}" for folder in ("quantize", "exchange", "tcp", "mpi", "nccl", "simulated", "rendezvous")),
    "core/sharding", "core/compute", "core/schedule", "core/stash", "core/checkpoint", "core/plan", "core/engine", "core/engine/state", "core/engine/stash", "core/engine/units", "core/engine/lent", "core/rehearsal",
    "integrations/gpt", "integrations/measure", "integrations/device_mlp", "integrations/deepspeed", "integrations/cli", "integrations/c", "integrations/python", "tests/support", "bench",
    "tests",
]
# The rooms of the Python package, lowest first: folders, and the modules beside them, which scripts import.
PACKAGE = Path("integrations/python/ziggurat")
ROOMS = [
    "_library", "__init__", "_pytorch", "_memory", "_ranks", "_gradients", "_exchange", "_units", "_activations", "_streaming",
    "_losses", "_plan", "_optimizer", "_offload", "_foreign", "_checkpoint", "torch", "deepspeed", "_trainers", "hf", "__main__",
]
TRANSPORTS = ("collectives/tcp", "collectives/mpi", "collectives/nccl", "collectives/simulated")
SIDE_BY_SIDE = [*itertools.product(TRANSPORTS, TRANSPORTS), ("collectives/exchange", "collectives/quantize"),
                ("integrations/deepspeed", "integrations/gpt"), ("integrations/deepspeed", "integrations/measure"),
                ("base/runtime", "base/topology"), ("tiers/device", "tiers/store"), ("core/engine/lent", "core/engine/units"), ("core/plan", "core/checkpoint"), ("integrations/measure", "integrations/gpt"),
                ("integrations/c", "integrations/cli"), ("integrations/python", "integrations/cli")]
TOP = ["base", "aio", "tiers/pool", "tiers/device", "tiers/store", "optimizer", "collectives", "core", "integrations", "bench", "tests"]
COLUMNS = 100
FORBIDDEN_NAMES = {"utils.h", "util.h", "common.h", "helpers.h", "misc.h"}
LIBRARIES = {"base", "aio", "tiers/pool", "tiers/device", "tiers/store", "optimizer", "collectives", "core"}
LIBRARIES_OF_INTEGRATIONS = {("integrations", "gpt"), ("integrations", "measure")}
OTHERS_LINES = {"fio.cc", "html_report.cc"}  # the command line of fio; variables of a style sheet
STRING = re.compile(r'"(?:[^"\\\\]|\\\\.)*"')
FLAG = re.compile(r"--([a-z][a-z-]*)")
OTHERS_FLAGS = {"ulimit", "mpi"}  # docker's, srun's
DANGLING = re.compile(r"(//[/!]?<?|#) +Of\b")
LANGUAGES = {"header": "c++-header", "source": "c++"}
# It takes most of the compiler's time in half of all headers, so these read it compiled. What it includes they have anyway.
DEAREST = "base/runtime/reactor.h"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def sources(root):
    for top in TOP:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in {".h", ".cc", ".cu"} and path.is_file():
                yield path.relative_to(root)


def floor_of(path):
    """The longest floor that is a prefix of the file's folder; None if it stands on none."""
    folder = path.parent.as_posix()
    fitting = [f for f in FLOORS if folder == f or folder.startswith(f + "/")]
    return max(fitting, key=len, default=None)


def check_includes(root):
    graph = {}
    for path in sources(root):
        floor = floor_of(path)
        if floor is None:
            yield f"{path}: stands on no floor of this check: add its folder to FLOORS"
            continue
        graph[path] = []
        if floor.startswith("core/engine") and re.search(r"^\s*friend\b", (root / path).read_text(), re.MULTILINE):
            yield f"{path}: has a friend: the parts of the engine know each other by their calls"
        for name in INCLUDE.findall((root / path).read_text()):
            target = Path(name)
            if target.name in FORBIDDEN_NAMES:
                yield f"{path}: includes {name}: name a header after what is in it"
            if target.parts[0] not in TOP:
                continue  # another project's, in quotes
            if not (root / target).is_file():
                yield f"{path}: includes \"{name}\", which is not a path from the root"
                continue
            graph[path].append(target)
            below = floor_of(target)
            if below is None or below == floor:
                continue
            if FLOORS.index(below) > FLOORS.index(floor) or (floor, below) in SIDE_BY_SIDE:
                yield f"{path}: {floor} must not use {below} ({name})"
    yield from circles(graph)


def circles(graph):
    """Files that include or import themselves in the end. Highway's foreach_target includes a file from itself on purpose."""
    state = {}

    def visit(path, way):
        state[path] = "open"
        for target in graph.get(path, []):
            if target == path:
                continue
            if state.get(target) == "open":
                circle = way[way.index(target):] if target in way else [target]
                yield "a circle: " + " -> ".join(str(p) for p in circle + [target])
            elif target not in state:
                yield from visit(target, way + [target])
        state[path] = "done"

    for path in graph:
        if path not in state:
            yield from visit(path, [path])


def check_openings(root):
    for path in sources(root):
        lines = (root / path).read_text().split("\n")
        if lines[0] != "// SPDX-License-Identifier: Apache-2.0":
            yield f"{path}: the first line is not the licence's"
        if len(lines) < 2 or not lines[1].startswith(f"// {path.as_posix()}: "):
            yield f"{path}: the second line is not '// {path.as_posix()}: what it is'"
        raw = None  # inside a raw string: data, which is as wide as it is
        for number, line in enumerate(lines, 1):
            opened = re.search(r'R"([a-z]*)\(', line)
            if raw is None and len(line) > COLUMNS and "http" not in line and not opened:
                yield f"{path}:{number}: {len(line)} columns"
            if raw is None and opened:
                raw = f'){opened[1]}"'
            if raw is not None and raw in line:
                raw = None
    for folder in ("scripts", ".ci"):
        for script in sorted((root / folder).iterdir()):
            lines = script.read_text().split("\n")
            if "SPDX-License-Identifier: Apache-2.0" not in lines[1]:
                yield f"{folder}/{script.name}: the second line is not the licence's"
            if not os.access(script, os.X_OK):
                yield f"{folder}/{script.name}: is not executable"


def check_messages(root):
    for path in sources(root):
        if path.parts[0] not in LIBRARIES and path.parts[:2] not in LIBRARIES_OF_INTEGRATIONS or path.name in OTHERS_LINES:
            continue
        for number, line in enumerate((root / path).read_text().split("\n"), 1):
            for literal in [] if line.strip().startswith("//") else STRING.findall(line):
                flag = FLAG.search(literal)
                if flag and flag[1] not in OTHERS_FLAGS:
                    yield f"{path}:{number}: a message with --{flag[1]}: say `{flag[1].replace('-', '_')}`"


def check_comments(root):
    scripts = [path.relative_to(root) for top in [*TOP, "cmake", "scripts", ".ci"] for path in sorted((root / top).rglob("*"))
               if path.is_file() and (top in ("scripts", ".ci") or path.suffix in (".py", ".cmake", ".txt"))]
    for path in [*sources(root), *scripts]:
        for number, line in enumerate((root / path).read_text().split("\n"), 1):
            if DANGLING.search(line):
                yield f'{path}:{number}: a line of a comment begins with "Of": name the subject of the sentence first'


def check_copies(root):
    """GCC 12 makes a loop over single elements of std::ranges::copy from a constant span, at a quarter of a copy's speed."""
    for path in sources(root):
        for number, line in enumerate((root / path).read_text().split("\n"), 1):
            if path.parts[0] != "tests" and "ranges::copy(" in line and not line.strip().startswith("//"):
                yield f"{path}:{number}: std::ranges::copy is slow: say copy_bytes() (base/bytes.h) or std::copy"


def check_headers(root):
    """A header with a source of its name is included first there, so its build shows it whole; the rest we compile."""
    alone = []
    for path in sources(root):
        if path.suffix != ".h" or path.parts[0] in {"tests", "bench"}:
            continue
        if path.stem.endswith("_inl"):  # Highway's: included once for each target, by its source
            continue
        source = path.with_suffix(".cc")
        if not (root / source).is_file():
            alone.append(path)
            continue
        text = (root / source).read_text()
        first = re.search(r'^\s*#\s*include\s+["<]([^">]+)', text, re.MULTILINE)
        if "foreach_target.h" not in text and (first is None or first[1] != path.as_posix()):
            yield f"{source}: includes something before its own header"

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        first = Path(folder) / "first.h"
        first.write_text(f'#include "{DEAREST}"\n')
        its_own = compiled(root, "header", first, ["-o", f"{first}.gch"])
        if its_own:
            yield f"{DEAREST}: does not compile alone:\n{its_own}"
            return

        def compile_alone(path):
            source = Path(folder) / (path.as_posix().replace("/", "-") + ".cc")
            source.write_text(f'#include "{path.as_posix()}"\n')
            known = ["-include", first] if DEAREST in reached(root, path.as_posix()) else []
            errors = compiled(root, "source", source, ["-fsyntax-only", *known])
            return f"{path}: does not compile alone:\n{errors}" if errors else None

        yield from (problem for problem in pool.map(compile_alone, alone) if problem)


def compiled(root, kind, path, more):
    """Returns what the compiler says of it: nothing if it compiles."""
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-I", root, *more, "-x", LANGUAGES[kind], path]
    result = subprocess.run(command, text=True, capture_output=True, check=False)
    return result.stderr or "it failed without a word" if result.returncode != 0 else None


def reached(root, name):
    """The headers of the tree that `name` includes in the end."""
    found, left = set(), [name]
    while left:
        path = left.pop()
        found.add(path)
        direct = INCLUDE.findall((root / path).read_text())
        left += [other for other in direct if other not in found and (root / other).is_file()]
    return found


def check_rooms(root):
    modules = {}  # by the name that imports it
    for path in sorted((root / PACKAGE).rglob("*.py")):
        path = path.relative_to(root)
        within = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(within[:-1] if within[-1] == "__init__" else within)] = path
    trees = {path: ast.parse((root / path).read_text()) for path in modules.values()}

    said = {}  # by room: its docstring
    for room in {room_of(path) for path in trees if path.parent != PACKAGE}:
        page = PACKAGE / room / "__init__.py"
        said[room] = page in trees and ast.get_docstring(trees[page]) or ""
        if room.startswith("_") and (not said[room] or len(trees[page].body) > 1):
            yield f"{page}: a private room has a docstring here, which says what it is, and nothing else"

    graph = {}
    for path, tree in trees.items():
        room = room_of(path)
        graph[path] = []
        if room not in ROOMS:
            yield f"{path}: stands in no room of this check: add {room} to ROOMS"
            continue
        for name, is_loaded in imports_of(tree):
            # `from a import b` imports the module a.b, if there is one, else what is called b in a
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            if name.startswith("."):
                yield f"{path}: imports {name}: write the module's name in full, from ziggurat on"
            if target is None:
                continue
            if is_loaded:
                graph[path].append(target)
            above = room_of(target)
            if above not in ROOMS or ROOMS.index(above) <= ROOMS.index(room):
                continue
            if is_loaded:
                yield f"{path}: {room} must not use {above} ({name})"
            elif f"{above}.{target.stem}" not in said.get(room, ""):
                yield f"{path}: names {above}.{target.stem} of a room above: the docstring of {room} has to say so"
    yield from circles(graph)


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(tree):
    """Yields what a module imports, each with whether that is loaded with the module: not in a function, nor for types alone."""
    todo = [(tree, True)]
    while todo:
        node, is_loaded = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_loaded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + f"{node.module or ''}.{alias.name}", is_loaded) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += [(child, False) for child in node.body] + [(child, is_loaded) for child in node.orelse]
        else:
            is_called = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            todo += [(child, is_loaded and not is_called) for child in ast.iter_child_nodes(node)]


def slugs(document):
    """The anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_documents(root):
    documents = [root / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
    pages = ("README.md", "COMING_FROM_DEEPSPEED.md", "MODELS_LARGER_THAN_MEMORY.md")
    documents += [path for top in TOP for page in pages for path in sorted((root / top).rglob(page))]
    documents += sorted((root / "docs").rglob("*.md"))
    for document in documents:
        name = document.relative_to(root)
        text = document.read_text()
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
            if target.startswith("http"):
                continue
            there = document.parent / target if target else document
            if not there.exists():
                yield f"{name}: links to {target}, which is not there"
            elif anchor and anchor not in slugs(there):
                yield f"{name}: links to the section {target}#{anchor}, which is not there"
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            for command in re.findall(r"^(?:[A-Z_]+=\S+ )*((?:scripts|\.ci)/\S+)", block, re.MULTILINE):
                if not os.access(root / command, os.X_OK):
                    yield f"{name}: tells to run {command}, which cannot be run"

    example = (root / "tests/house/readme_example.cc").read_text()
    shown = re.search(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    marked = re.search(r"// README begins\n(.*?)// README ends\n", example, re.DOTALL)
    if shown is None or marked is None or shown[1] != marked[1]:
        yield "README.md: its program is not the one in tests/house/readme_example.cc, which the tests compile and run"


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: tree_test.py ROOT includes|openings|messages|comments|copies|headers|rooms|documents")
    check = {"includes": check_includes, "openings": check_openings, "messages": check_messages, "comments": check_comments,
             "copies": check_copies, "headers": check_headers, "rooms": check_rooms, "documents": check_documents}[sys.argv[2]]
    problems = list(check(Path(sys.argv[1]).resolve()))
    for problem in problems:
        print(problem)
    sys.exit(f"{len(problems)} problems" if problems else 0)


if __name__ == "__main__":
    main()
