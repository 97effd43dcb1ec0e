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
from .evidence import _calls, _compare, _plan
from .evidence._compare import CLAIMS, difference, name_of, speed_up
from .evidence._descent import bounded
from .evidence._methods import METHODS as TUNED_METHODS
from .evidence._plan import Result, Runs, ended
from .evidence._suites import SUITES, Suite

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL)
TYPED = re.compile(r"<!-- typed: formulas -->\n(.*?)<!-- end of table -->", re.DOTALL)
RECIPE, VISION, TUNED = "recipe-250", "vision-2000", "finetune-250"  # suites of the evidence
LADDER = tuple(x.name for x in SUITES.values() if x.ladder == SUITES[RECIPE].ladder)
PACKAGES = ("jax", "optax", "flax")


@functools.cache
def typed() -> dict[str, dict[str, str]]:
    """The rows of the table of `docs/methods.md` that is typed, by method."""
    found = TYPED.search((ROOT / "docs/methods.md").read_text())
    assert found is not None
    return {row["method"].strip("`"): row for row in _record.rows_in(found[1])}


@functools.cache
def runs() -> dict[str, dict[str, Any]]:
    """The lines of the evidence."""
    return _plan.read(FOLDER / "evidence")


@functools.cache
def finals(suite: str) -> dict[str, dict[str, Any]]:
    """The results of a suite of the evidence for the methods whose seeds have all run."""
    found = ended(SUITES[suite], runs())
    written = finals_table(SUITES[suite], found, _compare.curve_of(SUITES[suite], runs()))
    return {} if written is None else {row["method"]: row for row in written.rows}


def bytes_per_number(name: str) -> str:
    """The bytes per number of the state of a 768×3072 matrix, at rank 64."""
    tree = {"kernel": jax.ShapeDtypeStruct((768, 3072), "float32")}
    return format(curvax.state_bytes(MEASURED[name].make(10, 64), tree) / (768 * 3072), ".2f")


def wrong_formulas() -> Iterator[str]:
    """Methods whose state has other numbers than the formula that is typed."""
    m, n, r = 7, 11, 3
    assert not (missing := {x.name for x in METHODS} - {*typed()}), f"docs/methods.md: {missing}"
    for row in METHODS:
        formula = typed()[row.name]["state, numbers"].replace("none", "`0`").split("`")[1]
        formula = formula.replace("²", "**2")
        for product in ("mn", "mr", "nr"):
            formula = formula.replace(product, "*".join(product))
        formula = re.sub(r"(?<=\d)(?=[mnr])", "*", formula)
        found = row.numbers(row.size(m, n, r, {}))
        if eval(formula, {"m": m, "n": n, "r": r}) != found:
            yield f"{row.name}: the state has {found} numbers at m={m}, n={n}, r={r}: {formula}"


def recorded(page: str, title: str) -> str:
    """A section of a record, with the command and the machine."""
    text, command = _record.section(page, title), (FOLDER / f"{page}.md").read_text().strip()
    command = command.rpartition("\n\n")[2]
    return f"{text.removesuffix(command).strip()}\n\n{command}"


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
        over = [speed_up(loss, suite.steps, curve, x) for x in (1.0, slower)]
        others = _calls.elsewhere(RECIPE, printed.call, runs())
        row = [printed.goal, f"`{printed.call}`", spread(found.losses, ".3f", others), *over]
        row += [cell(slower, ".2f"), on_gpu(printed)]
        rows.append([*row, bytes_per_number(printed.method)])
    rows.sort(key=lambda row: float(row[2].split()[0]))
    titles = ["goal", "call", f"validation loss, mean (range) of {seeds} seeds"]
    titles += ["AdamW's steps to it, over its own", "AdamW's time to it, over its own"]
    titles += ["time of a step, CPU", "time of a step, GPU", "state, bytes per parameter"]
    made = origin(*LADDER), origin(RECIPE, command="calls")
    return "\n\n".join([table(titles, rows, words=2), *made])


@functools.cache
def default_calls() -> dict[str, dict[str, str]]:
    """The table of default calls for a GPU, by method and heading."""
    rows = _record.rows_in(_record.section("programs", "Default calls"))
    return {row["default call"].split("`")[1]: row for row in rows if row["default call"]}


def on_gpu(printed: _calls.Printed) -> str:
    """A training step over AdamW's, of a call whose program is known."""
    return default_calls().get(printed.program, {}).get("training step over AdamW's", "")


def kept() -> str:
    """The printed calls on all tasks where they ran, beside the tuned points."""
    rows = []
    for name, printed in ((x, call) for x in _calls.PRINTED for call in _calls.measured(x)):
        found = _calls.compared(name, printed, runs())
        if found is None:
            continue
        gains = [x and f"{found.adamw - x:.3f}" for x in (found.call, found.tuned)]
        share = None if found.share is None else f"{100 * found.share:.0f} %"
        own = _calls.result_of(name, printed.call, runs())
        loss = spread(own.losses, ".3f", _calls.elsewhere(name, printed.call, runs()))
        row = [f"`{name}`", f"`{printed.call}`", loss, f"{len(own.finals)}"]
        rows.append([*row, *(x or "" for x in (*gains, share))])
    titles = ["suite", "call", "validation loss, mean (range)", "seeds", "below AdamW's"]
    titles += ["the tuned point below AdamW's", "kept"]
    others = [
        f"In `{suite}` take `{other.call}` in place of `{call}`."
        for suite in _calls.PRINTED
        for call, other in _calls.alternatives(suite, runs()).items()
    ]
    written = table(titles, rows, words=2)
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
    titles += ["difference, mean (95 % interval)"]
    return f"{table(titles, rows, words=3)}\n\n{origin(*_calls.PARTS, command='calls')}"


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
        mind = typed().get(name, {}).get("mind", "")
        rows.append([name_of(name), bytes_per_number(name), *gains, mind])
    titles = ["method", "state, bytes per parameter", *suites.values(), "mind"]
    return f"{table(titles, rows)}\n\n{origin(*suites)}"


STARTS = {"muon": "0.03", "soap": "0.01", "swan": "0.13", "kl_shampoo": "2 × `rate`"}
"""Rates to start with where the best ones were alike in all language models (`docs/start.md`)."""


def rates() -> str:
    """Rates to start with; tuned ones over AdamW's, and those of the other parameters."""

    def ratio(suite: str, name: str, key: str = "rate") -> str:
        tuned = (x for x in ("adamw", name) if x in SUITES[suite].methods)
        points = [point for x in tuned if (point := _plan.best_in(suite, x, runs()))]
        if len(points) < 2:
            return ""
        adamw, own = points
        default = inspect.signature(getattr(curvax, name)).parameters["matrices"].default
        without_others = key == "adam_rate" and own.get("everything", default == "all")
        return "" if without_others else cell(own[key] / adamw["rate"], ".3g")

    rows = []
    for name in (x for x in dict.fromkeys([*SUITES[RECIPE].methods, *NAMES]) if x in NAMES):
        times = ratio(RECIPE, name)
        if times or name in STARTS:
            first = STARTS.get(name, f"{times} × `rate`")
            others = ratio(RECIPE, name, "adam_rate")
            rows.append([name_of(name), first, times, others, ratio(VISION, name)])
    titles = ["method", "start with", "language model", "there, others", "signals"]
    return f"{table(titles, rows)}\n\n{origin(RECIPE, VISION)}"


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


def claims(paper: str) -> str:
    """The table of a paper."""
    rows, ps = [], _compare.corrected(CLAIMS[paper], runs())
    for claim in CLAIMS[paper]:
        for suite in claim.suites:
            measured, verdict = _compare.judged(claim, suite, runs(), ps)
            rows.append([claim.claim, claim.where, f"`{suite}`", measured, verdict])
    titles = ["claim", "where", "suite", "loss beyond the other's [95 %], p", "verdict"]
    return table(titles, rows, words=len(titles))


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
    """Methods that have ended, the smallest loss first; `None` before AdamW has."""
    if "adamw" not in found:
        return None
    adamw = found["adamw"]
    others = {name: x for name, x in found.items() if name != "adamw"}
    differences = {n: difference(x.losses, adamw.losses) for n, x in others.items()}
    ps = _compare.holm({name: d.p for name, d in differences.items()})
    rows = []
    for name, x in sorted(found.items(), key=lambda pair: np.mean(pair[1].losses)):
        row: dict[str, Any] = {"method": name, "loss": spread(x.losses, ".3f")}
        row |= {"ms": x.milliseconds, "state_mb": x.finals[0]["state_bytes"] / 1e6}
        row["step_mb"] = x.finals[0].get("step_bytes", np.nan) / 1e6  # the first lines are older
        mean, slower = float(np.mean(x.losses)), x.milliseconds / adamw.milliseconds
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
    tested = {key: (key, "") for x in found.values() for key in x.finals[0]["tested"]}
    missing = [name for name in suite.methods if name not in found]
    note = f"Seeds {', '.join(map(str, suite.seeds))}; {suite.unit}."
    if curve:
        lengths = ", ".join(f"{steps}: {loss:.3f}" for steps, loss in sorted(curve.items()))
        note += f" AdamW's final losses by steps, tuned at each: {lengths}."
    if missing:
        note += f" Not all seeds have run: {', '.join(missing)}."
    return _record.Table(f"{suite.name}: final losses", COLUMNS | tested, rows, note)


def ladders(suites: Sequence[Suite], runs: Runs) -> _record.Table:
    """AdamW's steps to the losses of the others, by size and length."""
    rows: dict[str, dict[str, Any]] = {}
    columns = {key: (key, "") for key in ("method", *(suite.name for suite in suites))}
    for suite in suites:
        curve = _compare.curve_of(suite, runs)
        for name, x in ended(suite, runs).items() if curve else ():
            if name != "adamw":
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
        found = ended(suite, runs)
        finals = finals_table(suite, found, _compare.curve_of(suite, runs))
        if finals is not None:
            parts.append(finals.markdown())
        if (figure := draw(suite, found)) is not None:
            figure.savefig(folder / f"{suite.name}.png", dpi=120)
            parts.append(f"![loss against steps, seconds and state]({suite.name}.png)")
    codes = sorted({line["code"] for line in runs.values()})
    command = "`python -m benchmarks evidence run`, then `python -m benchmarks evidence tables`"
    parts.append(f"{command}, on {machines(runs.values())} Sources: {', '.join(codes)}.")
    (folder / "evidence.md").write_text("\n\n".join(parts) + "\n")


# The page of the queue for a GPU.

PRODUCT = ("kind", "stack", "program", "ms", "tflops", "error")
STEP = ("method", "p50", "over_adamw", "refresh_p50")
LARGE = ("job", "ms", "first_ms", "peak_gib")
RUN = ("method", "rate", "seed", "loss", "prose", "million_tokens", "seconds", "tokens_per_second")


def plain(title: str, keys: Iterable[str], rows: list[Any]) -> str:
    """A table of numbers by their names; nothing without rows."""
    columns = {key: (key.replace("_", " "), ".5g") for key in keys}
    return _record.Table(title, columns, rows).markdown() if rows else ""


def trained(title: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All runs of a model; then those at the best rates beside AdamW's, seed by seed."""
    rows = [{**x, **x["tested"]} for x in lines]
    for row in rows:
        row["million_tokens"] = row["tokens"] * row["steps"][-1] / 1e6
        row |= {"seconds": sum(row["seconds"]), "loss": row["loss"] or "diverged"}
    yield plain(title, RUN, sorted(rows, key=lambda row: str(row["loss"])))
    most = max((x["steps"][-1] for x in lines if x["method"] != "adamw"), default=0)
    own = [x for x in lines if x["loss"] is not None and x["steps"][-1] == most]
    found: dict[str, Result] = {}
    for best in sorted((x for x in own if x["seed"] == 0), key=lambda x: x["loss"]):
        alike = [x for x in own if all(x[key] == best[key] for key in ("method", "rate"))]
        by_seed = sorted(alike, key=lambda x: x["seed"])
        finals: list[Any] = [{**x, "cpu_seconds": x["seconds"]} for x in by_seed]
        found.setdefault(best["method"], Result(None, finals))
    seeds = [x["seed"] for x in found["adamw"].finals] if "adamw" in found else []
    if len(seeds) > 1:
        suite: Any = SimpleNamespace(name=title, unit="nats per token", seeds=seeds, steps=most)
        suite.methods = list(dict.fromkeys(x["method"] for x in own))
        whole = {name: x for name, x in found.items() if len(x.finals) == len(seeds)}
        yield finals_table(suite, whole, {}).markdown()


def write_gpu(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """The page beside the lines."""
    lines = [*found.values()]
    products = [row for x in lines for row in x.get("rows", ())]
    records = [own for x in lines for own in x.get("tables", ()) if x["command"][0] == "step"]
    parts = [
        f"# The queue for a GPU: {path.stem}",
        plain("Products, and refreshes by them", PRODUCT, products),
        plain("Steps of optimizers", STEP, [row for own in records for row in own["rows"]]),
        plain("Layer-wise steps", LARGE, [x for x in lines if "peak_gib" in x]),
    ]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "train" and "error" not in line:
            tuned = ", from prose to code" if line["base"] is not None else ""
            groups.setdefault(f"LLaMA-{line['size']}{tuned}", []).append(line)
    for title, own in groups.items():
        parts += trained(title, own)
    parts += [f"{x['job']} failed: {x['error']}" for x in lines if "error" in x]
    parts.append(f"`python -m benchmarks gpu`, on {machines(lines)}")
    path.with_suffix(".md").write_text("\n\n".join(filter(None, parts)) + "\n")


TABLES: dict[str, Callable[[], str]] = {
    **{"calls": calls, "first_calls": lambda: calls(_calls.FIRST), "kept": kept},
    **{"methods": methods, "parts": parts, "rates": rates, "sizes": sizes, "weights": weights},
    "costs": lambda: recorded("programs", "Default calls"),
    "layouts": lambda: recorded("layouts", "Received"),
    "widths": widths.shown,
    "spikes": lambda: recorded("precision", "After a spike"),
    "accuracy": lambda: recorded("precision", "Turns"),
    **{f"claims_{paper}": functools.partial(claims, paper) for paper in CLAIMS},
    **{f"published_{paper}": functools.partial(runs_of, paper) for paper in PAPERS},
}


def main() -> None:
    """Writes the pages, or tells whether they match the results."""
    parser = _record.parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check, wrong = parser.parse_args().check, [*wrong_formulas()]
    for path in PAGES:
        text = path.read_text()
        wanted = PLACE.sub(lambda m: f"{m[1]}{m[2]}\n{TABLES[m[1]]()}\n\n", text)
        if text != wanted and check:
            wrong.append(f"{path.relative_to(ROOT)}: run `python -m benchmarks pages`")
        elif text != wanted:
            path.write_text(wanted)
    if wrong:
        raise SystemExit("\n".join(wrong))
