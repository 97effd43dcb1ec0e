"""Figures and tables of the papers.

    python -m benchmarks papers                      # what there is
    python -m benchmarks papers foam_proxy --full    # one of them, with its arguments

Each also runs by itself: `python -m benchmarks.papers.foam_proxy`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ..__main__ import first_line


def main() -> None:
    """Runs the script that the arguments name, or lists all."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if not sys.argv[1:]:
        width = max(map(len, known))
        print("\n".join(f"  {name:{width}}  {first_line(f'papers.{name}')}" for name in known))
        return
    if sys.argv[1] not in known:
        raise SystemExit(f"there is no {sys.argv[1]}; there are {', '.join(known)}")
    module = f"benchmarks.papers.{sys.argv[1]}"
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
