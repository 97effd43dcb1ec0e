"""What source files import, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imported_names(source: str, folders: tuple[str, ...] = ()) -> Iterator[str]:
    """What a module in `folders` imports; a relative name becomes one like `.transforms._a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ("", *folders[: len(folders) + 1 - node.level]) if node.level else ()
            module = ".".join([*start, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
