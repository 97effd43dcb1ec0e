"""Calls as pages print them, run as they stand on the tasks of the suites.

A call is Python with two numbers, `rate` and `decay`: the learning rate of matrices and the weight
decay of the AdamW that is tuned in the suite. It gets the suite's clipping and schedule, and none
of its own numbers is tuned. `BESIDE`, from `beside.toml`, are other calls of the same methods, for
where one keeps less than `ENOUGH` of the tuned gain. `PARTS`, from `parts.toml`, are calls with one
part more than another. Among the lines a call's text is the name of the method; its values are the
two numbers and the defaults of its arguments, so that it runs again where a default changes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax  # noqa: F401 - calls name it

from .._record import COLORS
from ._compare import LEVEL
from ._methods import METHODS
from ._plan import Lines, Request, Result, Runs, best_in, results
from ._suites import SUITES, Suite
from ._sweep import Runner

ADAMW = "optax.adamw(rate, weight_decay=decay)"  # whose times others are compared with
ENOUGH = 0.85  # of the gain of the tuned point


class Printed(NamedTuple):
    """A call, and the purpose that pages name."""

    goal: str
    call: str

    @property
    def method(self) -> str:
        """The method of the tuned point that it is compared with."""
        return self.call.partition("(")[0].rpartition(".")[2]

    @property
    def program(self) -> str:
        """The name of its matrices' program in `programs`: the method's, if it is the default's."""
        call: Any = ast.parse(self.call, mode="eval").body
        call.args[:1] = [ast.Name("rate")]
        call.keywords = [x for x in call.keywords if x.arg not in ("rank", "others")]
        return ast.unparse(call) if call.keywords else self.method


SOAP = Printed("the lowest loss", "curvax.soap(0.01)")
MUON = Printed("nearly this loss for less", "curvax.muon(0.03)")
PRODUCTS = "method=curvax.polar.newton_schulz(norm='gram', eps=0.0)"
APART = "others=optax.adamw(rate)"
SWAN = Printed("a lower loss without state", f"curvax.swan(0.13, {PRODUCTS}, {APART})")
SLOWER = Printed("the same, slower", f"curvax.swan(0.06, {PRODUCTS}, {APART})")
SHAMPOO = Printed(
    "AdamW's rate, with Shampoo's directions",
    "curvax.shampoo(rate, refresh=10, base=optax.adamw, others=optax.adamw(4 * rate))",
)
ALICE = Printed(
    "a slightly lower loss in low-rank state",
    "curvax.alice(8 * rate, rank=64, others=optax.adamw(2 * rate))",
)
RACS = Printed(
    "near AdamW's loss with almost no state",
    "curvax.racs(16 * rate, others=optax.adamw(4 * rate))",
)
TUNED = Printed("fine-tuning", "curvax.muon(0.01)")
REST = (SHAMPOO, ALICE, RACS)
FIRST = (SOAP, MUON, SWAN, RACS)  # in README and its picture
PRINTED = {
    "recipe-250": (SOAP, MUON, SWAN, *REST),
    "recipe-1000": (SOAP, MUON, SWAN, *REST),
    "finetune-250": (TUNED, SOAP, SLOWER, *REST),
    "code-250": (SOAP, MUON, SWAN, *REST),
    "vision-2000": (TUNED, SOAP, SLOWER, *REST),
}
BESIDE, PARTS = (
    tomllib.loads((Path(__file__).parent / f"{x}.toml").read_text()) for x in ("beside", "parts")
)


class _Bare(ast.NodeTransformer):
    """A call without what belongs to a model and its run: its matrices, decay and schedule."""

    LEFT_OUT = ("matrices", "mesh", "weight_decay", "weight_dimension_numbers")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A schedule is its peak, an optimizer with nothing but its decay is the optimizer."""
        self.generic_visit(node)
        node.keywords = [x for x in node.keywords if x.arg not in self.LEFT_OUT]
        bare = ast.unparse(node.func) in ("schedule", "functools.partial") and not node.keywords
        return node.args[0] if bare and len(node.args) == 1 else node


def calls_in(text: str) -> Iterator[str]:
    """The calls of methods on a page that have no names but `rate`, in one form.

    Args:
      text: of a page in Markdown, or of a notebook, which is Python.
    """
    fenced = r"```py(?:thon)?\n(.*?)```"
    blocks = re.findall(fenced, text, re.DOTALL)
    inline = re.findall(r"`(curvax\.[^`]+\))`", re.sub(fenced, "", text, flags=re.DOTALL))
    for code in (text, *blocks, *inline):
        try:
            tree = ast.parse(code)
        except SyntaxError:  # of a page as a whole, or with "…"
            continue
        for node in ast.walk(_Bare().visit(tree)):
            if isinstance(node, ast.Call):
                names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                known = ast.unparse(node.func) in (f"curvax.{name}" for name in METHODS)
                if known and names <= {"curvax", "optax", "rate"}:
                    yield ast.unparse(node)


def request_of(suite: str, call: str, seed: int, runs: Runs, text: str | None = None) -> Request:
    """The run of a call, as its defaults are now, on the suite's text if no other is named."""
    adamw: Any = best_in(suite, "adamw", runs)
    values = {"rate": adamw["rate"], "decay": adamw["decay"] / adamw["rate"]}
    if call != ADAMW:
        _, method = call.split("curvax.", 1)
        given = inspect.signature(eval(f"curvax.{method.partition('(')[0]}")).parameters.values()
        said = [f"{x.name}={x.default}" for x in given if x.default not in (x.empty, None)]
        values["defaults"] = re.sub(r" at 0x\w+", "", ", ".join(said))
    return Request(suite, call, values if text is None else values | {"text": text}, seed)


def measured(suite: str) -> list[Printed]:
    """Those that pages print, and those beside: of one argument, with `others`, and longer ones."""
    return [*PRINTED[suite], *(Printed("", call) for call in BESIDE[suite])]


def calls_of(suite: str) -> list[str]:
    """Those that run: AdamW's, those measured, and those with a part more."""
    parts = [call for group in PARTS.get(suite, []) for call in group["calls"]]
    return [ADAMW, *(x.call for x in measured(suite)), *parts]


def run(
    suites: Iterable[Suite], lines: Lines, most: int | None = None, text: str | None = None
) -> None:
    """Makes the missing runs, suite after suite and seed by seed, at most so many.

    Where this process reads another text than the suite's, of this digest, printed calls alone run.
    """
    wanted = [
        request_of(suite.name, call, seed, lines.runs, text)
        for suite in suites
        if suite.name in PRINTED
        for seed in suite.seeds
        for call in (
            calls_of(suite.name) if text is None else [x.call for x in PRINTED[suite.name]]
        )
    ]
    missing = [request for request in wanted if request.key not in lines.runs]
    runner = Runner()
    for request in tqdm(missing[:most], desc="calls", file=sys.stderr):
        lines.append(runner.line(request))


def result_of(suite: str, call: str, runs: Runs) -> Result:
    """The runs of a call that are there."""
    keys = [request_of(suite, call, seed, runs).key for seed in SUITES[suite].seeds]
    return Result(None, [runs[key] for key in keys if key in runs])


def elsewhere(suite: str, call: str, runs: Runs) -> list[float]:
    """The losses of a call on other texts than the suite's."""
    own = [request_of(suite, call, seed, runs) for seed in SUITES[suite].seeds]
    texts = {x["values"]["text"] for x in runs.values() if "text" in x["values"]}
    keys = [x._replace(values={**x.values, "text": y}).key for x in own for y in sorted(texts)]
    return [runs[key]["loss"] for key in keys if key in runs]


class Compared(NamedTuple):
    """Mean losses with the seeds that the call has run with."""

    call: float
    adamw: float
    tuned: float | None  # of its method, if the suite tunes it

    @property
    def share(self) -> float | None:
        """Of the tuned gain; `None` where there is none."""
        if self.tuned is None or self.adamw - self.tuned <= LEVEL:
            return None
        return (self.adamw - self.call) / (self.adamw - self.tuned)


def compared(suite: str, printed: Printed, runs: Runs) -> Compared | None:
    """A call beside AdamW and its method, both tuned; `None` before it has run."""
    own = {x["seed"]: x["loss"] for x in result_of(suite, printed.call, runs).finals}
    found = results(SUITES[suite], runs)
    if not own:
        return None

    def mean(method: str) -> float:
        return float(np.mean([x["loss"] for x in found[method].finals if x["seed"] in own]))

    tuned = mean(printed.method) if printed.method in found else None
    return Compared(float(np.mean(list(own.values()))), mean("adamw"), tuned)


def alternatives(suite: str, runs: Runs) -> dict[str, Printed]:
    """By printed call that keeps too little: the first of the same method that keeps enough."""
    found: dict[str, Printed] = {}
    own = {x: y for x in measured(suite) if (y := compared(suite, x, runs)) is not None}
    shares = {x: y.share for x, y in own.items() if y.share is not None}
    first = {x.method: x for x in reversed(shares)}
    for printed, share in shares.items():
        short = first[printed.method]
        if shares[short] < ENOUGH <= share:
            found.setdefault(short.call, printed)
    return found


def drawn(suite: str, runs: Runs) -> Figure:
    """The final losses of the first calls over the time of a step; a point is a seed."""
    tuned = results(SUITES[suite], runs)["adamw"]
    base = result_of(suite, ADAMW, runs).milliseconds
    own = {x.call: result_of(suite, x.call, runs) for x in FIRST}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    shown = {"AdamW, tuned": (1.0, tuned.losses)}
    for call, found in own.items():
        if found.finals:
            name = call if len(call) < 20 else f"{call.partition('(')[0]}(…)"
            shown[name] = found.milliseconds / base, found.losses
    for (name, (time, losses)), color in zip(shown.items(), itertools.cycle(COLORS), strict=False):
        seeds = {"alpha": 0.5, "mec": "none", "zorder": 4}  # above the labels
        axis.plot([time] * len(losses), losses, "o", color=color, **seeds)
        axis.plot(time, np.mean(losses), "_", color=color, ms=24, mew=2)
        at = {"xytext": (28, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, (time, np.mean(losses)), **at, bbox={"fc": "white", "lw": 0, "pad": 1})
    axis.axhline(np.mean(tuned.losses), color="gray", lw=0.9, linestyle=":")
    axis.set_xlim(0.8, 1.25 * max(time for time, _ in shown.values()))
    axis.grid(alpha=0.3)
    axis.set(xlabel="time of a training step on one core, over AdamW's")
    axis.set(ylabel=f"validation loss after {SUITES[suite].steps} steps, nats per byte")
    return figure
