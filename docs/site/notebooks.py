"""The notebooks: scripts in docs/notebooks, whose cells start with `# %%`, run and shown.

`# %% [markdown]` starts a cell of text, in comments. Each script becomes a notebook, which runs in
a process of its own, and a page with its output. It runs again when the script or the library has
changed (`runs/notebooks` keeps its output). With CURVAX_NOTEBOOKS=0 none runs, which is quicker for
writing pages.

    python docs/site/notebooks.py docs/notebooks/sharding.py   # runs one, and prints its page
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "docs" / "notebooks"
DOWNLOAD = "[Download the notebook]({}.ipynb), and run it in the root of a checkout."
KEPT = ROOT / "runs" / "notebooks"
ESCAPES = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]|.*\r(?!\n)")


def notebook(script: Path) -> Any:
    """The notebook of a script, not run."""
    cells = []
    for part in re.split(r"(?m)^# %%", script.read_text())[1:]:
        kind, _, source = part.partition("\n")
        if kind.strip() == "[markdown]":
            text = re.sub(r"(?m)^# ?", "", source).strip()
            cells.append(nbformat.v4.new_markdown_cell(text))
        else:
            cells.append(nbformat.v4.new_code_cell(source.strip()))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    return nbformat.v4.new_notebook(cells=cells)


@functools.cache
def finished(script: Path) -> Any:
    """The notebook of a script with its output."""
    if os.environ.get("CURVAX_NOTEBOOKS") == "0":
        return notebook(script)
    sources = sorted(
        path for room in ("curvax", "optimizers", "transforms") for path in _python(room)
    )
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (script, *sources))).hexdigest()
    kept = KEPT / f"{script.stem}-{digest[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    book = notebook(script)
    client = NotebookClient(book, timeout=300, resources={"metadata": {"path": str(ROOT)}})
    client.execute()
    KEPT.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, kept)
    return book


def _python(room: str) -> list[Path]:
    return list((ROOT / room).rglob("*.py"))


def pages() -> dict[str, str]:
    """The pages of all notebooks, by path."""
    return {f"notebooks/{path.stem}.md": _page(path) for path in sorted(SCRIPTS.glob("*.py"))}


def figures() -> dict[str, bytes]:
    """Their pictures, and the notebooks to download."""
    found = {}
    for path in sorted(SCRIPTS.glob("*.py")):
        book = finished(path)
        found[f"notebooks/{path.stem}.ipynb"] = nbformat.writes(book).encode()
        for place, picture in _pictures(book):
            found[f"notebooks/{path.stem}-{place}.png"] = picture
    return found


def _pictures(book: Any) -> list[tuple[str, bytes]]:
    return [
        (f"{i}-{j}", base64.b64decode(output["data"]["image/png"]))
        for i, cell in enumerate(book.cells)
        for j, output in enumerate(cell.get("outputs", ()))
        if "image/png" in output.get("data", ())
    ]


def _page(script: Path) -> str:
    title, *cells = finished(script).cells
    parts = [title.source, DOWNLOAD.format(script.stem)]
    for i, cell in enumerate(cells, 1):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for j, output in enumerate(cell.outputs):
            if "image/png" in output.get("data", ()):
                parts.append(f"![output]({script.stem}-{i}-{j}.png)")
            elif text := _text(output):
                shown = text if text.startswith("|") else f"```text\n{text}\n```"
                parts.append(shown)
    return "\n\n".join(parts) + "\n"


def _text(output: Any) -> str:
    if output.output_type == "stream" and output.name == "stderr":
        return ""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return textwrap.dedent(ESCAPES.sub("", text)).strip()


if __name__ == "__main__":
    print(_page(Path(sys.argv[1]).resolve()))
