"""Real text that every Python interpreter ships, as bytes; nothing is fetched.

`prose` is English about Python: the language reference (`pydoc_data.topics`) and the docstrings of
the standard library. `code` is the library's sources without those docstrings. Both leave out the
test suite, installed packages, and generated tables (`encodings`, `lib2to3`, `pydoc_data` as code).
Files come in the order of their names, cut into pieces that a fixed permutation shuffles, so that
the held-out tenth is text of the same kind and not the modules at the end of the alphabet.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import runpy
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

LEFT_OUT = {"test", "tests", "site-packages", "encodings", "lib2to3", "pydoc_data", "idlelib"}
LEFT_OUT |= {"__pycache__", "ensurepip", "lib-dynload", "turtledemo"}
PIECE = 4096  # bytes that stay together when the text is shuffled
SYMBOLS = 256  # bytes are the tokens
HELD_OUT = 10  # one piece of so many


class Text(NamedTuple):
    """The text to learn from and the text that is held out."""

    train: np.ndarray  # uint8
    validation: np.ndarray
    digest: str  # of both: numbers of different texts do not compare


def library() -> Path:
    """The folder of the standard library that is read."""
    return Path(os.environ.get("EVIDENCE_TEXT") or sysconfig.get_paths()["stdlib"])


def sources() -> list[Path]:
    """The standard library's modules, in the order of their names."""
    root = library()
    paths = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")]
    return [path for name, path in sorted(paths) if not LEFT_OUT & set(Path(name).parts)]


def docstrings_in(source: str) -> list[ast.Constant]:
    """The docstrings of a module, of its classes and of its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False)
    ]


def without(source: str, strings: list[ast.Constant]) -> str:
    """The source without the lines of these docstrings."""
    lines = source.splitlines(keepends=True)
    for string in strings:
        for i in range(string.lineno - 1, string.end_lineno or string.lineno):
            lines[i] = ""
    return "".join(lines)


def parsed(paths: Iterable[Path]) -> Iterator[tuple[str, list[ast.Constant]]]:
    """Sources and their docstrings."""
    for path in paths:
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            yield source, docstrings_in(source)
        except SyntaxError:  # files that show old syntax
            continue


@functools.cache
def read(name: str) -> Text:
    """`prose` or `code`."""
    parts = []
    if name == "prose":
        topics = runpy.run_path(str(library() / "pydoc_data/topics.py"))["topics"]
        parts += [topics[topic] for topic in sorted(topics)]
    for source, strings in parsed(sources()):
        if name == "code":
            parts.append(without(source, strings))
        else:
            parts += [str(s.value) for s in strings]
    return split("\n".join(parts).encode())


def split(text: bytes) -> Text:
    """Shuffled pieces, a tenth of them held out."""
    number = len(text) // PIECE
    pieces = np.frombuffer(text[: number * PIECE], np.uint8).reshape(number, PIECE)
    pieces = pieces[np.random.default_rng(0).permutation(number)]
    held = max(1, number // HELD_OUT)
    digest = hashlib.sha256(pieces.tobytes()).hexdigest()[:16]
    return Text(pieces[held:].ravel(), pieces[:held].ravel(), digest)
