# SPDX-License-Identifier: Apache-2.0
"""libziggurat.so shows the functions of ziggurat.h and nothing else, and Python knows each of them.

And no function uses an object that another thread may close meanwhile: a reference is not bound to what find() has
given, which is gone behind that expression.

symbols_test.py HEADER LIBRARY NM PYTHON-READER
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the tree stays as it is
header, library, nm, reader = sys.argv[1:]

declared = set(re.findall(r"ZIGGURAT_API\s[^;(]*?\b(ziggurat_\w+)\(", Path(header).read_text()))
listing = subprocess.run([nm, "-D", "--defined-only", library], check=True, capture_output=True, text=True)
shown = {line.split()[-1] for line in listing.stdout.splitlines()}
spec = importlib.util.spec_from_file_location("reader", reader)
read = importlib.util.module_from_spec(spec)
spec.loader.exec_module(read)
known = set(read.read(Path(header)).functions)

problems = []
for what, names in [
    ("declared and not shown", declared - shown),
    ("shown and not declared", shown - declared),
    ("not known to Python", declared - known),
    ("known to Python and not declared", known - declared),
]:
    problems += [f"{name}: {what}" for name in sorted(names)]
for source in sorted(Path(header).parent.glob("*.cc")):
    for statement in re.findall(r"(?:&\s*\w+\s*=|return)[^;={]*s\(\)\.find\([^;]*->[^;]*;", source.read_text()):
        problems.append(f"{source.name}: nobody keeps the object of: {' '.join(statement.split())}")
print("\n".join(problems) or f"{len(declared)} functions")
sys.exit(1 if problems or not declared else 0)
