"""Every method × refresh policy × storage × code of its moments, against the method in float64.

A cell of this product is an optimizer. It runs jitted in float32 for six steps with refreshes at
every second one, and each of its updates is compared with that of the same method and policy dense
in float64. The bound follows from what the cell's codes lose (`algebra.py`):

    ‖update - exact‖ <= SAFETY · (what the exact run's own state, moved by the codes' error, makes)

So dense cells are compared up to rounding, moments in 8 bits up to a few percent. In 4 bits a basis
is itself off by a tenth and enters an update four times: that bound is coarse for `soap`, whose
8-bit cells are the sharp ones. What error feedback adds is smaller than a code here
(test_shampoo_4bit_references.py compares its codes).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import policies
from curvax.transforms.storage import _quantized
from tests import fault_model
from tests.algebra import POSITIVE, ROUNDING, SIGNED, Twin, coding_errors, leaves_in, trajectory
from tests.cells import cells
from tests.helpers import with_spectrum
from tests.registry import ADAPTIVE, NAMED, REGISTRY

SAFETY = 1.5
"""For codes that move things in worse directions than the draws."""

STEPS, DRAWS = 6, 16
BLOCK = fault_model.TILES["block"]  # in matrices of order 6 and 8: whole tiles and cut ones
MOMENT_BITS = 8

# The factors.

REFRESH = {
    "every": curvax.every(2),
    "stagger": curvax.every(2, stagger=True),
    "foam": policies.foam(2, threshold=0.25, max_damping=2.2),
    "diagonal_residual": policies.diagonal_residual(2, threshold=0.35),
    "below_norm": policies.below_norm(3.8, check_every=2),  # of 4.4 in all, 3 in another subspace
}
STORAGE = {
    **{name: fault_model.STORAGE[name] for name in ("dense", "quantized")},
    "quantized8": curvax.quantized(8, **fault_model.TILES),
    **{name: fault_model.STORAGE[name] for name in ("cholesky", "feedback", "packed")},
}
ONE_BY_ONE = ("quantized8", "feedback", "packed")  # decoded as large matrices are
VALUES = {"refresh": REFRESH, "storage": STORAGE}
MOMENTS = ("plain", "coded")


# The cells.


class Cell(NamedTuple):
    """A combination; None where a method does without the argument."""

    method: str
    refresh: str | None
    storage: str | None
    moments: str

    def __str__(self) -> str:
        return "-".join(filter(None, self))

    @property
    def in_full(self) -> Cell:
        """The cell of the same method and policy without codes."""
        return self._replace(storage=self.storage and "dense", moments="plain")

    def make(self, **replaced: Any) -> Any:
        """The optimizer; of `replaced`, a policy or storage only where the cell has one."""
        settings = {"others": optax.adam(1.0, b1=0.5, b2=0.5), **NAMED[self.method].for_algebra()}
        settings |= {name: value for name, value in replaced.items() if name not in VALUES}
        for argument, name in (("refresh", self.refresh), ("storage", self.storage)):
            if name is not None:
                settings[argument] = replaced.get(argument, VALUES[argument][name])
        optimizer = NAMED[self.method].optimizer(1.0, **settings)
        if self.moments == "plain":
            return optimizer
        return curvax.quantize_state(
            optimizer, bits=MOMENT_BITS, block=BLOCK, unsigned=POSITIVE, where=is_moment
        )


def is_moment(path: str, leaf: Any) -> bool:
    del leaf
    return not {*SIGNED, *POSITIVE}.isdisjoint(path.split("/"))


ALL = [
    Cell(row.name, *values)
    for row in REGISTRY
    for values in itertools.product(
        row.policies or (None,), STORAGE if row.factors else (None,), MOMENTS
    )
]


SAMPLE = [  # of each method
    cell
    for method in dict.fromkeys(cell.method for cell in ALL)
    for cell in cells((cell for cell in ALL if cell.method == method), of=20)
]
COMPARED = cells(ALL, of=150)


# What they run on.


def shapes(method: str) -> dict[str, tuple[int, ...]]:
    """Two matrices in one stack, and a vector where no policy has to decide about it."""
    row = NAMED[method]
    # Both factors of a square gradient have full rank at the first step: no basis is arbitrary.
    matrix = (6, 6) if row.factors and row.side(row.for_algebra()) == "both" else (8, 6)
    vector = {} if row.policies else {"b/bias": (6,)}
    return {"a/kernel": matrix, "b/kernel": matrix, **vector}


@functools.cache
def given(method: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters, and gradients that stay near one matrix for three steps and then near another.

    So policies that look before they refresh have every reason not to at step 3, and to at step 5.
    """
    gradients = {}
    for place, (name, shape) in enumerate(shapes(method).items()):
        x = np.random.default_rng(place).standard_normal((STEPS, *shape))
        if len(shape) == 2:
            keys = [jax.random.key(100 * place + regime) for regime in range(2)]
            near = [with_spectrum(key, *shape, [3, 2.5, 2, 0.6, 0.5, 0.4]) for key in keys]
            x = np.stack([near[t >= STEPS // 2] + 0.15 * x[t] for t in range(STEPS)])
        gradients[name] = np.float32(x)
    return {name: np.ones(shape, np.float32) for name, shape in shapes(method).items()}, gradients


@functools.cache
def twin(method: str, refresh: str | None) -> Twin:
    """The method with this policy, dense in float64."""
    cell = Cell(method, refresh, "dense" if NAMED[method].factors else None, "plain")
    return Twin(lambda storage: cell.make(storage=storage), *given(method))


def relative(updates: Any, exact: Any) -> np.ndarray:
    """Errors of updates, by leaf and step."""
    norm = lambda x: np.sqrt(np.sum(np.square(x), axis=tuple(range(1, x.ndim))))  # noqa: E731
    return np.stack([norm(updates[name] - exact[name]) / norm(exact[name]) for name in exact])


def refreshes(states: Any) -> list[list[int]]:
    """How often every matrix was refreshed."""
    return [x[-1].tolist() for x in states["refreshes"]]


def compared(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Errors of a cell's updates and their bounds, by leaf and step."""
    exact = twin(cell.method, cell.refresh)
    storage = None if cell.storage is None else STORAGE[cell.storage]
    moments = (MOMENT_BITS, BLOCK) if cell.moments == "coded" else None
    lost = coding_errors(exact.states, storage, moments)
    draws = np.random.default_rng(0).standard_normal((DRAWS, 4, 8, 8))
    moved = [exact.run(lost, draw) for draw in draws]
    most = np.max([relative(updates, exact.updates) for updates, _ in moved], axis=0)
    optimizer = cell.make()

    @jax.jit
    def run(params: Any, gradients: Any) -> Any:
        return trajectory(optimizer, params, optimizer.init(params), gradients)

    updates, states = jax.tree.map(np.asarray, run(*given(cell.method)))
    for _, others in moved:
        assert refreshes(others) == refreshes(exact.states), "a decision of the policy is marginal"
    assert refreshes(states) == refreshes(exact.states), "not refreshed when float64 is"
    return relative(updates, exact.updates), SAFETY * (most + ROUNDING)


# The tests.


@pytest.mark.parametrize("cell", COMPARED, ids=str)
def test_a_cell_is_its_method_in_float64_but_for_what_its_codes_lose(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cell.storage in ONE_BY_ONE:
        monkeypatch.setattr(_quantized, "SINGLY_FROM", 1)
    errors, bounds = compared(cell)
    assert (errors <= bounds).all(), f"errors in bounds, by leaf and step:\n{errors / bounds}"
    if NAMED[cell.method].own_policy or cell.refresh in ADAPTIVE:
        # At one of the two checks after the first step every matrix was left as it was.
        counts = refreshes(twin(cell.method, cell.refresh).states)
        assert set(itertools.chain(*counts)) == {2}


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_cell_keeps_codes(cell: Cell) -> None:
    state, full = (jax.eval_shape(x.make().init, given(x.method)[0]) for x in (cell, cell.in_full))
    size, whole = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(t)) for t in (state, full)
    )
    codes = leaves_in(state, ["codes"])["codes"]
    assert {x.dtype for x in codes} <= {np.dtype(np.uint8)}
    assert bool(codes) == (size < whole) == (cell != cell.in_full)


def test_every_value_is_in_the_sample() -> None:
    assert [set(x) for x in zip(*SAMPLE, strict=True)] == [set(x) for x in zip(*ALL, strict=True)]


def test_the_bound_notices_a_storage_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: statistics without anything off the diagonal, in the loosest codes."""
    decode, diagonal = _quantized.Quantized.decode_factor, jnp.eye(6, dtype=bool)
    forget = lambda *stored: jnp.where(diagonal, decode(*stored), 0)  # noqa: E731
    monkeypatch.setattr(_quantized.Quantized, "decode_factor", forget)
    errors, bounds = compared(Cell("kl_shampoo", "every", "quantized", "plain"))
    assert (errors > bounds).any()
