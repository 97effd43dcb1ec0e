"""Nothing poisons the state: faults in gradients and decompositions against every method.

A *unit* is skipped or kept independently: a matrix (one entry of a batch), or a leaf that AdamW
updates. A fault writes one value into part of the gradients, at one step or at ten, and strikes the
units that hold this part. The requirement is the same for every fault: at these steps a struck unit
behaves bitwise as with a zero gradient, and does not move; `skipped` counts the step, and nothing
else changes.

A cell (`fault_model.py`) compiles once: its faults, and the steps at which decompositions fail, are
data. All comparisons are bit for bit, of the updates and of every array of the state at every step.
By default a sample of the cells runs, each with a sample of the faults.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import curvax
from curvax.transforms.state._entries import entries_in
from curvax.transforms.state._traced import traced
from tests.cells import ALL_CELLS, cells
from tests.fault_model import CELLS, MOMENTS, REFRESH, STORAGE, Cell
from tests.helpers import normal_like
from tests.tpu_forms import loops_of

PERIOD, STEPS = 4, 20
SHAPES = {"dense/kernel": (4, 6), "dense/bias": (6,), "head/kernel": (6, 4), "layers": (2, 4, 6)}
WIDE = {name: SHAPES[name] for name in ("dense/kernel", "dense/bias", "layers")}
TALL = WIDE | {"dense/kernel": (6, 4), "layers": (2, 6, 4)}
SPEC = {"layers": curvax.MatrixAxes(rows=1, columns=2)}


class Fault(NamedTuple):
    """A value, the entries that it replaces, its first step, and its duration in steps."""

    value: float
    extent: str
    moment: str
    steps: int


VALUES = (np.nan, np.inf, 1e30)  # whose square is infinite
EXTENTS = ("element", "leaf", "all leaves")
PLACES = tuple(itertools.product(EXTENTS, MOMENTS, (1, 10)))
FAULTS = tuple(Fault(value, *place) for value in VALUES for place in PLACES)
# A first basis has columns of the identity: to them another row's 1e30 is 0.
UNSEEN = [Fault(1e30, extent, "step 1", 1) for extent in EXTENTS]
SAMPLE = cells(CELLS, of=20)
TRIED = cells(SAMPLE, FAULTS, of=5)
DUE = np.isin(np.arange(1, STEPS + 1), (1, *range(PERIOD, STEPS + 1, PERIOD)))  # every(PERIOD)
TRACES = itertools.count()
DECOMPOSITIONS = ("eigh", "svd", "qr", "cholesky")
ROOTS, BASES = ("inverse_root", "eigenvalues", "damping"), ("basis",)


each = functools.partial(pytest.mark.parametrize, "cell", ids=str)


# Gradients with faults.


def struck(fault: Fault, cell: Cell) -> dict[str, np.ndarray]:
    """The entries of a trajectory of gradients that a fault replaces, bool `(STEPS, …)` per leaf.

    The struck leaf, matrix, row and column rotate with the place, so that every extent, moment and
    duration strikes every leaf.
    """
    turn = PLACES.index(fault[1:]) + EXTENTS.index(fault.extent)
    shapes, start = shapes_of(cell), cell.starts(PERIOD)[fault.moment] - 1
    chosen = list(shapes)[turn % len(shapes)]
    masks = {name: np.zeros((STEPS, *shape), bool) for name, shape in shapes.items()}
    for name, mask in masks.items():
        if name == chosen or fault.extent == "all leaves":
            place = [turn % d for d in shapes[name]] if fault.extent == "element" else [...]
            mask[slice(start, start + fault.steps), *place] = True
    return masks


def by_unit(x: np.ndarray) -> np.ndarray:
    """A leaf of a trajectory as `(STEPS, units, entries)`."""
    return x.reshape(STEPS, math.prod(x.shape[1:-2]), -1)


def widened(masks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Widens the masks to complete units."""

    def whole(mask: np.ndarray) -> np.ndarray:
        hit = by_unit(mask).any(axis=2, keepdims=True)
        return (hit | np.zeros_like(by_unit(mask))).reshape(mask.shape)

    return {name: whole(mask) for name, mask in masks.items()}


def injected(gradients: Any, masks: Any, value: float) -> Any:
    """Writes `value` into the gradients where the masks are true."""
    return jax.tree.map(lambda g, mask: np.where(mask, np.float32(value), g), gradients, masks)


# Trajectories, compiled once for each cell.


def shapes_of(cell: Cell) -> dict[str, tuple[int, ...]]:
    """All; or, by default, wide or tall matrices alone in turns."""
    if ALL_CELLS or cell not in SAMPLE:
        return SHAPES
    return (WIDE, TALL)[SAMPLE.index(cell) % 2]


@functools.cache
def given(cell: Cell) -> tuple[Any, Any]:
    """Parameters, and gradients with time first."""
    shapes = shapes_of(cell)
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    times = {name: np.zeros((STEPS, *shape), np.float32) for name, shape in shapes.items()}
    gradients = normal_like(jax.random.key(3), times)
    return params, jax.tree.map(lambda g: np.asarray(g) / 2, gradients)


@contextlib.contextmanager
def breaking(broken: dict[str, jax.Array]) -> Iterator[None]:
    """While tracing: decompositions whose results are NaN where `broken` says so.

    Metadata of its own keep each trace apart: JAX would give jitted functions and branches that
    were traced here, and so this `broken`, to other programs.
    """

    def breaks(f: Any, when: jax.Array) -> Any:
        return lambda *args, **options: jax.tree.map(
            lambda x: jnp.where(when, jnp.nan, x), f(*args, **options)
        )

    with pytest.MonkeyPatch.context() as patch, set_xla_metadata(trace=next(TRACES)):
        loops_of("cpu", patch)  # in stacks, as on GPUs, decompositions cannot see traced values
        for name in DECOMPOSITIONS:
            module = jax.lax.linalg if name == "cholesky" else jnp.linalg
            patch.setattr(module, name, breaks(getattr(module, name), broken[name]))
        yield


class Trajectory(NamedTuple):
    """What an optimizer did."""

    updates: dict[str, np.ndarray]  # (STEPS, …)
    start: Any  # the state before
    states: Any  # time first
    bits: np.ndarray  # of all entries of the states, uint32 (STEPS, entries)
    finite: np.ndarray  # whether updates and state were, bool (STEPS,)

    @property
    def sides(self) -> Iterator[tuple[Any, Any]]:
        """Each side of the matrices of a stack, or their subspaces: at first, and at all steps."""
        counted = lambda x: hasattr(x, "rejected")  # noqa: E731
        leaves = (jax.tree.leaves(x, is_leaf=counted) for x in (self.start, self.states))
        return (pair for pair in zip(*leaves, strict=True) if counted(pair[0]))


def changed(start: Any, states: Any, fields: Sequence[str]) -> np.ndarray:
    """Where any of these fields is not as it was a step before, bool `(STEPS, matrices)`."""
    found = []
    for field in fields:
        trees = (getattr(x, field, None) for x in (start, states))
        for first, x in zip(*map(jax.tree.leaves, trees), strict=True):
            bits = np.concatenate([first[None], x]).view(np.uint8)
            found.append((bits[1:] != bits[:-1]).reshape(STEPS, len(first), -1).any(axis=2))
    return np.any(found, axis=0)


class Program:
    """A compiled trajectory of an optimizer, and where its state has what."""

    def __init__(self, cell: Cell):
        optimizer = cell.make(0.1, PERIOD, weight_dimension_numbers=SPEC)
        params, gradients = given(cell)

        @jax.jit
        def trajectory(gradients: Any, broken: Any) -> Any:
            def step(state: Any, now: Any) -> Any:
                gradient, broken = now
                with breaking(broken):
                    updates, state = optimizer.update(gradient, state, params)
                return state, (updates, state)

            start = optimizer.init(params)
            return start, jax.lax.scan(step, start, (gradients, broken))[1]

        self.trajectory = trajectory
        self.units = {name: by_unit(g).shape[1] for name, g in gradients.items()}
        self.places = {name: {} for name in params}
        end = 0
        for entry in entries_in(traced(optimizer, params), params):
            start, end = end, end + math.prod(entry.leaf.shape)
            numbers = np.arange(start, end).reshape(entry.leaf.shape)
            for owner, own in entry.owners:
                for place, part in entry.values_by_place(numbers).items():
                    self.places[owner][place] = part if own is None else part[own]
        self.counters = np.concatenate([self.skipped(name) for name in params])

    def run(self, gradients: Any, **broken: np.ndarray) -> Trajectory:
        """The trajectory with these gradients and failures of decompositions at these steps."""
        never = np.zeros(STEPS, bool)
        flags = {name: broken.get(name, never) for name in DECOMPOSITIONS}
        start, (updates, states) = jax.device_get(self.trajectory(gradients, flags))
        leaves = [x.reshape(STEPS, -1) for x in jax.tree.leaves(states)]
        floats = [x for x in jax.tree.leaves((updates, states)) if x.dtype == np.float32]
        finite = [np.isfinite(x).reshape(STEPS, -1).all(axis=1) for x in floats]
        words = [x.view(np.uint32) if x.itemsize == 4 else np.uint32(x) for x in leaves]
        bits = np.concatenate(words, axis=1)
        return Trajectory(updates, start, states, bits, np.all(finite, axis=0))

    def own(self, name: str) -> np.ndarray:
        """The entries of each unit of a leaf, `(units, entries)`."""
        units = self.units[name]
        return np.concatenate([x.reshape(units, -1) for x in self.places[name].values()], axis=1)

    def skipped(self, name: str) -> np.ndarray:
        """The counters of each unit, `(units,)`."""
        found = [x for p, x in self.places[name].items() if "skipped" in p.split("/")]
        assert [x.shape for x in found] == [(self.units[name],)], f"{name}: {found}"
        return found[0]


@functools.cache
def program(cell: Cell) -> Program:
    return Program(cell)


def assert_same(x: np.ndarray, y: np.ndarray, what: str) -> None:
    """Bit for bit, with the first step at which they differ."""
    different = [t + 1 for t in range(len(x)) if x[t].tobytes() != y[t].tobytes()]
    assert not different, f"{what}: not the same at steps {different}"


# Gradients.


@each(SAMPLE)
def test_what_a_fault_strikes_stands_still_and_has_a_zero_gradient(cell: Cell) -> None:
    work = program(cell)
    _, gradients = given(cell)
    clean = work.run(gradients)
    assert clean.finite.all()
    assert not clean.bits[:, work.counters].any()
    others = np.setdiff1d(np.arange(clean.bits.shape[1]), work.counters)
    for fault in dict.fromkeys((*(fault for own, fault in TRIED if own == cell), *UNSEEN)):
        masks = struck(fault, cell)
        faulty = work.run(injected(gradients, masks, fault.value))
        zeroed = work.run(injected(gradients, widened(masks), 0.0))
        assert faulty.finite.all(), f"{fault}: not finite at {np.flatnonzero(~faulty.finite) + 1}"
        assert_same(faulty.bits[:, others], zeroed.bits[:, others], f"{fault}: the state")
        assert not zeroed.bits[:, work.counters].any()
        for name, mask in masks.items():
            where = f"{fault}: {name}"
            still = widened(masks)[name] & cell.stands_still(name)
            expected = np.where(still, 0, zeroed.updates[name])
            assert_same(faulty.updates[name] + np.float32(0), expected, where)  # -0 as 0
            hit = by_unit(mask).any(axis=2)
            skipped = faulty.bits[:, work.skipped(name)]
            assert (skipped == np.cumsum(hit, axis=0)).all(), f"{where}: skipped {skipped[-1]}"
            untouched = ~hit.any(axis=0)
            ours, clean_ours = (by_unit(x.updates[name])[:, untouched] for x in (faulty, clean))
            assert_same(ours, clean_ours, f"{where}, not struck")
            own = work.own(name)[untouched].ravel()
            assert_same(faulty.bits[:, own], clean.bits[:, own], f"{where}, not struck, state")
            # The fault is there: what it strikes does not move as it would have.
            moved = by_unit(faulty.updates[name] != clean.updates[name])
            assert (moved.any(axis=2) >= hit).all(), f"{where}: nothing happened"


# Decompositions.

WINDOWS = {"after the first": slice(2, 10), "the first": slice(0, 2)}


def rises(counter: np.ndarray) -> np.ndarray:
    """Where a counter `(steps, …)` went up, and that it went up by one."""
    change = changes(counter)
    assert np.isin(change, (0, 1)).all()
    return change == 1


def changes(counter: np.ndarray) -> np.ndarray:
    """By how much a counter `(steps, …)` went up."""
    return np.diff(counter.astype(np.int64), axis=0, prepend=0)


@pytest.mark.parametrize("window", WINDOWS)
@each([cell for cell in SAMPLE if cell.row.decomposes and cell.row.keeps])  # at refreshes
def test_a_failed_decomposition_leaves_the_last_good_one_in_use(cell: Cell, window: str) -> None:
    work, broken = program(cell), np.zeros(STEPS, bool)
    broken[WINDOWS[window]] = True
    run = work.run(given(cell)[1], **{str(cell.row.decomposes): broken})
    assert run.finite.all()
    skips = rises(run.bits[:, work.counters])
    # Without a subspace nothing is usable.
    waits = window == "the first" and cell.row.keeps == "subspaces"
    assert not skips[~broken].any() and skips.any() == waits, "the gradients are not at fault"
    refused = 0
    for start, side in run.sides:
        rejected, refreshed = rises(side.rejected), rises(side.refreshes)
        assert not rejected[~broken].any() and not refreshed[broken].any()
        moved = changed(start, side, (*ROOTS, *BASES))
        assert not (moved & rejected).any() and (changed(start, side, BASES) <= refreshed).all()
        refused += rejected.sum()
        if not cell.adapts:
            assert (moved == refreshed).all()
            assert rejected.any(axis=0).all() and refreshed[~broken].any(axis=0).all()
        if cell.refresh == "every":
            # What has no basis or root yet tries again at every step.
            again = window == "the first"
            assert (rejected == (broken & (DUE | again))[:, None]).all()
    assert refused


CODED = [cell for cell in SAMPLE if cell.storage in ("cholesky", "feedback")]
WITHOUT_STATE = [c for c in CELLS if c.row.svd or (c.row.decomposes and not c.row.keeps)]


@each([*CODED, *cells(WITHOUT_STATE, of=20)])
def test_a_failed_decomposition_of_any_step_poisons_nothing(cell: Cell) -> None:
    """That of an SVD has no last good one: every step takes its own. A factor stays."""
    work = program(cell)
    _, gradients = given(cell)
    broken = np.zeros(STEPS, bool)
    broken[5:8] = True
    name = "cholesky" if cell in CODED else "svd" if cell.row.svd else str(cell.row.decomposes)
    run, clean = work.run(gradients, **{name: broken}), work.run(gradients)
    assert run.finite.all(), f"not finite at steps {np.flatnonzero(~run.finite) + 1}"
    if cell not in CODED:  # a statistic that stays shows at the next refresh, perhaps after the end
        assert (run.updates["layers"][broken] != clean.updates["layers"][broken]).any()
    for _, side in run.sides if cell in CODED else ():
        stored = getattr(side.statistic, "correlation", side.statistic)
        # A step encodes a factor, and so does a refresh, in the new basis.
        assert (changes(stored.failures) == broken[:, None] * (1 + rises(side.refreshes))).all()


# The fault model itself.


def test_the_sample_has_every_policy_and_storage_and_fault() -> None:
    assert {c.refresh for c in SAMPLE} >= set(REFRESH)
    assert {c.storage for c in SAMPLE} >= set(STORAGE)
    assert {fault for _, fault in TRIED} == set(FAULTS)
