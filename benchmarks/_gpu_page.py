"""The page of the queue of `gpu`, from its lines alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import _record
from ._pretraining import SIZES
from .evidence._compare import Result
from .evidence._pages import draw, finals_table

Line = Mapping[str, Any]

TRAINED = {
    "method": ("method", ""),
    "rate": ("learning rate", "g"),
    "seed": ("seed", "d"),
    "loss": ("validation loss", ".4f"),
    "prose": ("loss on prose", ".4f"),
    "millions": ("tokens, millions", ".1f"),
    "time": ("seconds", ".1f"),
    "tokens_per_second": ("tokens a second", ",d"),
    "peak": ("of the peak, %", ".1f"),
    "state": ("state, MB", ".1f"),
}
PRODUCTS = {
    "kind": ("", ""),
    "stack": ("stack", ""),
    "program": ("program", ""),
    "ms": ("ms", ".2f"),
    "tflops": ("TFLOP/s", ".1f"),
    "error": ("", ""),
}
STEPS = {
    "method": ("method", ""),
    "p50": ("between refreshes, ms", ".2f"),
    "over_adamw": ("over AdamW's", ".2f"),
    "over_products": ("over its products", ".2f"),
    "refresh_p50": ("a refresh, ms", ".1f"),
}
LAYERWISE = {
    "job": ("step", ""),
    "ms": ("ms", ".0f"),
    "first_ms": ("the first, with a refresh", ".0f"),
    "peak_gib": ("most memory, GiB", ".2f"),
}


def row_of(line: Line) -> dict[str, Any]:
    """A run."""
    row = {**line, "loss": "diverged" if line["loss"] is None else line["loss"]}
    row |= {"millions": line["tokens"] * line["steps"][-1] / 1e6, "time": sum(line["seconds"])}
    row |= {"peak": line["mfu"] and 100 * line["mfu"], "state": line["state_bytes"] / 1e6}
    return row | line["tested"]


def results(runs: Sequence[Line]) -> dict[str, Result]:
    """The runs of each method at its best rate, by seed, without those of other lengths."""
    found = {}
    for method in dict.fromkeys(line["method"] for line in runs):
        own = [x for x in runs if x["method"] == method and x["loss"] is not None]
        if whole := [x for x in own if x["seed"] == 0 and not other_length(x)]:
            rate = min(whole, key=lambda x: x["loss"])["rate"]
            chosen = [x for x in own if x["rate"] == rate and not other_length(x)]
            by_seed = sorted(chosen, key=lambda x: x["seed"])
            found[method] = Result(None, [{**x, "cpu_seconds": x["seconds"]} for x in by_seed])
    return found


def other_length(line: Line) -> bool:
    """Whether a run from scratch is one for AdamW's curve."""
    return line["base"] is None and line["steps"][-1] != SIZES[line["size"]].steps


def compared(title: str, runs: Sequence[Line], folder: Path) -> Iterator[str]:
    """Final losses beside AdamW's and a picture, of the methods that have AdamW's seeds."""
    found = results(runs)
    if "adamw" not in found:
        return
    adamw = found["adamw"].finals
    seeds, steps = [x["seed"] for x in adamw], adamw[0]["steps"][-1]
    found = {name: x for name, x in found.items() if len(x.finals) == len(seeds)}
    own = [x for x in runs if x["method"] == "adamw" and x["rate"] == adamw[0]["rate"]]
    curve = {x["steps"][-1]: x["loss"] for x in own if x["seed"] == 0}
    suite: Any = SimpleNamespace(name=title, seeds=seeds, methods=list(found), steps=steps)
    suite.unit = "nats per token"
    if len(seeds) > 1:
        table = finals_table(suite, found, curve if len(curve) > 1 else {})
        note = table.note.replace("tuned at each", f"at the best rate for {steps}, seed 0")
        columns = {**table.columns, "ms": ("ms/step", ".3g")}
        yield table._replace(columns=columns, note=note).markdown()
    over = ("millions of tokens", "seconds of training")
    if (figure := draw(suite, in_tokens(found), suite.unit, over)) is not None:
        name = f"{folder.name}/{title.replace(', ', '-').replace(' ', '_')}.png"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder.parent / name, dpi=120)
        yield f"![loss against steps, seconds and state]({name})"


def in_tokens(found: Mapping[str, Result]) -> dict[str, Result]:
    """Results whose steps are millions of tokens."""

    def told(line: Line) -> Line:
        return {**line, "steps": [line["tokens"] * step / 1e6 for step in line["steps"]]}

    return {name: Result(None, [told(line) for line in x.finals]) for name, x in found.items()}


def parts(lines: Sequence[Line], folder: Path) -> Iterator[str]:
    """All tables and pictures."""
    steps = [x for line in lines if line.get("command", [""])[0] == "step" for x in tables(line)]
    plain = {
        "Products, and refreshes by them": (
            PRODUCTS,
            [y for x in lines for y in x.get("rows", ())],
        ),
        "Steps of optimizers": (STEPS, steps),
        "Layer-wise steps": (LAYERWISE, [dict(x) for x in lines if "peak_gib" in x]),
    }
    for title, (columns, rows) in plain.items():
        if rows:
            yield _record.Table(title, columns, rows).markdown()
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "train" and "error" not in line:
            tuned = ", from prose to code" if line["base"] is not None else ""
            groups.setdefault(f"LLaMA-{line['size']}{tuned}", []).append(line)
    for title, runs in groups.items():
        rows = sorted(map(row_of, runs), key=lambda row: str(row["loss"]))
        columns = {k: x for k, x in TRAINED.items() if any(row.get(k) is not None for row in rows)}
        yield _record.Table(title, columns, rows).markdown()
        yield from compared(title, runs, folder)
    if failed := [f"- {x['job']}: {x['error']}" for x in lines if "error" in x]:
        yield "\n".join(["## What failed\n", *failed])


def tables(line: Line) -> list[dict[str, Any]]:
    """The rows that a suite has left."""
    return [row for table in line.get("tables", ()) for row in table["rows"]]


def write(path: Path, found: Mapping[str, Line]) -> None:
    """The page beside the lines, its pictures in a folder of the same name."""
    lines = [*found.values()]
    hardware = sorted({x["hardware"] for x in lines if "hardware" in x})
    packages = ("jax", "optax", "flax")
    versions = [x["versions"] for x in lines if "versions" in x]
    versions = sorted({", ".join(f"{name} {x[name]}" for name in packages) for x in versions})
    body = [f"# The queue for a GPU: {path.stem}", *parts(lines, path.with_suffix(""))]
    body.append(f"`python -m benchmarks gpu`, on {'; '.join(hardware)}; {'; '.join(versions)}.")
    path.with_suffix(".md").write_text("\n\n".join(body) + "\n")
