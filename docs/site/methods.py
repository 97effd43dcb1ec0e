"""A page per method: how to start, its algorithm, how its paper is read, its record, its docstring.

Which methods there are, and their families, says the registry of tests. Readings come from the
transcriptions in `tests/reference`, figures from the runs of the evidence, the rate to start with
from the table of `docs/start.md`, the rest from that of `docs/methods.md`. A method without runs
has a page without their picture.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import numpy as np
from boxes import BOXES, COMMON, SYMBOLS, TALL

import curvax

ROOT = Path(__file__).resolve().parents[2]
SUITE, ADAMW = "recipe-250", "adamw"  # of the evidence

# Where the decay goes.
DECAY = "weight_decay={decay}"
ON_BASE = "base=functools.partial(optax.adamw, weight_decay=decay)"

# The arguments that a reading may name are those of these modules.
MODULES = (curvax, curvax.eigenbases, curvax.grafts, curvax.policies, curvax.subspaces)

PAGE = """\
# {title}

{start}## Algorithm

!!! abstract "A step of {title}, for an `m × n` matrix `W` with gradient `G`, `m {size} n`"
{algorithm}

    {symbols}.

    | direction | {direction} |
    | --- | --- |
    | state, numbers | {state} |
    | work per step, FLOPs | {work} |
    | per refresh | {refresh} |
    | paper | {paper} |
    | mind | {mind} |

??? note "For readers of the tests: where the paper is silent or unclear"

    The tests follow these readings, and so do the defaults. Transcriptions compute in float64.

{readings}

{record}::: curvax.{name}
    options: {{heading_level: 2}}

::: curvax.scale_by_{name}
    options: {{heading_level: 2}}
"""

START = """\
## Start with

```python
{start}```

{loss} The rate is that of [the table](../docs/start.md#the-learning-rate). Double and halve it
until both are worse. Weight decay is multiplied by the learning rate, hence the quotient
([why](../docs/start.md#weight-decay)).

"""

RECORD = """\
## Record

![Validation loss of {title} over steps and over seconds, beside AdamW's](figures/{name}.svg)

The language model [`recipe-250`](../benchmarks/results/evidence/evidence.md), each method at its
own best numbers: mean and range over five seeds; other methods in gray.

"""


@functools.cache
def rows() -> dict[str, Any]:
    """The registry's rows of all methods, by name, in the order of the families."""
    sys.path.insert(0, str(ROOT))
    registry = importlib.import_module("tests.registry")
    families = get_args(registry.Family)
    found = sorted(registry.METHODS, key=lambda row: families.index(row.family))
    return {row.name: row for row in found}


def menu() -> list[dict[str, Any]]:
    """The pages of all methods by family, for the menu."""
    families: dict[str, list[dict[str, str]]] = {}
    for row in rows().values():
        entry = {row.title: f"methods/{row.name}.md"}
        families.setdefault(row.family[0].upper() + row.family[1:], []).append(entry)
    return [{family: pages} for family, pages in families.items()]


@functools.cache
def record() -> dict[str, Any]:
    """The results of the evidence's language model, by method, where all seeds have run."""
    suite = _evidence("_suites").SUITES[SUITE]
    return _evidence("_plan").ended(suite, runs())


def _evidence(name: str) -> Any:
    sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benchmarks.evidence.{name}")


@functools.cache
def runs() -> Any:
    """The lines of the evidence."""
    return _evidence("_plan").read(ROOT / "benchmarks/results/evidence")


def loss_of(name: str) -> str:
    """What the call to start with, without decay, has as its loss; or that it has not run."""
    calls = _evidence("_calls")
    for one in printed(name):
        if losses := calls.result_of(SUITE, one.call, runs()).losses:
            own, adamw = np.mean(losses), np.mean(record()[ADAMW].losses)
            return (
                f"Without decay `{one.call}` ends at {own:.3f} on the language model "
                f"[`{SUITE}`](../docs/choosing.md), a tuned AdamW at {adamw:.3f}."
            )
    return "This call has not been run; [figures](../docs/choosing.md) are of tuned numbers."


@functools.cache
def starts() -> dict[str, str]:
    """The learning rates to start with, from the table of `docs/start.md`."""
    return {name: rate for name, rate, _ in _rows_of_start()}


@functools.cache
def others() -> dict[str, int]:
    """The rates of other parameters over AdamW's, tuned there, rounded down to a power of 2."""
    found = {name: float(ratio) for name, _, ratio in _rows_of_start() if ratio}
    return {name: 2 ** math.floor(math.log2(ratio)) for name, ratio in found.items()}


def _rows_of_start() -> list[tuple[str, str, str]]:
    text = (ROOT / "docs/start.md").read_text().split("<!-- table: rates -->")[1]
    text = text.split("<!-- end of table -->")[0]
    return re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]* \| *([\d.]*) *\|", text, re.M)


def is_recorded(name: str) -> bool:
    """Whether the evidence has the method's runs."""
    return name in starts() and name in record()


def start(name: str) -> str:
    """The code to start with, beside an AdamW that is tuned already.

    It is the call that pages print, with weight decay.
    """
    number, *multiple = starts()[name].split(" × ")
    rate, decay = _times(int(number)) if multiple else (number, f"decay * rate / {number}")
    arguments = [*given(name), ON_BASE if rows()[name].base else DECAY]
    apart = multiple or any("others=" in x.call for x in printed(name))
    if apart and not rows()[name].everything:  # others have the rate of the matrices elsewhere
        arguments.append(
            "others=optax.adamw({}, weight_decay={})".format(*_times(others().get(name, 1)))
        )
    code = "".join(f"    {argument.format(decay=decay)},\n" for argument in arguments)
    imports = "import functools\n\n" if "functools" in code else ""
    imports += "import curvax\n" + ("import optax\n" if "optax" in code else "")
    today = "rate, decay = 3e-3, 0.1  # of the AdamW that you use today\n"
    return f"{imports}\n{today}optimizer = curvax.{name}(\n    {rate},\n{code})\n"


def printed(name: str) -> list[Any]:
    """The method's calls that pages print."""
    return [x for x in _evidence("_calls").PRINTED[SUITE] if x.method == name]


def given(name: str) -> list[str]:
    """What the printed call, or else the docstring's advice, has besides rates and decay."""
    if calls := printed(name):
        call: Any = ast.parse(calls[0].call, mode="eval").body
        keywords = (x for x in call.keywords if x.arg not in ("base", "others"))
        return [ast.unparse(x).replace("'", '"') for x in keywords]
    advice = re.search(r"Start with .*?\.\s", inspect.getdoc(getattr(curvax, name)) or "", re.S)
    return re.findall(r"`(\w+=[^`]+)`", advice[0]) if advice else []


def _times(factor: int) -> tuple[str, str]:
    """So many times AdamW's rate, and the weight decay that goes with it."""
    return ("rate", "decay") if factor == 1 else (f"{factor} * rate", f"decay / {factor}")


def pages() -> dict[str, str]:
    """The pages of all methods, by path."""
    formulas = _formulas_of_all()
    return {f"methods/{name}.md": _page(name, formulas) for name in rows()}


def steps_of(name: str) -> list[str]:
    """The lines of a method's box."""
    formulas = _formulas(name)
    box = BOXES.get(name, range(len(formulas)))
    numbers = [line for line in box if isinstance(line, int)]
    assert sorted(numbers) == [*range(len(formulas))], f"the box of {name} has {numbers}"
    return [f"${formulas[x]}$" if isinstance(x, int) else x for x in box]


def common(name: str) -> str:
    """What the symbols are that boxes share."""
    lines = "".join(steps_of(name))
    return ", ".join(text for symbol, text in COMMON.items() if symbol in lines)


def _formulas(name: str) -> list[str]:
    tree = ast.parse((ROOT / f"optimizers/_{name}.py").read_text())
    (text,) = (
        ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    blocks = re.findall(r"\.\. math::\n((?: +.*\n)+)", text)
    blocks += re.findall(r":math:`(W \\leftarrow[^`]+)`", text)
    assert blocks, f"the docstring of {name} has no formula"
    return [x for b in blocks for x in re.split(r",\s*\\q?quad\s*", " ".join(b.split()))]


def _page(name: str, formulas: dict[str, list[str]]) -> str:
    direction, state, work, refresh, paper, mind = formulas[name]
    before = [*formulas][max(0, [*formulas].index(name) - 1)]
    relative = f"[{rows()[before].title}]({before}.md)"  # rows of the table refer to the one above
    direction = re.sub("^the same", f"as {relative}", direction)
    refresh = re.sub("^as above", f"as {relative}", refresh)
    title, recorded = rows()[name].title, is_recorded(name)
    return PAGE.format(
        title=title,
        name=name,
        start=START.format(start=start(name), loss=loss_of(name)) if name in starts() else "",
        record=RECORD.format(title=title, name=name) if recorded else "",
        size="≥" if name in TALL else "≤",
        algorithm="\n".join(f"    {i}. {x}" for i, x in enumerate(steps_of(name), 1)),
        symbols=". ".join(filter(None, (SYMBOLS.get(name), common(name)))),
        direction=direction,
        state=state,
        work=work,
        refresh=refresh or "none",
        paper=paper,
        mind=mind,
        readings=textwrap.indent(
            "\n\n".join(map(_readings, rows()[name].transcribed or (name,))), "    "
        ),
    )


@functools.cache
def arguments() -> set[str]:
    """The arguments of all functions of the library."""
    things = [thing for module in MODULES for thing in vars(module).values() if callable(thing)]
    made = [thing for thing in things if inspect.isfunction(thing)]
    return {name for thing in made for name in inspect.signature(thing).parameters}


def _readings(name: str) -> str:
    """The list of readings in the docstring of a transcription."""
    path = f"tests/reference/{name}.py"
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    listed = re.split(r"^Readings chosen.*:$", text, maxsplit=1, flags=re.M)[1:]
    found = re.match(r"(?:\n*(?:- |  ).*)+", listed[0]) if listed else None
    assert found, f"the docstring of {path} has no list 'Readings chosen:'"
    unknown = set(re.findall(r"\b(\w+)=[\"\w]", found[0])) - arguments()
    assert not unknown, f"{path} names arguments that curvax does not have: {unknown}"
    items = re.sub(r"([*|])", r"\\\1", found[0].strip().replace("<", "&lt;"))
    return f"From [the transcription](../{path}):\n\n{items}"


def _formulas_of_all() -> dict[str, list[str]]:
    """Each method's row in the table of `docs/methods.md`."""
    text = (ROOT / "docs/methods.md").read_text()
    text = text.split("<!-- typed: formulas -->")[1].split("<!-- end")[0]
    lines = [re.split(r" *\| *", line)[1:-1] for line in text.strip().splitlines()]
    return {line[0].strip("`"): line[1:] for line in lines[2:]}


def figures() -> dict[str, bytes]:
    """A picture of each method's record, by path."""
    return {f"methods/figures/{name}.svg": _figure(name) for name in filter(is_recorded, rows())}


def _figure(name: str) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    def curve(x: Any) -> dict[str, Any]:
        losses = np.array([line["losses"] for line in x.finals], float)
        seconds = np.cumsum(np.median(x.seconds, axis=0))
        return {"losses": losses, "steps": x.finals[0]["steps"], "seconds": seconds}

    curves = {other: curve(x) for other, x in record().items()}
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, key in ((left, "steps"), (right, "seconds")):
        for other, own in curves.items():
            if other in rows() and other != name:
                axis.plot(own[key], own["losses"].mean(0), color="0.88", lw=1)
        for shown, color in ((ADAMW, "dimgray"), (name, "#3f51b5")):
            own = curves[shown]
            low, mean, high = (f(own["losses"], axis=0) for f in (np.min, np.mean, np.max))
            axis.fill_between(own[key], low, high, color=color, alpha=0.2, lw=0)
            label = "AdamW" if shown == ADAMW else rows()[name].title
            axis.plot(own[key], mean, color=color, label=label)
        axis.grid(alpha=0.3)
        axis.set(xlabel=key, ylim=(1.85, 3.4))
    left.set_ylabel("validation loss")
    left.legend(frameon=False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
