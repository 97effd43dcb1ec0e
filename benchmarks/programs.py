"""What compiled updates say: kernels, bytes, FLOPs, temporaries, decompositions, collectives.

    python -m benchmarks programs                        # default calls: an hour; it resumes
    python -m benchmarks programs --device v5e --methods soap --model 1B --layers scanned
    python -m benchmarks programs --methods "curvax.soap(rate, products='bf16x6')" --out mine
    python -m benchmarks programs --device v5e --layout "4x4 fsdp" --methods muon --layers scanned
    python -m benchmarks programs --only table           # from what is recorded

A cell is the update of a model's kernels, with donated state, compiled by XLA's own compiler for a
device that need not be there: a step that refreshes nothing (`step`), or one that refreshes
everything after the first time (`refresh`), in which loops of rotations run once; `more` is what
each further rotation adds. `_programs.py` counts. A name stands for the default call, of rank a
quarter of the width. With a layout, kernels lie on a mesh (data, model) of a slice: *fsdp* over all
devices along the model's width, *tensor* over the model axis along the other, *data* replicated;
methods get this mesh. Cells are lines of `programs.jsonl`, and none is compiled twice.

*Milliseconds* of an H100 are measured (`h100.md`) where the program is still that of the
measurement. Otherwise they are predicted: bytes, FLOPs by precision and kernels, each at a rate
that is fitted to the measured steps by least squares of relative errors, none above what the
device can do at most. A product of bfloat16 numbers takes half of TF32's time, as NVIDIA says, and
"bf16x3" takes three; no measured step has any. `measured` cells are the programs of these steps,
compiled at a455773 on 2026-11-28.
"""

from __future__ import annotations

# isort: off
from ._compilers import MEMORY, PLATFORMS, compiled, devices

# isort: on
import collections
import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.optimize import nnls
from tqdm import tqdm

import curvax
from curvax.transforms.linalg import _turns
from curvax.transforms.matrices import _view
from curvax.transforms.refresh import _due
from curvax.transforms.refresh._policy import Every
from curvax.transforms.subspace import _subspace
from tests.hlo import collectives

from . import _lines, _record
from ._methods import NAMED, NAMES, PEERS, RATE, of_rank
from ._programs import Program, once
from ._trees import GPT2_SMALL, LLAMA, LLAMA_130M, Shapes, abstract_kernels
from .precision import stream

SECTIONS = ("programs", "table")
MODELS: dict[str, tuple[Shapes, Any]] = {
    "96": (Shapes(160, 640, 24, 0, gated=False), jnp.float32),
    "gpt2": (GPT2_SMALL, jnp.float32),
    "130M": (LLAMA_130M, jnp.float32),
    # On a TPU 5461 columns, which 128 does not divide, have a layout that makes copies.
    "1B": (LLAMA["1.3B"]._replace(inner=5504), jnp.bfloat16),
    "7B": (LLAMA["7B"], jnp.bfloat16),
}
LAYERS, PARTS = ("unrolled", "scanned"), ("step", "refresh")
MESHES = {"4x4": (4, 4), "16x16": (16, 16)}
LAYOUTS = tuple(map(" ".join, itertools.product(MESHES, ("fsdp", "tensor", "data"))))
LAST = ("out", "down")  # kernels whose columns are the model's width
DOES_NOT_FIT = "does not fit"
DECOMPOSED = re.compile(r'op_name="[^"]*/(?:eigh|svd|qr|geqrf|cholesky)["/]')
# XLA may exchange the parts of a product in a loop, while it multiplies others: counted once.
WITHOUT_WINDOWS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 2**31 - 1}
ON_TPU = ("soap", "asgo", "kl_shampoo", "shampoo", "muon", "foam", "optax.adamw")
"""Whose default calls are recorded for a v5e, whose compiler takes minutes."""
CALLS = (
    "curvax.soap(rate, matrices=curvax.MatrixRule(block_size=1024))",
    "curvax.swan(rate, method=curvax.polar.newton_schulz(norm='gram', eps=0.0))",
    "curvax.shampoo(rate, refresh=10, base=optax.adamw)",
)
"""Blocks, for large factors on a GPU, and calls that README prints."""
DEVICES = {"h200": "H200", "v5e": "v5e", "cpu": "CPU"}
BASES = ("soap", "eigen_adam", "kl_shampoo")  # the methods that have bases and no roots
SHORT = {True: _turns.SHORT, False: _turns.SHORT_FOR_ROOTS}
ORDER, PERIODS = 96, (1, 10, 20)  # of the bases whose rotations are counted, and of refreshes


class Cell(NamedTuple):
    """A program."""

    device: str
    model: str
    layers: str
    layout: str  # of `LAYOUTS`; "" is one device
    method: str  # a name, or a call
    part: str  # of `PARTS`, or "measured"


def optimizer(method: str, rank: int, mesh: Mesh | None = None, scanned: bool = False) -> Any:
    """A default call, a peer, or what a text calls."""
    if "(" in method:
        return eval(method, {"curvax": curvax, "optax": optax, "rate": RATE, "rank": rank})
    if method in PEERS:
        return PEERS[method].make(10, rank)
    how: dict[str, Any] = {"mesh": mesh} if mesh else {}
    if scanned:
        axes = curvax.MatrixAxes(rows=1, columns=2)
        how["weight_dimension_numbers"] = {"*/kernel": axes}
    row = NAMED[method]
    return row.optimizer(RATE, **row.with_output_layer, **of_rank(method, rank), **how)


@contextlib.contextmanager
def refreshing(part: str) -> Iterator[None]:
    """What is traced inside refreshes all matrices, or none."""
    with contextlib.ExitStack() as stack:
        patched = lambda *given: stack.enter_context(mock.patch.object(*given))  # noqa: E731
        if part == "step":
            patched(_due, "visit_due", lambda visit, batch, *rest: batch)
        elif part == "refresh":
            patched(Every, "due", lambda *given: jnp.bool_(True))
            for module in (_view, _subspace):  # damage depends on arrays, and counters on damage
                patched(module, "restarted", lambda init, states, *rest: dict(states))
        yield


def refreshed(state: Any) -> Any:
    """A state after its first step, in which all was refreshed, with counters as constants."""

    def counts(x: Any) -> bool:
        return "refreshes" in getattr(x, "names", ())

    def constant(x: Any) -> Any:
        if counts(x):
            return type(x).zeros(x.value.shape[:-1]).plus(refreshes=1)
        return jnp.ones_like(x) if x.shape == () and x.dtype == jnp.int32 else x

    return jax.tree.map(constant, state, is_leaf=counts)


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays on a device."""
    one = lambda x: x.sharding.shard_shape(x.shape) if x.sharding else x.shape  # noqa: E731
    return sum(math.prod(one(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def placed(kernels: Any, device: str, layout: str) -> tuple[Any, Mesh | None]:
    """Kernels of all layers on a mesh."""
    if not layout:
        return kernels, None
    name, kind = layout.split()
    grid = np.array(devices(device, name)).reshape(MESHES[name])
    mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def spec(kernel: str) -> P:
        axes = ("data", "model") if kind == "fsdp" else "model"
        by_columns = (kernel in LAST) == (kind == "fsdp")
        return P() if kind == "data" else P(None, None, axes) if by_columns else P(None, axes)

    def put(name: str, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(name)))

    return {name: {"kernel": put(name, x["kernel"])} for name, x in kernels.items()}, mesh


def measured(cell: Cell) -> dict[str, Any]:
    """The figures of a cell's program."""
    model, dtype = MODELS[cell.model]
    scanned = cell.layers == "scanned"
    kernels = abstract_kernels(model, dtype, scanned)
    kernels, mesh = placed(kernels, cell.device, cell.layout)
    make = functools.partial(optimizer, cell.method, model.width // 4, mesh, scanned)
    return facts(cell.device, make, kernels, cell.part, mesh)


def facts(
    device: str, make: Callable[[], Any], kernels: Any, part: str, mesh: Any = None
) -> dict[str, Any]:
    """The figures of the program of an update, of an optimizer that is made where it is traced."""
    how: dict[str, Any] = {"donate_argnums": (0, 1)}
    with refreshing(part):
        made = make()
        state = jax.eval_shape(made.init, kernels)
        if mesh is not None:
            own = curvax.state_sharding(made, kernels, mesh)
            with_sharding = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
            state = jax.tree.map(with_sharding, state, own)
            how["out_shardings"] = jax.tree.map(lambda x: x.sharding, (state, kernels))
            how["compiler_options"] = WITHOUT_WINDOWS if device == "v5e" else None
        gradients, kept = bytes_of(kernels), bytes_of(state)
        if gradients + kept > MEMORY.get(device, math.inf):
            return {"error": DOES_NOT_FIT}

        def step(state: Any, gradients: Any, params: Any) -> Any:
            state = refreshed(state) if part == "refresh" else state
            return made.update(gradients, state, params)[::-1]

        start = time.process_time()
        program = compiled(device, step, (state, kernels, kernels), **how)
        seconds = time.process_time() - start
    if program is None:
        return {"error": DOES_NOT_FIT}
    line = counted(program.as_text(), part)
    if mesh is not None:
        exchanges = collectives(once(program.as_text()))
        received: collections.Counter[str] = collections.Counter()
        for x in exchanges:
            received[x.kind] += round(x.received(mesh.size))
        line |= {"received": dict(received), "inside": sum(x.inside for x in exchanges)}
    names = ("jax", "jaxlib", "libtpu" if device == "v5e" else "jax-cuda12-plugin", "optax")
    known = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return line | {
        "gradients": gradients,
        "state": kept,
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "seconds": round(seconds, 1),  # of all threads together
        "versions": ", ".join(f"{name} {known[name]}" for name in names if name in known),
    }


def counted(text: str, part: str) -> dict[str, Any]:
    """What the text of a program says."""

    def figures(program: Program) -> dict[str, Any]:
        own = program.work if part == "refresh" else program.step
        flops = {key: round(x) for key, x in program.work.flops.items()}
        return {"kernels": own.total, "bytes": round(own.bytes), "flops": flops}

    program = Program(text, rotations=int(part == "refresh"))
    line = figures(program) | {"decompositions": len(DECOMPOSED.findall(text))}
    line |= {kind.replace(" ", "_"): x for kind, x in sorted(program.step.kinds.items())}
    return line | {"more": minus(figures(Program(text, 2)), line)} if part == "refresh" else line


def minus(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The difference of two programs."""
    flops = collections.Counter(one["flops"])
    flops.subtract(other["flops"])
    flops = {key: x for key, x in sorted(flops.items()) if x}
    return {key: one[key] - other[key] for key in ("kernels", "bytes")} | {"flops": flops}


@functools.cache
def rotations(period: int, short: float) -> float:
    """The mean number of rotations in a refresh, for gradients whose covariance turns slowly.

    One that is shorter than `short` is the last.
    """
    statistic, counts = jnp.zeros((ORDER, ORDER)), []
    basis = eye = jnp.eye(ORDER)
    turn = jax.jit(_turns.by_rotations, static_argnums=2)
    for step, g in enumerate(stream(ORDER, 1e4, 0, 10 + 10 * period), 1):
        seen = basis.T @ jnp.asarray(g, jnp.float32)
        statistic = 0.95 * statistic + 0.05 * seen @ seen.T
        if step % period == 0:
            length, count = math.inf, 0
            while length >= short and count < _turns.ROTATIONS:
                crooked = float(_turns._defect(basis)) > _turns.LEAST_DEFECT
                rotation, basis, statistic, *_ = turn(basis, statistic, 1)
                length = math.inf if crooked else float(jnp.linalg.norm(rotation - eye, 2))
                count += 1
            counts.append(count)
    return float(np.mean(counts[min(10, len(counts) // 2) :]))


# Time on an H100.

UNITS = ("bytes", "kernels", "float32", "default")
PEAKS = np.array([3.35e9, np.inf, 67e9, 495e9])
"""The most of each that an H100 does in a millisecond, as NVIDIA says."""
Lines = Mapping[Cell, Mapping[str, Any]]
Costs = dict[str, float]  # of a step or of what a refresh adds


def recorded_table(title: str) -> dict[str, dict[str, float]]:
    """The numbers of a table of the H100's record, by method and heading."""
    rows = _record.rows_in(_record.section("h100", title))
    number = re.compile(r"[\d.]+").fullmatch
    return {row["method"]: {head: float(x) for head, x in row.items() if number(x)} for row in rows}


def costs(line: Mapping[str, Any]) -> Costs:
    """Bytes, kernels, and FLOPs by precision of a program."""
    flops = collections.Counter(line["flops"])
    flops["default"] += flops["bf16"]  # a TPU's default
    found = {key: float(line[key]) for key in ("bytes", "kernels")}
    return found | {key: float(flops[key]) for key in ("float32", "default", "bf16x3")}


class Model(NamedTuple):
    """Milliseconds of a program on an H100, from rates."""

    measured: dict[str, Costs]  # of all programs that were timed
    rates: np.ndarray  # ms for a unit of each of `UNITS`
    errors: dict[str, float]  # relative, of each row without which it was fitted

    def ms(self, x: Costs) -> float:
        """Predicted."""
        return float(self.rates @ [x[key] for key in UNITS] + 3 / 2 * self.rates[3] * x["bf16x3"])

    @property
    def error(self) -> float:
        """The root mean square of all."""
        return float(np.mean(np.square([*self.errors.values()])) ** 0.5)


def fitted(lines: Lines) -> Model:
    """To the steps that an H100 has timed and whose programs decompose nothing."""
    times = recorded_table("Steps")
    found = {cell.method: line for cell, line in lines.items() if cell.part == "measured"}
    measured = {name: costs(line) for name, line in found.items()}
    rows = {name: x for name, x in measured.items() if not found[name]["decompositions"]}
    a = np.array([[x[key] / times[name]["p50, ms"] for key in UNITS] for name, x in rows.items()])
    scale = a.max(axis=0)

    def solved(kept: np.ndarray) -> np.ndarray:
        own = a[kept]
        return 1 / PEAKS + nnls(own / scale, 1 - own @ (1 / PEAKS))[0] / scale

    places = np.arange(len(a))
    errors = {name: float(a[i] @ solved(places != i) - 1) for i, name in enumerate(rows)}
    return Model(measured, solved(places >= 0), errors)


def method_of(name: str) -> str:
    """That of a call, or the name itself."""
    return name.partition("(")[0].removeprefix("curvax.")


def period_of(name: str) -> int:
    """Of the refreshes of a method by default or of a call, or of the checks of its policy."""
    if found := re.search(r"refresh=(\d+)", name):
        return int(found[1])
    parameters = inspect.signature(getattr(curvax, method_of(name))).parameters
    if "check_every" in parameters:
        return parameters["check_every"].default
    policy = parameters["refresh"].default
    return policy if isinstance(policy, int) else policy.period


COLUMNS = {
    "method": ("default call", ""),
    "device": ("for", ""),
    "float32": ("float32, TFLOP", ""),
    "default": ("default precision", ""),
    "bf16x3": ("bf16x3", ""),
    "bytes": ("GB", ""),
    "kernels": ("kernels", ""),
    "decompositions": ("decompositions", "d"),
    "ms": ("H100: a step, ms", ""),
    "refresh_ms": ("a refresh more, ms", ""),
    "mean_ms": ("mean, ms", ""),
    "training": ("training step over AdamW's", ""),
}
SCALES = {"bytes": 1e9, "kernels": 1.0, "float32": 1e12, "default": 1e12, "bf16x3": 1e12}


def digits(x: float) -> str:
    """Three of them, or all before the point."""
    if abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.{max(0, 2 - math.floor(math.log10(abs(x))))}f}" if abs(x) >= 1e-3 else "0"


def rows_of(name: str, lines: Lines, model: Model) -> Iterator[dict[str, Any]]:
    """A default call, or another one, for each device."""
    method = method_of(name)
    for device in DEVICES:
        found = {part: Cell(device, "gpt2", "unrolled", "", name, part) for part in PARTS}
        step, refresh = (lines.get(cell, {}) for cell in found.values())
        if "bytes" not in step:
            continue
        row: dict[str, Any] = {"method": f"`{name}`" if device == "h200" else ""}
        row |= {"device": DEVICES[device], "decompositions": step["decompositions"]}
        own, more, period = costs(step), dict.fromkeys(SCALES, 0.0), 1
        if "bytes" in refresh:
            period = period_of(name)
            row["decompositions"] = refresh["decompositions"]
            counted = max(k for k in PERIODS if k <= period), SHORT[method in BASES]
            rounds = 1 if device == "cpu" else rotations(*counted)  # exact on CPUs
            full, turn = costs(refresh), costs(refresh["more"])
            more = {key: full[key] + (rounds - 1) * turn[key] - own[key] for key in SCALES}
            if device == "h200":
                row["method"] += f", every {period}"
        for key, scale in SCALES.items():
            parts = [own[key]] + [more[key], own[key] + more[key] / period] * bool(refresh)
            said = [f"{x:,.0f}" if key == "kernels" else digits(x / scale) for x in parts]
            row[key] = " / ".join(said) if any(parts) else ""
        if device == "h200":
            decomposes = row["decompositions"] > 0
            row |= times_of(name, own, more if refresh else None, period, decomposes, model)
        yield row


def times_of(
    name: str, own: Costs, more: Costs | None, period: int, decomposes: bool, model: Model
) -> dict[str, Any]:
    """Milliseconds on an H100, measured or predicted, and AdamW's training step with them."""
    times = recorded_table("Steps")
    before = model.measured.get(name, {})
    same = before and all(math.isclose(before[key], own[key], rel_tol=0.05) for key in SCALES)
    error = f"± {100 * abs(model.errors.get(name, model.error)):.0f} %"
    ms = times[name]["p50, ms"] if same else model.ms(own)
    found: dict[str, Any] = {"ms": f"{ms:.1f}" if same else f"≈ {ms:.1f} {error}"}
    mean = ms
    if more is not None:
        extra = times[name]["refresh, p50, ms"] - ms if decomposes else model.ms(more)
        rest = f"± {100 * model.error:.0f} %"
        found["refresh_ms"] = digits(extra) if decomposes else f"≈ {digits(extra)} {rest}"
        mean += extra / period
    adamw = recorded_table("Training steps")["optax.adamw"]["between, ms"]
    rest = adamw - times["optax.adamw"]["p50, ms"]
    about = "≈ " * ("≈" in "".join(found.values()))
    found["mean_ms"] = f"{about}{mean:.1f}"
    return found | {"training": f"{about}{(rest + mean) / adamw:.2f}"}


def table_of(lines: Lines) -> _record.Table:
    """All default calls."""
    model = fitted(lines)
    names = ("optax.adamw", *NAMES, *CALLS)
    rows = [row for name in names for row in rows_of(name, lines, model)]
    per_byte, per_kernel, exact, default = model.rates
    errors = ", ".join(f"`{x}` {100 * e:+.0f} %" for x, e in model.errors.items())
    counts = ", ".join(
        f"{rotations(period, SHORT[True]):.1f} every {period} "
        f"({rotations(period, SHORT[False]):.1f} for roots)"
        for period in PERIODS
    )
    adamw = recorded_table("Training steps")["optax.adamw"]["between, ms"]
    rates = f"{1e-9 / per_byte:.1f} TB/s, {1e-9 / exact:.0f} TFLOP/s in float32, "
    rates += f"{1e-9 / default:.0f} in TF32, {1e3 * per_kernel:.1f} µs a kernel"
    note = (
        "GPT-2-small's kernels. A step without refreshes / what a refresh of everything adds / the "
        "mean at the period. *Decompositions*: in the program with refreshes. *H100*: measured "
        f"before, or ≈ from the model of time: {rates}; ± is the error of the model on the "
        "measured step of this method, which it was not fitted to there, or the root mean square "
        f"of all such errors: {errors}. Rotations in a refresh, for gradients whose covariance "
        f"turns slowly: {counts}. The last column is AdamW's training step of {adamw} ms with this "
        f"update in the place of AdamW's. v5e: {', '.join(ON_TPU)}; its compiler takes minutes."
    )
    return _record.Table("Default calls", COLUMNS, rows, note)


OTHERS = {
    "method": ("update", ""),
    "part": ("part", ""),
    **{kind: (kind.replace("_", " "), ",d") for kind in ("kernels", "products", "copies")},
    "gb": ("GB", ".1f"),
    "tflop": ("TFLOP", ".3f"),
    "decompositions": ("decompositions", "d"),
    "temporaries_mb": ("temporaries, MB", ",.0f"),
    "received": ("received, of the gradients", ""),
    "seconds": ("tracing and compiling, s", ".0f"),
    "error": ("", ""),
}


def others(lines: Lines) -> Iterator[_record.Table]:
    """Every program, a table for each device and model."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for cell, line in lines.items():
        if cell.part in PARTS:
            row = {"method": cell.method, "part": cell.part, **line}
            if "bytes" in line:
                row |= {"gb": line["bytes"] / 1e9, "tflop": sum(line["flops"].values()) / 1e12}
                row["temporaries_mb"] = line["temporaries"] / 1e6
                parts = {x: b / line["gradients"] for x, b in line.get("received", {}).items()}
                row["received"] = ", ".join(f"{x} {share:.2f}" for x, share in parts.items())
            groups.setdefault(cell[:4], []).append(row)
    for (device, model, layers, layout), rows in groups.items():
        title = ", ".join(filter(None, (device, model, layers, layout)))
        yield _record.Table(title, OTHERS, rows)


def cells(args: Any) -> Iterator[Cell]:
    """The cells that the arguments select; the cheapest compilers first."""
    for device, method, part in itertools.product(args.device, args.methods, args.part):
        refreshes = (own := method_of(method)) in NAMED and NAMED[own].keeps
        skipped = device == "v5e" and args.model == "gpt2" and method not in ON_TPU
        if (part == "step" or refreshes) and not skipped:
            yield Cell(device, args.model, args.layers, args.layout, method, part)


def limited(job: tuple[Cell, int]) -> dict[str, Any]:
    """The figures of a cell, given up after so many seconds of all threads together."""
    cell, limit = job
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 60))
    return measured(cell)


def extended(path: Path, asked: list[Cell], limit: int) -> Lines:
    """All lines of a file by their cells, after those that were missing are measured."""
    done = _lines.recorded(path, Cell)
    for cell in tqdm([x for x in asked if x not in done], desc="programs", file=sys.stderr):
        worker = _lines.Worker(limited, {})
        _lines.append(path, cell._asdict() | (worker.ask((cell, limit)) or {}))
        worker.end()
    return _lines.recorded(path, Cell)


def main() -> None:
    """Compiles the missing cells, and writes the tables of all recorded ones."""
    parser = _record.arguments(__doc__, SECTIONS)
    add, known = parser.add_argument, ("optax.adamw", *NAMES, *CALLS)
    some = "separated by commas"
    add("--device", type=_record.names(tuple(PLATFORMS)), default=tuple(DEVICES), help=some)
    add("--part", type=_record.names(PARTS), default=PARTS, help=some)
    calls = lambda text: (text,) if "(" in text else _record.names((*NAMED, *PEERS))(text)  # noqa: E731
    add("--methods", type=calls, default=known, help=f"names, {some}, or one call")
    add("--model", choices=tuple(MODELS), default="gpt2", help="(%(default)s)")
    add("--layers", choices=LAYERS, default=LAYERS[0], help="(%(default)s)")
    add("--layout", choices=LAYOUTS, default="", help="on a mesh; layers are scanned there")
    add("--check", action="store_true", help="fail if a compiler refused a program")
    add("--limit", type=int, default=300, help="seconds of CPU for a cell (%(default)s)")
    args = parser.parse_args()
    if args.layout and args.layers != "scanned":
        parser.error("--layout needs --layers scanned")
    asked = list(cells(args)) if "programs" in args.only else []
    lines = extended(args.out / "programs.jsonl", asked, args.limit)
    if args.check:
        refused = [f"{cell}: {lines[cell]['error']}" for cell in asked if "error" in lines[cell]]
        if refused:
            raise SystemExit("\n".join(refused))
    if "table" in args.only:
        about = "Programs of updates, as compilers make them; nothing of them ran."
        is_timed = any(cell.part == "measured" for cell in lines)
        found = [*([table_of(lines)] if is_timed else []), *others(lines)]
        _record.write(args, "programs", "What compiled updates say", about, found, {})
