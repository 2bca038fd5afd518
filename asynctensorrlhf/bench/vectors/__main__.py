"""`python -m asynctensorrlhf.bench.vectors FILE`: a line for each vector, then `N of M vectors pass`.

Knows arguments, lines and the exit code: 0 when every vector passes, 1 when one does not or the file can't be read, 2
when the arguments are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from asynctensorrlhf.bench.vectors.check import faults, read_vectors, verdict

USAGE = "usage: python -m asynctensorrlhf.bench.vectors FILE"
EXIT_FAILED, EXIT_BAD_COMMAND = 1, 2


def main(argv: Sequence[str]) -> int:
    """Check a file of vectors."""
    if argv in (["--help"], ["-h"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}")
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write(f"{USAGE}; got {len(argv)} arguments: {' '.join(argv)}\n")
        return EXIT_BAD_COMMAND
    try:
        file = read_vectors(Path(argv[0]))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
        sys.stdout.write(_summary(0, 0))
        return EXIT_FAILED
    num_passed = 0
    for number, vector in enumerate(file.vectors, start=1):
        found = faults(vector, file.tolerances)
        num_passed += not found
        sys.stdout.write(f"{_name(vector, number)}: {verdict(found)}\n")
    sys.stdout.write(_summary(num_passed, len(file.vectors)))
    return 0 if num_passed == len(file.vectors) else EXIT_FAILED


def _name(vector: object, number: int) -> str:
    name = vector.get("id") if isinstance(vector, dict) else None
    return name if isinstance(name, str) and name.isprintable() else f"vector {number}"


def _summary(num_passed: int, num_vectors: int) -> str:
    return f"{num_passed} of {num_vectors} vectors pass\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
