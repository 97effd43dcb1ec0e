"""Writes the tables of the pages from recorded results.

    python -m benchmarks pages           # after new results
    python -m benchmarks pages --check   # writes nothing; fails if a table differs

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; nothing in it is typed by
hand. Drawbacks of methods are typed in a table of `docs/methods.md`, which others repeat; its
formulas for the state are compared with the counts of tests. The build of the site makes these
checks. The pages of `evidence` and of `gpu`, which those commands write from their lines, are made
here too.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import curvax
from curvax.published import RUNS
from tests.registry import METHODS

from . import _record, widths
from ._curves import draw, spread
from ._methods import METHODS as MEASURED
from ._methods import NAMES
from ._record import FOLDER, cell, table
from .evidence import _calls, _compare, _lines, _plan
from .evidence._compare import (
    CLAIMS,
    Result,
    corrected,
    difference,
    holm,
    judged,
    name_of,
    speed_up,
)
from .evidence._descent import bounded
from .evidence._methods import METHODS as TUNED_METHODS
from .evidence._plan import Runs
from .evidence._suites import SUITES, Suite

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "docs/choosing.md", "docs/claims.md", "docs/start.md", "docs/performance.md"),
    *("docs/performance_details.md", "docs/published.md", "docs/distribution.md"),
    "docs/combinations.md",
)
PLACE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL)
TYPED = re.compile(r"<!-- typed: formulas -->\n(.*?)<!-- end of table -->", re.DOTALL)
RECIPE, VISION, TUNED = "recipe-250", "vision-2000", "finetune-250"  # suites of the evidence
LADDER = tuple(x.name for x in SUITES.values() if x.ladder == SUITES[RECIPE].ladder)
PACKAGES = ("jax", "optax", "flax")


@functools.cache
def typed() -> dict[str, tuple[str, str]]:
    """The state of a method and its drawback, in the table of `docs/methods.md`."""
    found = TYPED.search((ROOT / "docs/methods.md").read_text())
    assert found is not None
    lines = [re.split(r" *\| *", line)[1:-1] for line in found[1].strip().splitlines()[2:]]
    return {line[0].strip("`"): (line[2], line[-1]) for line in lines}


@functools.cache
def runs() -> dict[str, dict[str, Any]]:
    """The lines of the evidence."""
    return _lines.read(FOLDER / "evidence")


@functools.cache
def finals(suite: str) -> dict[str, dict[str, Any]]:
    """The results of a suite of the evidence for the methods whose seeds have all run."""
    found = _compare.results(SUITES[suite], runs())
    written = finals_table(SUITES[suite], found, _compare.curve_of(SUITES[suite], runs()))
    return {} if written is None else {row["method"]: row for row in written.rows}


def bytes_per_number(name: str) -> str:
    """The bytes per number of the state of a 768×3072 matrix, at rank 64."""
    tree = {"kernel": jax.ShapeDtypeStruct((768, 3072), "float32")}
    return format(curvax.state_bytes(MEASURED[name].make(10, 64), tree) / (768 * 3072), ".2f")


def wrong_formulas() -> Iterator[str]:
    """Methods whose state has other numbers than the formula that is typed."""
    m, n, r = 7, 11, 3
    for row in METHODS:
        formula = typed()[row.name][0].replace("none", "`0`").split("`")[1].replace("²", "**2")
        for product in ("mn", "mr", "nr"):
            formula = formula.replace(product, "*".join(product))
        formula = re.sub(r"(?<=\d)(?=[mnr])", "*", formula)
        found = row.numbers(row.size(m, n, r, {}))
        if eval(formula, {"m": m, "n": n, "r": r}) != found:
            yield f"{row.name}: the state has {found} numbers at m={m}, n={n}, r={r}: {formula}"


def recorded(page: str, title: str) -> str:
    """A section of a record, with the command and the machine."""
    text = (FOLDER / f"{page}.md").read_text().rstrip()
    section = text.partition(f"## {title}\n\n")[2].partition("\n## ")[0].strip()
    command = text.rpartition("\n\n")[2]
    return f"{section.removesuffix(command).strip()}\n\n{command}"


def calls(own: Iterable[_calls.Printed] = _calls.PRINTED[RECIPE]) -> str:
    """Printed calls on the language model: their results and their costs."""
    suite, adamw = SUITES[RECIPE], finals(RECIPE)["adamw"]
    curve, base = _compare.curve_of(suite, runs()), _calls.result_of(RECIPE, _calls.ADAMW, runs())
    state, seeds = bytes_per_number("optax.adamw"), len(suite.seeds)
    rows = [["AdamW, tuned", "", adamw["loss"], *4 * ["1.00"], state]]
    for printed in own:
        found = _calls.result_of(RECIPE, printed.call, runs())
        if len(found.finals) < seeds:
            continue
        loss, slower = float(np.mean(found.losses)), found.milliseconds / base.milliseconds
        over = [_compare.speed_up(loss, suite.steps, curve, x) for x in (1.0, slower)]
        row = [printed.goal, f"`{printed.call}`", spread(found.losses, ".3f"), *over]
        row += [cell(slower, ".2f"), on_gpu(printed)]
        rows.append([*row, bytes_per_number(printed.method)])
    rows.sort(key=lambda row: float(row[2].split()[0]))
    titles = ["goal", "call", f"validation loss, mean (range) of {seeds} seeds"]
    titles += ["AdamW's steps to it, over its own", "AdamW's time to it, over its own"]
    titles += ["time of a step, CPU", "time of a step, GPU", "state, bytes per parameter"]
    written = table(titles, rows).replace("| --- | ---: |", "| --- | --- |")  # a call is text
    return f"{written}\n\n{origin(*LADDER)}\n\n{origin(RECIPE, command='calls')}"


@functools.cache
def default_calls() -> dict[str, dict[str, str]]:
    """The table of default calls for a GPU, by method and heading."""
    lines = recorded("programs", "Default calls").splitlines()
    heads, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in lines if line.startswith("|")]
    found = [dict(zip(heads, row, strict=True)) for row in rows if row[0]]
    return {x["default call"].split("`")[1]: x for x in found}


def on_gpu(printed: _calls.Printed) -> str:
    """A training step over AdamW's, of a call whose work is that of the default call."""
    if not printed.keywords <= {"rank", "others"}:
        return ""
    row = default_calls()[printed.method]
    about = "≈ " if "≈" in row["H100: a step, ms"] + row["a refresh more, ms"] else ""
    return about + row["training step over AdamW's"]


def kept() -> str:
    """The printed calls on all tasks where they ran, beside the tuned points."""
    rows = []
    for name, printed in ((name, x) for name, own in _calls.PRINTED.items() for x in own):
        found = _calls.compared(name, printed, runs())
        if found is None:
            continue
        gains = [x and f"{found.adamw - x:.3f}" for x in (found.call, found.tuned)]
        share = None if found.share is None else f"{100 * found.share:.0f} %"
        own = _calls.result_of(name, printed.call, runs())
        row = [f"`{name}`", f"`{printed.call}`", spread(own.losses, ".3f"), f"{len(own.finals)}"]
        rows.append([*row, *(x or "" for x in (*gains, share))])
    titles = ["suite", "call", "validation loss, mean (range)", "seeds", "below AdamW's"]
    written = table([*titles, "the tuned point below AdamW's", "kept"], rows)
    written = written.replace("| --- | ---: |", "| --- | --- |")
    others = [
        f"In `{suite}` take `{other.call}` in place of `{call}`."
        for suite in _calls.PRINTED
        for call, other in _calls.alternatives(suite, runs()).items()
    ]
    return "\n\n".join([written, *others, origin(*_calls.PRINTED, command="calls")])


def parts() -> str:
    """What a part changes: calls with and without it, seed by seed."""
    rows = []
    for suite, group in ((x, group) for x, groups in _calls.PARTS.items() for group in groups):
        without = {x["seed"]: x for x in _calls.result_of(suite, group["beside"], runs()).finals}
        for call in group["calls"]:
            found = _calls.result_of(suite, call, runs())
            if not found.finals:
                continue
            beside = Result(None, [without[x["seed"]] for x in found.finals])
            change = f"{np.mean(np.subtract(found.losses, beside.losses)):+.3f}"
            if len(found.finals) > 2:
                d = difference(found.losses, beside.losses)
                change += f" ({d.low:+.3f} … {d.high:+.3f})"
            row = [f"`{suite}`", f"`{group['beside']}`", f"`{call}`", f"{len(found.finals)}"]
            rows.append([*row, spread(found.losses, ".3f"), change])
    rows.sort(key=lambda row: (row[:2], float(row[5].split()[0])))
    titles = ["suite", "beside", "call", "seeds", "validation loss, mean (range)"]
    written = table([*titles, "difference, mean (95 % interval)"], rows)
    written = written.replace("| --- | ---: | ---: |", "| --- | --- | --- |")
    return f"{written}\n\n{origin(*_calls.PARTS, command='calls')}"


def weights() -> str:
    """The weights' side, tuned alike: losses of the methods whose seeds have all run."""
    suites = {x: own for x in SUITES if x.startswith("weights") and (own := finals(x))}
    columns = suites.values()
    best_first = next(iter(columns))
    rows = [[name_of(x), *(own.get(x, {}).get("loss", "") for own in columns)] for x in best_first]
    titles = ["method", *(f"`{x}`: validation loss, mean (range)" for x in suites)]
    return f"{table(titles, rows)}\n\n{origin(*suites)}"


def machines(lines: Iterable[Mapping[str, Any]]) -> str:
    """The hardware and the versions of lines."""
    known = [x for x in lines if "versions" in x]
    versions = {", ".join(f"{k} {x['versions'][k]}" for k in PACKAGES) for x in known}
    return "; ".join([*sorted({x["hardware"] for x in known}), *sorted(versions)]) + "."


def origin(*suites: str, command: str = "run") -> str:
    """Command and machine of suites of the evidence."""
    lines = [
        line
        for line in runs().values()
        if line["suite"] in suites and (line["method"] in TUNED_METHODS) == (command == "run")
    ]
    command = f"python -m benchmarks evidence {command} --suites {','.join(suites)}"
    return f"`{command}`, on {machines(lines)}"


SIZES = ("recipe-250", "recipe-500", "recipe-1000", "batch-125")
SIZES += ("small-125", "small-250", "small-500", "large-40", "large-80", "large-160")
SIZES += ("code-125", "code-250", "code-500")


def sizes() -> str:
    """Losses beyond AdamW's, and the steps that AdamW needs for them, in all suites of a kind."""
    beyond, faster = ("soap", "muon", "alice", "racs"), ("soap", "muon")
    rows = []
    for suite in SIZES:
        if own := finals(suite):
            row = [f"`{suite}`", own["adamw"]["loss"].split()[0]]
            row += [own.get(name, {}).get("beyond", "") for name in beyond]
            rows.append([*row, *(own.get(name, {}).get("speed_up", "") for name in faster)])
    titles = ["suite", "AdamW", *(f"`{name}` beyond it" for name in beyond)]
    titles += [f"AdamW's steps to `{name}`, over its own" for name in faster]
    return f"{table(titles, rows)}\n\n{origin(*SIZES)}"


def methods() -> str:
    """All methods: state, gain and limits; of a new one those that are measured."""
    suites = {RECIPE: "language model", VISION: "signals", TUNED: "fine-tuning"}
    suites = {suite: title for suite, title in suites.items() if finals(suite)}
    rows = []
    for name in ("optax.adamw", *NAMES):
        gains = [finals(suite).get(name, {}).get("beyond", "") for suite in suites]
        mind = typed().get(name, ("", ""))[1]
        rows.append([name_of(name), bytes_per_number(name), *gains, mind])
    titles = ["method", "state, bytes per parameter", *suites.values(), "mind"]
    return f"{table(titles, rows)}\n\n{origin(*suites)}"


STARTS = {"muon": "0.03", "soap": "0.01", "kl_shampoo": "2 × `rate`"}
"""Rates to start with where the best ones were alike in all language models (`docs/start.md`)."""


def rates() -> str:
    """Rates to start with; tuned ones over AdamW's, and those of the other parameters."""

    def ratio(suite: str, name: str, key: str = "rate") -> str:
        if name not in SUITES[suite].methods:
            return ""
        adamw, own = (_plan.best_in(suite, method, runs()) for method in ("adamw", name))
        if adamw is None or own is None or (key == "adam_rate" and takes_all(name, own)):
            return ""
        return cell(own[key] / adamw["rate"], ".3g")

    rows = []
    for name in dict.fromkeys([*SUITES[RECIPE].methods, *NAMES]):
        times = ratio(RECIPE, name)
        if name in NAMES and (times or name in STARTS):
            first = STARTS.get(name, f"{times} × `rate`")
            others = ratio(RECIPE, name, "adam_rate")
            rows.append([name_of(name), first, times, others, ratio(VISION, name)])
    titles = ["method", "start with", "language model", "there, others", "signals"]
    return f"{table(titles, rows)}\n\n{origin(RECIPE, VISION)}"


def takes_all(name: str, point: Mapping[str, Any]) -> bool:
    """Whether all parameters are matrices of a method, at a point of its tuning."""
    default = inspect.signature(getattr(curvax, name)).parameters["matrices"].default
    return bool(point.get("everything", default == "all"))


# As published.

PAPERS = {x: f"{x.title()} " for x in ("li", "gong", "an", "refael", "nam")}
PAPERS |= {"marin": "Marin,", "records": "modded-nanogpt,"}
CODE = "the authors' code"


def runs_of(paper: str) -> str:
    """A table of a paper's runs, and the numbers that it leaves open."""
    found = {
        name: run
        for name, run in RUNS.items()
        if run.source.startswith(PAPERS[paper]) or (paper == "nam" and CODE in run.source)
    }
    left = list(dict.fromkeys(run.open for run in found.values() if run.open))
    rows: dict[tuple[str, ...], list[str]] = {}  # those that differ in the storage alone are one
    for name, run in found.items():
        numbers = ", ".join(f"{k} {number(x)}" for k, x in run.numbers.items() if k != "storage")
        where = run.source.partition(", ")[2] if CODE not in run.source else CODE
        row = (cell(run.learning_rate, ".3g"), numbers, str(run.schedule), cell(run.steps, ","))
        row += (run.task, where, f"{left.index(run.open) + 1}" if run.open else "")
        rows.setdefault(row, []).append(f"`{name}`")
    titles = ["run", "peak", "numbers", "schedule", "steps", "batch and length", "where", "open"]
    written = table(titles, [[", ".join(names), *row] for row, names in rows.items()])
    return "\n\n".join([written, *(f"Open {i}: {text}" for i, text in enumerate(left, 1))])


def number(value: Any) -> str:
    """A number; a base optimizer with its arguments."""
    if isinstance(value, Mapping):
        numbers = (f"{k} {number(v)}" for k, v in value.items() if k != "optimizer")
        return f"{value['optimizer']}({', '.join(numbers)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def claims(paper: str, runs: Runs) -> str:
    """The table of a paper."""
    rows, ps = [], corrected(CLAIMS[paper], runs)
    for claim in CLAIMS[paper]:
        for suite in claim.suites:
            measured, verdict = judged(claim, suite, runs, ps)
            rows.append([claim.claim, claim.where, f"`{suite}`", measured, verdict])
    titles = ["claim", "where", "suite", "loss beyond the other's [95 %], p", "verdict"]
    return table(titles, rows).replace("---:", "---")  # all of it is text


# The page of the evidence.

COLUMNS = {
    "method": ("method", ""),
    "loss": ("validation loss, mean (range)", ""),
    "beyond": ("beyond AdamW's, mean [95 %]", ""),
    "p": ("p, Holm", ".2g"),
    "word": ("is", ""),
    "speed_up": ("AdamW's steps to its loss, over its own", ""),
    "faster": ("AdamW's time to it, over its own", ""),
    "ms": ("ms/step, one thread", ".3g"),
    "state_mb": ("state, MB", ".2f"),
    "step_mb": ("whole step, MB", ".2f"),
    "values": ("tuned", ""),
    "bounded": ("rate inside", ""),
}


def finals_table(suite: Suite, found: Mapping[str, Result], curve: Mapping[int, float]) -> Any:
    """Methods whose seeds are all there, the smallest loss first; `None` before AdamW has ended."""
    ended = {name: x for name, x in found.items() if len(x.finals) == len(suite.seeds)}
    if "adamw" not in ended:
        return None
    adamw = ended["adamw"].losses
    differences = {n: difference(x.losses, adamw) for n, x in ended.items() if n != "adamw"}
    ps = holm({name: d.p for name, d in differences.items()})
    rows = []
    for name, x in sorted(ended.items(), key=lambda pair: np.mean(pair[1].losses)):
        row: dict[str, Any] = {"method": name, "loss": spread(x.losses, ".3f")}
        row |= {"ms": x.milliseconds, "state_mb": x.finals[0]["state_bytes"] / 1e6}
        if "step_bytes" in x.finals[0]:  # lines of the first suite are older
            row["step_mb"] = x.finals[0]["step_bytes"] / 1e6
        mean, slower = float(np.mean(x.losses)), x.milliseconds / ended["adamw"].milliseconds
        row["speed_up"] = speed_up(mean, suite.steps, curve)
        row["faster"] = speed_up(mean, suite.steps, curve, slower)
        for key in x.finals[0]["tested"]:
            row[key] = spread([line["tested"][key] for line in x.finals], ".3f")
        if x.tuning is not None:
            row["values"] = ", ".join(f"{key} {value:g}" for key, value in x.tuning.best.items())
            row["bounded"] = "yes" if bounded(x.tuning.found) else "no"
        if d := differences.get(name):
            row |= {"beyond": f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"}
            row |= {"word": d.word, "p": ps[name]}
        rows.append(row)
    tested = {key: (key, "") for x in ended.values() for key in x.finals[0]["tested"]}
    known = COLUMNS | tested
    columns = {key: x for key, x in known.items() if any(row.get(key) for row in rows)}
    missing = [name for name in suite.methods if name not in ended]
    note = f"Seeds {', '.join(map(str, suite.seeds))}; {suite.unit}."
    if curve:
        lengths = ", ".join(f"{steps}: {loss:.3f}" for steps, loss in sorted(curve.items()))
        note += f" AdamW's final losses by steps, tuned at each: {lengths}."
    if missing:
        note += f" Not all seeds have run: {', '.join(missing)}."
    return _record.Table(f"{suite.name}: final losses", columns, rows, note)


def ladders(suites: Sequence[Suite], runs: Runs) -> _record.Table:
    """AdamW's steps to the losses of the others, by size and length."""
    rows: dict[str, dict[str, Any]] = {}
    columns = {"method": ("method", "")}
    for suite in suites:
        curve = _compare.curve_of(suite, runs)
        for name, x in _compare.results(suite, runs).items() if curve else ():
            if name != "adamw" and len(x.finals) == len(suite.seeds):
                columns[suite.name] = (suite.name, "")
                own = rows.setdefault(name, {"method": name})
                own[suite.name] = speed_up(float(np.mean(x.losses)), suite.steps, curve)
    note = (
        "AdamW's steps to the loss of a method, over the method's own, read off AdamW's final "
        "losses at the lengths of this size; a bound outside of them."
    )
    return _record.Table("Sizes and lengths", columns, list(rows.values()), note)


def write_evidence(folder: Path, suites: Sequence[Suite], runs: Runs) -> None:
    """Writes `evidence.md`, and a picture for every suite with results."""
    parts = [
        "# Evidence",
        "The protocol is [docs/evidence.md](../../../docs/evidence.md); every run is a line of a "
        "file in this folder. Losses are final ones; negative differences are better. *Rate "
        "inside*: a worse learning rate was tried on either side of the best. `decay` is rate × "
        "`weight_decay`.",
        _plan.status(suites, runs),
        ladders(suites, runs).markdown(),
    ]
    for suite in suites:
        found = _compare.results(suite, runs)
        finals = finals_table(suite, found, _compare.curve_of(suite, runs))
        if finals is not None:
            parts.append(finals.markdown())
        if (figure := draw(suite, found, suite.unit)) is not None:
            figure.savefig(folder / f"{suite.name}.png", dpi=120)
            parts.append(f"![loss against steps, seconds and state]({suite.name}.png)")
    codes = sorted({line["code"] for line in runs.values()})
    command = "`python -m benchmarks evidence run`, then `python -m benchmarks evidence tables`"
    parts.append(f"{command}, on {machines(runs.values())} Sources: {', '.join(codes)}.")
    (folder / "evidence.md").write_text("\n\n".join(parts) + "\n")


# The page of the queue for a GPU.

GPU = {
    "Products, and refreshes by them": ("kind", "stack", "program", "ms", "tflops", "error"),
    "Steps of optimizers": ("method", "p50", "over_adamw", "refresh_p50"),
    "Layer-wise steps": ("job", "ms", "first_ms", "peak_gib"),
}
RUN = ("method", "rate", "seed", "loss", "prose", "million_tokens", "seconds", "tokens_per_second")


def plain(title: str, keys: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of numbers by their names."""
    said = [key for key in keys if any(row.get(key) is not None for row in rows)]
    cells = [[cell(row.get(k), "" if row.get(k) is None else ".5g") for k in said] for row in rows]
    return f"## {title}\n\n{table([key.replace('_', ' ') for key in said], cells)}"


def trained(title: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All runs of a model; then those at the best rates beside AdamW's, seed by seed."""
    rows = [{**x, **x["tested"]} for x in lines]
    for row in rows:
        row["million_tokens"] = row["tokens"] * row["steps"][-1] / 1e6
        row |= {"seconds": sum(row["seconds"]), "loss": row["loss"] or "diverged"}
    yield plain(title, RUN, sorted(rows, key=lambda row: str(row["loss"])))
    most = max((x["steps"][-1] for x in lines if x["method"] != "adamw"), default=0)
    own = [x for x in lines if x["loss"] is not None and x["steps"][-1] == most]
    found = {}
    for method in dict.fromkeys(x["method"] for x in own):
        first = [x for x in own if x["method"] == method and x["seed"] == 0]
        rate = min(first, key=lambda x: x["loss"])["rate"] if first else None
        best = [x for x in own if (x["method"], x["rate"]) == (method, rate)]
        by_seed = sorted(best, key=lambda x: x["seed"])
        found[method] = Result(None, [{**x, "cpu_seconds": x["seconds"]} for x in by_seed])
    seeds = [x["seed"] for x in found["adamw"].finals] if "adamw" in found else []
    if len(seeds) > 1:
        how: Any = {"name": title, "seeds": seeds, "methods": list(found), "steps": most}
        suite: Any = SimpleNamespace(unit="nats per token", **how)
        yield finals_table(suite, found, {}).markdown()


def write_gpu(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """The page beside the lines."""
    lines = [*found.values()]
    steps = [x for x in lines if x.get("command", [""])[0] == "step"]
    rows = (
        [row for x in lines for row in x.get("rows", ())],
        [row for x in steps for own in x.get("tables", ()) for row in own["rows"]],
        [x for x in lines if "peak_gib" in x],
    )
    parts = [f"# The queue for a GPU: {path.stem}"]
    parts += [plain(*given, own) for given, own in zip(GPU.items(), rows, strict=True) if own]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "train" and "error" not in line:
            tuned = ", from prose to code" if line["base"] is not None else ""
            groups.setdefault(f"LLaMA-{line['size']}{tuned}", []).append(line)
    for title, own in groups.items():
        parts += trained(title, own)
    parts += [f"{x['job']} failed: {x['error']}" for x in lines if "error" in x]
    parts.append(f"`python -m benchmarks gpu`, on {machines(lines)}")
    path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


TABLES: dict[str, Callable[[], str]] = {
    **{"calls": calls, "first_calls": lambda: calls(_calls.FIRST), "kept": kept},
    **{"methods": methods, "parts": parts, "rates": rates, "sizes": sizes, "weights": weights},
    "costs": lambda: recorded("programs", "Default calls"),
    "layouts": lambda: recorded("layouts", "Received"),
    "widths": widths.shown,
    "spikes": lambda: recorded("precision", "After a spike"),
    "accuracy": lambda: recorded("precision", "Turns"),
    **{f"claims_{x}": functools.partial(lambda x: claims(x, runs()), x) for x in CLAIMS},
    **{f"published_{paper}": functools.partial(runs_of, paper) for paper in PAPERS},
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Every page: its path, its text, and the text that the results ask for."""
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        yield path, text, PLACE.sub(lambda m: f"{m[1]}{m[2]}\n{TABLES[m[1]]()}\n\n", text)


def main() -> None:
    """Writes the pages, or tells whether they match the results."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args()
    wrong = [*wrong_formulas()]
    for path, text, wanted in pages():
        if text != wanted and args.check:
            wrong.append(f"{path.relative_to(ROOT)}: run `python -m benchmarks pages`")
        elif text != wanted:
            path.write_text(wanted)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
