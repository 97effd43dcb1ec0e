"""What faults in gradients do to training: every method, policy and storage, every fault.

    python -m benchmarks.faults                          # all of it, about 10 minutes
    python -m benchmarks.faults --methods muon soap      # these only, without writing the page

A small network is fitted to noisy data, on the whole set in every step, while the learning rate
falls to 0. The faults are those of `tests/fault_model.py`: a value, in a part of the gradients, at
a step or at ten. A run survives one if

* parameters and state are finite after every step;
* it is the run that has zeros in the place of every gradient that was struck (of a matrix, of a
  leaf of AdamW's) and of the updates that come of it (but for OSGDM's matrices: its momentum is of
  whole updates, behind them), up to `ROUNDING`: in a training step XLA fuses the optimizer with
  what is around it, and may round a zero that it knows differently from one that it computes. How
  often the bits are the same is counted as well; `tests/optimizers/test_faults.py` asks for them
  always;
* the state's `skipped` counted these gradients and no others;
* in the end its loss is that of the run that skips these matrices' steps, or lower. *Skipping*: the
  matrix and all that the state has of it stay as they were, bit for bit, and everything else goes
  on. It is what the guard stands in for, which spares the select of the whole state and lets it
  take in a zero. The loss may be above by `TOLERANCE` of what a run without faults gains.

Optax's AdamW without a guard goes through the same, to show what the table looks like without one.
"""

from __future__ import annotations

import argparse
import functools
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import curvax
from curvax.transforms.state._entries import Entry, entries_of

from . import _record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fault_model import (
    CELLS,
    FAULTS,
    PLACES,
    VALUES,
    Cell,
    Fault,
    counters,
    hits,
    injected,
    struck,
    widened,
)

RESULTS = Path(__file__).parent / "results" / "faults.md"
STEPS, PERIOD, SAMPLES = 80, 20, 128
SHAPES = {
    "in/kernel": (8, 6),
    "in/bias": (6,),
    "layers": (2, 6, 6),
    "out/kernel": (6, 6),
}
SPEC = {"layers": curvax.MatrixAxes(rows=1, columns=2)}
NOISE = 0.3
TOLERANCE = 0.02
ROUNDING = 1e-4  # of the largest parameter: units of float32, after 80 steps of training
CRITERIA = ("finite", "as_zero", "exact", "counted", "reached")


class Control(Cell):
    """AdamW as it is in Optax, without a guard."""

    @property
    def rate(self) -> float:
        """As most methods'."""
        return 0.1

    @property
    def adapts(self) -> bool:
        """Nothing is refreshed."""
        return False

    def make(self, learning_rate: Any, period: int, **settings: Any) -> Any:
        """The optimizer."""
        del period, settings
        return optax.adamw(learning_rate)

    def stands_still(self, name: str) -> bool:
        """Nothing is behind its moments."""
        del name
        return True


CONTROL = Control("optax.adamw")


@functools.cache
def data() -> tuple[Any, Any, Any]:
    """Parameters to begin with, inputs, and noisy outputs of other parameters."""
    random = np.random.default_rng(0)

    def parameters() -> dict[str, np.ndarray]:
        return {
            name: random.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 1 else 6)
            for name, shape in SHAPES.items()
        }

    first, teacher = jax.tree.map(np.float32, (parameters(), parameters()))
    x = np.float32(random.standard_normal((SAMPLES, SHAPES["in/kernel"][0])))
    noise = np.float32(NOISE * random.standard_normal((SAMPLES, SHAPES["out/kernel"][1])))
    return first, x, np.asarray(outputs(teacher, x)) + noise


def outputs(params: Any, x: Any) -> jax.Array:
    """The network: a layer, two residual ones that are scanned, a layer."""
    h = x @ params["in/kernel"] + params["in/bias"]
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, params["layers"])
    return h @ params["out/kernel"]


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    """Mean squared error."""
    return jnp.mean(jnp.square(outputs(params, x) - y))


class Run(NamedTuple):
    """What came of a run."""

    loss: float
    finite: bool
    path: np.ndarray  # all parameters after every step
    state: bytes  # the last one, without its counters of skipped steps
    skipped: dict[str, np.ndarray]


class Outcome(NamedTuple):
    """What a fault did."""

    cell: Cell
    fault: Fault
    finite: bool
    as_zero: bool
    exact: bool  # the same, bit for bit
    counted: bool
    behind: float  # how far the loss is above that of the run that skips, of the whole gain

    @property
    def reached(self) -> bool:
        """Whether the loss is that of the run that skips."""
        return self.behind <= TOLERANCE  # NaN is not

    @property
    def survived(self) -> bool:
        """Whether all is as it should be."""
        return self.finite and self.as_zero and self.counted and self.reached


class Trainer:
    """An optimizer, compiled once for all faults."""

    def __init__(self, cell: Cell):
        """Compiles, and runs once without faults."""
        self.cell = cell
        schedule = optax.linear_schedule(cell.rate, 0.0, STEPS)
        optimizer = cell.make(schedule, PERIOD, weight_dimension_numbers=SPEC)
        first, x, y = data()
        self.counters = counters(optimizer, first)
        kept = functools.partial(unmoved, entries_of(optimizer, first))

        @jax.jit
        def trajectory(masks: Any, values: Any, dropped: Any, still: Any) -> Any:
            def step(carry: Any, now: Any) -> Any:
                mask, value, drop = now
                params, state = carry
                gradient = injected(jax.grad(loss)(params, x, y), mask, value)
                updates, state = optimizer.update(gradient, state, params)
                stays = jax.tree.map(jnp.logical_and, mask, still)
                updates = injected(updates, stays, 0.0)
                moved = (optax.apply_updates(params, updates), state)
                carry = kept(carry, moved, drop)
                floats = [z for z in jax.tree.leaves(carry) if jnp.issubdtype(z.dtype, jnp.inexact)]
                return carry, (carry[0], jnp.stack([jnp.isfinite(z).all() for z in floats]).all())

            start = jax.tree.map(jnp.asarray, (first, optimizer.init(first)))
            (params, state), (path, finite) = jax.lax.scan(step, start, (masks, values, dropped))
            return loss(params, x, y), finite.all(), path, state

        self.trajectory = trajectory
        self.zeroed = functools.cache(self._zeroed)
        self.without = functools.cache(self._without)
        self.clean = self.run()
        self.gain = float(loss(first, x, y)) - self.clean.loss
        if not (self.clean.finite and self.gain > 0):
            raise ValueError(f"{cell} does not train without faults: {self.clean.loss}")

    def run(
        self, masks: Any = None, value: float = 0.0, still: bool = False, skip: bool = False
    ) -> Run:
        """A run with `value` where the masks say so.

        `still` makes the updates zero there as well; `skip` leaves what the masks touch as it was.
        """
        if masks is None:
            masks = {name: np.zeros((STEPS, *shape), bool) for name, shape in SHAPES.items()}
        dropped = {name: skip & hits(mask) for name, mask in masks.items()}
        stays = {name: still and self.cell.stands_still(name) for name in SHAPES}
        values = np.full(STEPS, value, np.float32)
        last, finite, path, state = jax.device_get(self.trajectory(masks, values, dropped, stays))
        return Run(
            loss=float(last),
            finite=bool(finite),
            path=np.concatenate([x.reshape(STEPS, -1) for x in jax.tree.leaves(path)], axis=1),
            state=b"".join(x.tobytes() for x in self.uncounted(state)),
            skipped={counter.name: counter.read(state) for counter in self.counters},
        )

    def uncounted(self, state: Any) -> Iterator[np.ndarray]:
        """The state's arrays without the counters of skipped steps."""
        columns = {counter.leaf: counter.column for counter in self.counters}
        for i, x in enumerate(jax.tree.leaves(state)):
            column = columns.get(i)
            if i not in columns:
                yield np.asarray(x)
            elif column is not None:
                yield np.delete(x, column, axis=-1)

    def masks(self, fault: Fault) -> Any:
        """Where a fault is."""
        return struck(fault, SHAPES, self.cell.starts(PERIOD), STEPS)

    def _zeroed(self, place: tuple[str, str, int]) -> Run:
        """The run with zeros for everything that faults of this place strike."""
        return self.run(widened(self.masks(Fault("NaN", *place))), still=True)

    def _without(self, place: tuple[str, str, int]) -> Run:
        """The run that skips whatever these faults strike."""
        return self.run(widened(self.masks(Fault("NaN", *place))), skip=True)

    def skipping(self) -> float:
        """By how much skipping changes the loss, of what is gained."""
        return max(abs(self.without(place).loss - self.clean.loss) / self.gain for place in PLACES)

    def outcome(self, fault: Fault) -> Outcome:
        """What a fault does."""
        masks = self.masks(fault)
        run, zeroed = self.run(masks, VALUES[fault.value]), self.zeroed(fault.place)
        expected = {name: hits(mask).sum(axis=0) for name, mask in masks.items()}
        return Outcome(
            self.cell,
            fault,
            finite=run.finite,
            as_zero=bool(np.abs(run.path - zeroed.path).max() <= ROUNDING * np.abs(run.path).max()),
            exact=run.path.tobytes() == zeroed.path.tobytes() and run.state == zeroed.state,
            counted=run.skipped.keys() == expected.keys()
            and all((run.skipped[name] == n).all() for name, n in expected.items()),
            behind=(run.loss - self.without(fault.place).loss) / self.gain,
        )


def unmoved(entries: Sequence[Entry], old: Any, new: Any, dropped: Any) -> Any:
    """Parameters and state after a step: the old ones of dropped units, and the new ones.

    Args:
      entries: whose each array of the state is.
      old: parameters and state before the step.
      new: parameters and state after it.
      dropped: bool `(units,)` for each parameter.
    """

    def chosen(drop: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(drop.reshape(-1, *[1] * (x.ndim - 1)) if x.ndim else drop[0], x, y)

    (params, state), (new_params, new_state) = old, new
    leaves = []
    for entry, x, y in zip(entries, *map(jax.tree.leaves, (state, new_state)), strict=True):
        for name, part in entry.owners:
            drop = dropped[name]
            if part is not None:  # of a stack
                drop = jnp.zeros(x.shape[0], bool).at[part].set(drop)
            y = chosen(drop, x, y)
        leaves.append(y)
    kept = {name: chosen(dropped[name], params[name], y) for name, y in new_params.items()}
    return kept, jax.tree.unflatten(jax.tree.structure(state), leaves)


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, its first column on the left and the others on the right."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def share(outcomes: Iterable[Outcome]) -> str:
    """How many of them survived."""
    survived = [outcome.survived for outcome in outcomes]
    return f"{sum(survived)}/{len(survived)}"


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """Faults × methods."""
    methods = list(dict.fromkeys(o.cell.method for o in outcomes))
    kinds: dict[str, Callable[[Fault], bool]] = {
        value: lambda fault, value=value: fault.value == value for value in VALUES
    }
    for place in PLACES:
        kinds[named(place)] = lambda fault, place=place: fault.place == place
    rows = [
        [
            name,
            *(
                share(o for o in outcomes if o.cell.method == m and chosen(o.fault))
                for m in methods
            ),
        ]
        for name, chosen in kinds.items()
    ]
    return table(["survived / tried", *(f"`{m}`" for m in methods)], rows)


def by_cell(outcomes: Sequence[Outcome]) -> str:
    """What was asked of each method × policy × storage, and how often it held."""
    titles = ("method", "refresh", "storage", "tried", "finite", "as zeros", "bit for bit")
    rows = []
    for cell in dict.fromkeys(o.cell for o in outcomes):
        own = [o for o in outcomes if o.cell == cell]
        counts = [sum(getattr(o, name) for o in own) for name in CRITERIA]
        names = [f"`{cell.method}`", cell.refresh or "", cell.storage or ""]
        rows.append([*names, len(own), *counts, worst(own), share(own)])
    return table([*titles, "counted", "loss reached", "furthest behind", "survived"], rows)


def not_reached(outcomes: Sequence[Outcome]) -> str:
    """Where the loss is above that of the run that skips what was struck."""
    rows = []
    for method, place in dict.fromkeys(
        (o.cell.method, o.fault.place) for o in outcomes if not o.reached
    ):
        own = [o for o in outcomes if (o.cell.method, o.fault.place) == (method, place)]
        late = [o for o in own if not o.reached]
        cells = {(o.cell.refresh, o.cell.storage) for o in late}
        among = {(o.cell.refresh, o.cell.storage) for o in own}
        count = f"{len(late)}/{len(own)}"
        rows.append([f"`{method}`", named(place), count, f"{len(cells)}/{len(among)}", worst(late)])
    titles = ("method", "fault", "not reached", "policies and storages", "furthest behind")
    return table(titles, rows)


def named(place: tuple[str, str, int]) -> str:
    """A fault's place in words."""
    return str(Fault("", *place)).removeprefix(" in ")


def worst(outcomes: Iterable[Outcome]) -> str:
    """The largest lag of the loss; a loss that is not a number counts as the largest."""
    most = max((o.behind for o in outcomes), key=lambda x: (math.isnan(x), x))
    return f"{100 * most:.1f} %" if abs(most) < 10 else "diverged"


def machine() -> str:
    """Hardware and versions."""
    about = _record.machine()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"on {about['hardware']}; {versions}"


def page(outcomes: Sequence[Outcome], skipping: float, seconds: float) -> str:
    """The results."""
    ours = [o for o in outcomes if o.cell != CONTROL]
    control = [o for o in outcomes if o.cell == CONTROL]
    late = sum(not o.reached for o in ours)
    parts = [
        "# What faults in gradients do",
        f"{len(ours):,} faults tried, {sum(o.survived for o in ours):,} survived. The state was "
        f"finite at every step in {sum(o.finite for o in ours):,}, the run equaled one with zero "
        f"gradients in {sum(o.as_zero for o in ours):,} (bit for bit in "
        f"{sum(o.exact for o in ours):,}), the counters were right in "
        f"{sum(o.counted for o in ours):,}, and the loss was reached in {len(ours) - late:,}. "
        f"Optax's AdamW without a guard: {share(control)}.",
        "A fault puts a bad value into an element, a row or the whole of one leaf's gradient "
        "(leaves, matrices, rows and columns take turns), or into all gradients. It begins at step "
        "1, between refreshes or at a step with a refresh (every 20), and lasts 1 step or 10. "
        f"A network of {sum(math.prod(s) for s in SHAPES.values())} parameters (two matrices, a "
        f"stack of two scanned layers, a bias) is trained for {STEPS} steps on all of {SAMPLES} "
        "noisy samples. A run survives if it passes four tests, which `benchmarks/faults.py` "
        "defines: finite, as zeros, counted, loss reached. *Loss reached*: the loss is at most "
        "that of a run that skips those steps of the matrix and keeps its state, plus "
        f"{100 * TOLERANCE:g} % of what a run without faults gains; skipping alone changes the "
        f"loss by up to {100 * skipping:.1f} %.",
        by_fault(outcomes),
        by_cell(outcomes),
        f"Loss not reached, in {late:,} of {len(ours):,}:" if late else "",
        not_reached(ours) if late else "",
        f"`{shlex.join(['python', '-m', 'benchmarks.faults', *sys.argv[1:]])}`, {seconds:,.0f} "
        f"seconds, {machine()}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def main() -> None:
    """Prints the page, and writes it if it has all methods."""
    methods = list(dict.fromkeys(cell.method for cell in CELLS))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, metavar="METHOD")
    args = parser.parse_args()
    start, outcomes, skipping = time.perf_counter(), [], 0.0
    cells = [cell for cell in CELLS if cell.method in args.methods]
    for cell in tqdm([*cells, CONTROL], unit="cell", file=sys.stderr):
        trainer = Trainer(cell)
        outcomes += map(trainer.outcome, FAULTS)
        if cell != CONTROL:
            skipping = max(skipping, trainer.skipping())
        jax.clear_caches()
    text = page(outcomes, skipping, time.perf_counter() - start)
    print(text)
    if args.methods == methods:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
