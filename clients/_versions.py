"""Prints a row with the versions that a client runs with; `--store` puts it into versions.md."""

from __future__ import annotations

import contextlib
import datetime
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).parent / "versions.md"
HEAD = """# Versions that the clients last passed with

`clients/run <client>` writes its row here.

| client | date | Python | packages |
|---|---|---|---|
"""
ALWAYS = ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "numpy")


def row(client: str, packages: list[str]) -> str:
    found = []
    names = [re.split("[<>=]", package)[0] for package in packages]
    for name in dict.fromkeys([*names, *ALWAYS]):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return (
        f"| {client} | {datetime.date.today()} | {platform.python_version()} | {', '.join(found)} |"
    )


if __name__ == "__main__":
    client, *packages = (word for word in sys.argv[1:] if word != "--store")
    new = row(client, packages)
    print(new)
    if "--store" in sys.argv:
        old = PAGE.read_text().splitlines() if PAGE.exists() else []
        rows = [line for line in old if line.startswith("| ") and not line.startswith("| client")]
        rows = [line for line in rows if not line.startswith(f"| {client} |")]
        PAGE.write_text(HEAD + "".join(f"{line}\n" for line in sorted([*rows, new])))
