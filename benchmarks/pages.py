"""Writes the tables of the pages from recorded results.

    python -m benchmarks pages           # after new results
    python -m benchmarks pages --check   # writes nothing; fails if a table differs

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; nothing in it is typed by
hand. Directions and drawbacks of methods are typed in a table of `docs/methods.md`, which others
repeat; its formulas for the state are compared with the counts of tests. The build of the site
makes these checks.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import curvax
from tests.registry import LEADERS, METHODS

from . import _published, refreshes
from ._curves import spread
from ._methods import CODED, NAMES, PEER
from ._record import FOLDER, cell, table
from .evidence import _calls, _claims, _compare, _lines, _plan
from .evidence._claims import LEVEL
from .evidence._methods import METHODS as TUNED_METHODS
from .evidence._pages import finals_table
from .evidence._suites import SUITES

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/methods.md",
    "docs/choosing.md",
    "docs/combinations.md",
    "docs/claims.md",
    "docs/start.md",
    "docs/performance.md",
    "docs/performance_details.md",
    "docs/published.md",
    "docs/distribution.md",
)
PLACE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL)


TYPED = re.compile(r"<!-- typed: formulas -->\n(.*?)<!-- end of table -->", re.DOTALL)


class Typed(NamedTuple):
    """A method's row in the table of `docs/methods.md`."""

    direction: str
    state: str
    work: str
    refresh: str
    paper: str
    mind: str  # why one might not take it


@functools.cache
def typed() -> dict[str, Typed]:
    """By method."""
    found = TYPED.search((ROOT / "docs/methods.md").read_text())
    assert found is not None
    lines = [re.split(r" *\| *", line)[1:-1] for line in found[1].strip().splitlines()[2:]]
    return {line[0].strip("`"): Typed(*line[1:]) for line in lines}


class Shown(NamedTuple):
    """A method of the pages."""

    mind: str
    measured: str  # its name in the tables of `_methods`


CODED_MIND = {
    "asgo": "4-bit codes lose ASGO's gain",
    "shampoo": "codes cost time at every statistic",
    "soap": "4-bit codes lose SOAP's gain, and cost time at every step",
}


def shown_of(name: str) -> Iterator[tuple[str, Shown]]:
    """A peer, the method, and the method in 4 bits."""
    mind = typed()[name].mind
    if name in PEER:
        yield PEER[name][0], Shown(mind, PEER[name][0])
    yield name, Shown(mind, name)
    if name in CODED:
        yield f"{name}_4bit", Shown(CODED_MIND[name], f"{name}, {CODED[name]}")


SHOWN = {
    "optax.adamw": Shown("", "optax.adamw"),
    **{name: x for own in NAMES for name, x in shown_of(own)},
}
TRAINED = ("A small language model", "Handwritten digits")
RECIPE, VISION, TUNED = "recipe-250", "vision-2000", "finetune-250"  # suites of the evidence
LADDER = tuple(x.name for x in SUITES.values() if x.ladder == SUITES[RECIPE].ladder)
UPDATED, STORED, ADDED = "GPT-2-small's kernels", "State against formula", "Training step"
NUMBERS = 768 * 3072  # of the matrix that states are counted for


@functools.cache
def recorded(suite: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The lines of a suite."""
    return json.loads(folder.joinpath(f"{suite}.json").read_text())


def results(suite: str, title: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The rows of a recorded table by their method."""
    record = recorded(suite, folder)
    found = next((t["rows"] for t in record["tables"] if t["title"] == title), None)
    if found is None:
        raise ValueError(f"{suite}.json has no table {title!r}.")
    return {row["method"]: row for row in found}


@functools.cache
def runs() -> dict[str, dict[str, Any]]:
    """The lines of the evidence."""
    return _lines.read(FOLDER / "evidence")


@functools.cache
def finals(suite: str) -> dict[str, dict[str, Any]]:
    """The results of a suite of the evidence for the methods whose seeds have all run."""
    found = _compare.results(SUITES[suite], runs())
    written = finals_table(SUITES[suite], found, _compare.curve_of(SUITES[suite], runs()))
    rows = {} if written is None else {row["method"]: row for row in written.rows}
    return {"optax.adamw" if name == "adamw" else name: row for name, row in rows.items()}


def shown(name: str) -> str:
    """A method's name as pages have it."""
    return "AdamW" if name == "optax.adamw" else f"`{name}`"


def bytes_per_number(name: str) -> str:
    """The bytes per number of the state of a 768×3072 matrix."""
    row = results("memory", STORED).get(SHOWN[name].measured)
    return "" if row is None else format(row["wide_bytes"] / NUMBERS, ".2f")


def wrong_formulas() -> Iterator[str]:
    """Methods whose state has other numbers than the formula that is typed."""
    m, n, r = 7, 11, 3
    for row in METHODS:
        formula = typed()[row.name].state.replace("none", "`0`").split("`")[1].replace("²", "**2")
        for product in ("mn", "mr", "nr"):
            formula = formula.replace(product, "*".join(product))
        formula = re.sub(r"(?<=\d)(?=[mnr])", "*", formula)
        found = row.numbers(row.size(m, n, r, {}))
        if eval(formula, {"m": m, "n": n, "r": r}) != found:
            yield f"{row.name}: the state has {found} numbers at m={m}, n={n}, r={r}: {formula}"


def source(suite: str) -> str:
    """Command and machine of a record."""
    record = recorded(suite)
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("jax", "optax", "flax"))
    return f"`{record['command']}`, on {record['hardware']}; {versions}."


def calls() -> str:
    """The printed calls on the language model: their results and their costs."""
    suite, adamw = SUITES[RECIPE], finals(RECIPE)["optax.adamw"]
    curve, base = _compare.curve_of(suite, runs()), _calls.result_of(RECIPE, _calls.ADAMW, runs())
    state = bytes_per_number("optax.adamw")
    rows = [["AdamW, tuned", "", adamw["loss"], f"{len(suite.seeds)}", *3 * ["1.00"], state]]
    for printed in _calls.PRINTED[RECIPE]:
        found = _calls.result_of(RECIPE, printed.call, runs())
        if not found.finals:
            continue
        loss, slower = float(np.mean(found.losses)), found.milliseconds / base.milliseconds
        over = [_compare.speed_up(loss, suite.steps, curve, x) for x in (1.0, slower)]
        row = [printed.goal, f"`{printed.call}`", spread(found.losses, ".3f")]
        row += [f"{len(found.finals)}", *over, cell(slower, ".2f")]
        rows.append([*row, bytes_per_number(printed.method)])
    rows.sort(key=lambda row: float(row[2].split()[0]))
    titles = ["goal", "call", "validation loss, mean (range)", "seeds"]
    titles += ["AdamW's steps to it, over its own", "AdamW's time to it, over its own"]
    titles += ["time of a step", "state, bytes per parameter"]
    written = table(titles, rows).replace("| --- | ---: |", "| --- | --- |")  # a call is text
    return f"{written}\n\n{origin(*LADDER)}\n\n{origin(RECIPE, command='calls')}"


def kept() -> str:
    """The printed calls on all tasks where they ran, beside the tuned points."""
    rows = []
    for name, printed in ((name, x) for name, own in _calls.PRINTED.items() for x in own):
        found = _calls.compared(name, printed, runs())
        if found is None:
            continue
        call, adamw, tuned, share = found
        gains = [f"{a - b:.3f}" for a, b in ((adamw, call), (adamw, tuned))]
        worth = f"{100 * share:.0f} %" if adamw - tuned > LEVEL else ""
        own = _calls.result_of(name, printed.call, runs())
        row = [f"`{name}`", f"`{printed.call}`", spread(own.losses, ".3f"), f"{len(own.finals)}"]
        rows.append([*row, *gains, worth])
    titles = ["suite", "call", "validation loss, mean (range)", "seeds", "below AdamW's"]
    written = table([*titles, "the tuned point below AdamW's", "kept"], rows)
    written = written.replace("| --- | ---: |", "| --- | --- |")
    return f"{written}\n\n{origin(*_calls.PRINTED, command='calls')}"


def origin(*suites: str, command: str = "run") -> str:
    """Command and machine of suites of the evidence."""
    lines = [
        line
        for line in runs().values()
        if line["suite"] in suites and (line["method"] in TUNED_METHODS) == (command == "run")
    ]
    hardware = "; ".join(sorted({line["hardware"] for line in lines}))
    packages = ("jax", "optax", "flax")
    versions = {", ".join(f"{x} {line['versions'][x]}" for x in packages) for line in lines}
    command = f"python -m benchmarks evidence {command} --suites {','.join(suites)}"
    return f"`{command}`, on {hardware}; {'; '.join(sorted(versions))}."


def methods() -> str:
    """All methods: state, cost, gain and limits; of a new one those that are measured."""
    model, digits = (results("train", title) for title in TRAINED)
    suites = {RECIPE: "language model", VISION: "signals", TUNED: "fine-tuning"}
    suites = {suite: title for suite, title in suites.items() if finals(suite)}
    updates = results("step", UPDATED)
    rows = []
    for name, method in SHOWN.items():
        update, trained = updates.get(method.measured, {}), model.get(name, {})
        rows.append(
            [
                shown(name),
                bytes_per_number(name),
                cell(update.get("p50"), ".1f"),
                cell(update.get("refresh_p50"), ".0f"),
                *(finals(suite).get(name, {}).get("beyond", "") for suite in suites),
                trained.get("beyond", ""),
                digits.get(name, {}).get("beyond", ""),
                method.mind,
            ]
        )
    titles = ["method", "state, bytes per parameter", "update, ms", "at a refresh, ms"]
    titles += [*suites.values(), "smaller language model", "digits"]
    found = table([*titles, "mind"], rows)
    return "\n\n".join([found, origin(*suites), *map(source, ("memory", "step", "train"))])


def leaders() -> str:
    """Recipes beside the methods that they are made of, with the learning rates to start from."""
    records = [results("train", title) for title in TRAINED]
    model, digits = records
    made_of = ("optax.adamw", "muon", "soap", "kl_shampoo", "shampoo", "asgo")
    rows = []
    for name in [*made_of, *(row.name for row in LEADERS)]:
        if not all(name in record for record in records):
            continue
        factors = [record[name]["rate"] / record["optax.adamw"]["rate"] for record in records]
        row = model[name]
        rows.append(
            [
                shown(name),
                row["loss"],
                row["beyond"],
                cell(row["steps"], ".2f"),
                digits[name]["beyond"],
                " and ".join(f"{factor:g}" for factor in dict.fromkeys(factors)),
            ]
        )
    rows.sort(key=lambda row: float(row[1].split()[0]))
    titles = ["recipe", "language model: loss, mean (range)", "beyond AdamW's"]
    titles += ["steps to AdamW's", "digits: beyond AdamW's"]
    titles += ["best rate over AdamW's: language model and digits"]
    return f"{table(titles, rows)}\n\n{source('train')}"


STARTS = {"muon": 0.03, "soap": 0.01}
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

    models = [results("train", title) for title in TRAINED]
    rows = []
    for name in dict.fromkeys([*SUITES[RECIPE].methods, *NAMES]):
        if name in SHOWN and all(name in model for model in models):
            small = [
                cell(model[name]["rate"] / model["optax.adamw"]["rate"], ".3g") for model in models
            ]
            times = ratio(RECIPE, name) or small[0]
            row = [f"{STARTS[name]}" if name in STARTS else f"{times} × `rate`"]
            row += [ratio(RECIPE, name), ratio(RECIPE, name, "adam_rate")]
            rows.append([shown(name), *row, *small, ratio(VISION, name)])
    titles = ["method", "start with", "language model", "there, others", "smaller language model"]
    found = table([*titles, "digits", "signals"], rows)
    return f"{found}\n\n{origin(RECIPE, VISION)}\n\n{source('train')}"


def takes_all(name: str, point: Mapping[str, Any]) -> bool:
    """Whether all parameters are matrices of a method, at a point of its tuning."""
    default = inspect.signature(getattr(curvax, name)).parameters["matrices"].default
    return bool(point.get("everything", default == "all"))


def overheads() -> str:
    """The cost of a training step with some of them, at the papers' periods."""
    rows = [
        [shown(name) if "," not in name else name, cell(row["mean"], ".0f"), percent(row)]
        for name, row in results("overhead", ADDED).items()
    ]
    found = table(["method", "training step, ms", "more than AdamW's"], rows)
    return f"{found}\n\n{source('overhead')}"


def percent(row: dict[str, Any]) -> str:
    """How much longer than AdamW's."""
    return "" if row["method"] == "optax.adamw" else f"{100 * (row['over_adamw'] - 1):+.1f} %"


def layouts() -> str:
    """What a device receives in each layout."""
    record = recorded("layouts")["tables"][0]
    columns = record["columns"]
    rows = [[cell(row[key], form) for key, (_, form) in columns.items()] for row in record["rows"]]
    return f"{table([heading for heading, _ in columns.values()], rows)}\n\n{source('layouts')}"


TABLES: dict[str, Callable[[], str]] = {
    "calls": calls,
    "kept": kept,
    "methods": methods,
    "leaders": leaders,
    "rates": rates,
    "overheads": overheads,
    "layouts": layouts,
    "refresh_losses": lambda: refreshes.shown("Losses"),
    "refresh_costs": lambda: refreshes.shown("Costs"),
    "refresh_programs": lambda: refreshes.shown("Programs"),
    "refresh_accuracy": lambda: refreshes.shown("Accuracy"),
    **{
        f"claims_{paper}": functools.partial(lambda paper: _claims.claims(paper, runs()), paper)
        for paper in _claims.CLAIMS
    },
    **{
        f"published_{paper}": functools.partial(_published.runs_of, paper)
        for paper in _published.PAPERS
    },
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
