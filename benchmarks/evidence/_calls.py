"""Calls as pages print them, run as they stand on the tasks of the suites.

A call is Python with two numbers, `rate` and `decay`: the learning rate of matrices and the weight
decay of the AdamW that is tuned in the suite. It gets the suite's clipping and schedule, and none
of its own numbers is tuned. Among the lines its text is the name of the method; its values are the
two numbers and the defaults of its arguments, so that it runs again where a default changes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from .._record import COLORS
from ._compare import Result, results
from ._lines import Lines
from ._methods import METHODS
from ._plan import Request, Runs, best_in
from ._suites import SUITES, Suite
from ._sweep import Runner

ADAMW = "optax.adamw(rate, weight_decay=decay)"  # whose times others are compared with


class Printed(NamedTuple):
    """A call, and the purpose that pages name."""

    goal: str
    call: str

    @property
    def method(self) -> str:
        """The method of the tuned point that it is compared with."""
        return self.call.partition("(")[0].rpartition(".")[2]


SOAP = Printed("the lowest loss", "curvax.soap(0.01)")
MUON = Printed("nearly this loss for less", "curvax.muon(0.03)")
SWAN = Printed(
    "a lower loss without state",
    "curvax.swan(64 * rate, method=curvax.polar.newton_schulz(norm='gram', eps=0.0), "
    "others=optax.adamw(rate))",
)
SHAMPOO = Printed(
    "AdamW's rate, with Shampoo's directions",
    "curvax.shampoo(rate, refresh=10, base=optax.adamw, others=optax.adamw(4 * rate))",
)
ALICE = Printed(
    "a slightly lower loss in low-rank state",
    "curvax.alice(8 * rate, rank=64, others=optax.adamw(2 * rate))",
)
RACS = Printed(
    "about AdamW's loss with almost no state",
    "curvax.racs(16 * rate, others=optax.adamw(4 * rate))",
)
TUNED = Printed("fine-tuning and convolutions", "curvax.muon(0.01)")
PRINTED = {
    "recipe-250": (SOAP, MUON, SWAN, SHAMPOO, ALICE, RACS),
    "recipe-1000": (SOAP, MUON),
    "finetune-250": (TUNED,),
    "code-250": (SOAP, MUON),
    "vision-2000": (TUNED, SOAP),
}


def calls_in(text: str) -> Iterator[str]:
    """The calls of methods on a page that have no names but `rate` and `decay`, in one form."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(curvax\.[^`]+\))`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for code in (*blocks, *inline):
        try:
            nodes = list(ast.walk(ast.parse(code)))
        except SyntaxError:  # with "…"
            continue
        for node in nodes:
            if isinstance(node, ast.Call):
                method = ast.unparse(node.func).removeprefix("curvax.")
                names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                if method in METHODS and names <= {"curvax", "optax", "rate", "decay"}:
                    yield ast.unparse(node)


def request_of(suite: str, call: str, seed: int, runs: Runs) -> Request:
    """The run of a call, as its defaults are now."""
    adamw: Any = best_in(suite, "adamw", runs)
    values = {"rate": adamw["rate"], "decay": adamw["decay"] / adamw["rate"]}
    if call != ADAMW:
        given = inspect.signature(getattr(curvax, Printed("", call).method)).parameters.values()
        said = [f"{x.name}={x.default}" for x in given if x.default not in (x.empty, None)]
        values["defaults"] = re.sub(r" at 0x\w+", "", ", ".join(said))
    return Request(suite, call, values, seed)


def run(suites: Iterable[Suite], lines: Lines, most: int | None = None) -> None:
    """Makes the missing runs, suite after suite and seed by seed, at most so many."""
    wanted = [
        request_of(suite.name, call, seed, lines.runs)
        for suite in suites
        for seed in suite.seeds
        for call in ((ADAMW, *(x.call for x in PRINTED[suite.name])))
        if suite.name in PRINTED
    ]
    missing = [request for request in wanted if request.key not in lines.runs]
    runner = Runner()
    for request in tqdm(missing[:most], desc="calls", file=sys.stderr):
        lines.append(runner.line(request, lambda done, steps: None))


def result_of(suite: str, call: str, runs: Runs) -> Result:
    """The runs of a call that are there."""
    keys = [request_of(suite, call, seed, runs).key for seed in SUITES[suite].seeds]
    return Result(None, [runs[key] for key in keys if key in runs])


class Compared(NamedTuple):
    """Mean losses with the seeds that the call has run with, and its share of the tuned gain."""

    call: float
    adamw: float
    tuned: float
    share: float


def compared(suite: str, printed: Printed, runs: Runs) -> Compared | None:
    """A call beside AdamW and its method, both tuned; `None` before it has run."""
    own = {x["seed"]: x["loss"] for x in result_of(suite, printed.call, runs).finals}
    found = results(SUITES[suite], runs)
    if not own:
        return None

    def mean(method: str) -> float:
        return float(np.mean([x["loss"] for x in found[method].finals if x["seed"] in own]))

    call, adamw, tuned = float(np.mean(list(own.values()))), mean("adamw"), mean(printed.method)
    return Compared(call, adamw, tuned, (adamw - call) / (adamw - tuned))


def drawn(suite: str, runs: Runs) -> Figure:
    """The final losses of the calls over the time of a step; a point is a seed."""
    tuned = results(SUITES[suite], runs)["adamw"]
    base = result_of(suite, ADAMW, runs).milliseconds
    own = {x.call: result_of(suite, x.call, runs) for x in PRINTED[suite]}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    shown = {"AdamW, tuned": (1.0, tuned.losses)}
    for call, found in own.items():
        if found.finals:
            name = call if len(call) < 20 else f"{call.partition('(')[0]}(…)"
            shown[name] = found.milliseconds / base, found.losses
    for (name, (time, losses)), color in zip(shown.items(), itertools.cycle(COLORS), strict=False):
        axis.plot([time] * len(losses), losses, "o", color=color, alpha=0.5, mec="none")
        axis.plot(time, np.mean(losses), "_", color=color, ms=24, mew=2)
        at = {"xytext": (16, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, (time, np.mean(losses)), **at, bbox={"fc": "white", "lw": 0, "pad": 1})
    axis.axhline(np.mean(tuned.losses), color="gray", lw=0.9, linestyle=":")
    axis.set_xlim(0.8, 1.25 * max(time for time, _ in shown.values()))
    axis.grid(alpha=0.3)
    axis.set(xlabel="time of a training step on one core, over AdamW's")
    axis.set(ylabel=f"validation loss after {SUITES[suite].steps} steps, nats per byte")
    return figure
