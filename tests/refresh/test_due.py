"""Only what is due is computed: in loops that XLA leaves alone, staggered, one matrix at a time."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.linalg import _loops
from curvax.transforms.refresh import _due
from tests.cells import cells
from tests.helpers import TO_READ, scanned
from tests.shared.factors import factors_of
from tests.shared.policies import (
    FACTORS,
    LARGEST,
    POLICIES,
    STEPS,
    drain,
    quiet_gradients,
    shampoo,
    stepped,
)


@pytest.mark.parametrize(("first", "early"), cells([(True, 1), (False, 0), ("doubling", 2)], of=3))
def test_staggered_refreshes_are_as_many_and_balanced(executed, first, early):
    """Every factor once per period; no step costs more than the mean and one decomposition."""
    shapes, period = {"a": (5, 4, 12), "b": (3, 8, 6)}, 4
    policy = curvax.every(period, offset=1, first=first, stagger=True)
    gradients, costs, counts = quiet_gradients(shapes, 2 * period + 1), [], []
    for _, state in stepped(shampoo(policy), gradients):
        done = drain(executed)
        costs.append(sum(number * order**3 for order, number in done.items()))
        counts.append(np.concatenate([np.ravel(f.refreshes) for f in factors_of(state)]))
    orders = np.repeat([4, 8], [5, 3])
    cost = (orders**3).sum()
    assert costs[:early] == [cost] * early and costs[early] < cost
    for start in range(max(1, early), period + 2):  # a period of steps, wherever it begins
        assert sum(costs[start : start + period]) == cost
        assert (counts[start + period - 1] - counts[start - 1] == 1).all()
    assert max(costs[max(1, early) :]) <= cost / period + orders.max() ** 3


def test_staggered_checks_come_once_per_period():
    policy = curvax.policies.foam(4, 0.4, LARGEST, stagger=True)
    _, states = scanned(shampoo(policy, side="both"))(quiet_gradients())
    checks = np.concatenate([f.checks.reshape(STEPS, -1) for f in factors_of(states)], axis=1)
    assert (checks[0] == 1).all()
    for start in range(STEPS - 4):
        assert (checks[start + 4] - checks[start] == 1).all()
    assert (np.diff(checks.sum(axis=1)) < 2 * FACTORS).all()


@pytest.mark.parametrize("period", [1, 3, 7, 50])
def test_each_entry_has_one_step_of_the_period_and_the_load_is_even(period):
    sizes, orders = [7, 3, 12, 1, 5], [64, 256, 32, 512, 128]
    costs = [float(order) ** 3 for order in orders]
    load = np.zeros(period)
    refreshings = [_due.Refreshing(cost, None) for cost in costs]
    works = [(own, np.zeros(size, int)) for own, size in zip(refreshings, sizes, strict=True)]
    dealt = _due._deal(works, curvax.every(period, stagger=True))
    for phases, size, cost in zip(dealt, sizes, costs, strict=True):
        assert phases.shape == (size,) and (phases >= 0).all()
        load += np.bincount(phases, minlength=period) * cost
    assert load.shape == (period,)
    assert load.max() <= load.mean() + max(costs)
    assert load.max() <= max(4 / 3 * load.mean(), max(costs))


@pytest.mark.parametrize(
    ("matrices", "order", "stagger", "together"),
    [
        (48, 768, True, 24),
        (12, 768, True, 12),  # fewer than 24
        (4, 768, True, 1),  # fewer than 8
        (12, 3072, True, 1),  # a GPU has no room for 8 at once
        (36, 1024, True, 12),  # nor for 18
        (64, 512, True, 32),
        (64, 512, 8, 8),
        (64, 512, 1, 1),
        (64, 512, 4, 4),
        (13, 768, True, 13),
        (29, 768, True, 1),  # a prime number, above the room for 28
    ],
)
def test_matrices_of_a_stack_take_turns_in_groups(matrices, order, stagger, together):
    """Groups are next to each other, and each has a step of its own while there are free ones."""
    schedule = curvax.every(100, stagger=stagger)
    work = _due.Refreshing(float(order) ** 3, order**2)
    (phases,) = _due._deal([(work, np.zeros(matrices, int))], schedule)
    groups = phases.reshape(-1, together)
    assert (groups == groups[:, :1]).all()
    assert len(set(groups[:, 0])) == len(groups)


def test_each_device_has_its_own_groups():
    """Of an equal share in order; a single matrix that is left over goes by itself."""
    works = [
        (_due.Refreshing(1.0, 64**2), np.append(np.repeat([0, 1], 24), 1)),
        (_due.Refreshing(1.0, None), np.repeat([0, 1], 4)),
    ]
    for period in (1, 2, 5, 40):
        phases, alone = _due._deal(works, curvax.every(period, stagger=8))
        groups = phases[:48].reshape(-1, 8)
        assert (groups == groups[:, :1]).all()
        for device in range(2):
            both = zip((phases, alone), works, strict=True)
            own = np.concatenate([found[owners == device] for found, (_, owners) in both])
            load = np.bincount(own, minlength=period)
            assert load.sum() == 28 + device
            assert load.max() - load.min() <= 8


def _between_refreshes():
    """What every step has to do: the way to bases that never change, statistics there, products
    with eigenvalues of roots, and the way back."""
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def init(x):
        sides = x @ x.mT, x.mT @ x
        return sides, sides, (x[..., 0], x[..., 0])

    def update(g, state, params=None):
        (left, right), (a, b), (r, s) = state
        x = product(product(a.mT, g), b)
        left, right = 0.8 * left + 0.2 * product(x, x.mT), 0.8 * right + 0.2 * product(x.mT, x)
        direction = jnp.matmul(a @ (r[..., :, None] * x * s[..., None, :]), b.mT)
        return direction, ((left, right), (a, b), (r, s))

    return optax.GradientTransformation(init, update)


ORDER = 64


@functools.cache
def _compiled_step(name, layout, number) -> Any:
    """A compiled step on matrices of this order, with a policy or without refreshes."""
    if name == "between refreshes":
        transformation = _between_refreshes()
    else:
        transformation = shampoo(POLICIES[name], side="both")
    params: Any = jax.ShapeDtypeStruct((number, ORDER, ORDER), jnp.float32)
    if layout != "a batch":
        matrix = jax.ShapeDtypeStruct((ORDER, ORDER), jnp.float32)
        params = {f"{i:02}": matrix for i in range(number)}
        stack = layout == "stacked"
        transformation = curvax.on_matrices(transformation, matrices="all", stack=stack)
    state = jax.eval_shape(transformation.init, params)
    step = jax.jit(transformation.update, donate_argnums=(0, 1))
    return step.lower(params, state).compile(TO_READ)


MANY = [  # whose compiled steps two tests share
    (name, *layout)
    for name, layout in cells(["every", "FOAM"], [("stacked", 32), ("unstacked", 8)], of=4)
]


@pytest.mark.parametrize(
    ("name", "layout", "number"),
    cells(
        [
            *itertools.product(["every", "FOAM"], ["a batch"], [1]),
            *MANY,
            *itertools.product(["every, staggered", "DR"], ["unstacked"], [2]),
        ],
        of=3,
    ),
)
def test_no_decomposition_is_outside_a_loop_or_branch(name, layout, number):
    """A loop over one matrix has a body that never changes, which XLA would do at every step."""
    program = _compiled_step(name, layout, number).as_text()
    entry = program[program.index("ENTRY") :]
    assert "syevd" in program and "syevd" not in entry


ONE = jax.ShapeDtypeStruct((1, 8, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)


class Counted(NamedTuple):
    refreshes: jax.Array
    rejected: jax.Array
    phase: None = None


def _refreshed(x, _, count):
    state = Counted(count[None] - 1, 0 * count[None])
    return _due.refresh_due(jax.jit(_decomposed), x, (1,), curvax.every(3), count, state, inputs=x)


def _both_visited(x, y, count):
    return [_loops.visit_all(_decomposed, z, (1,), count, z.size, inputs=z) for z in (x, y)]


def _done_at_most_once(x, y, count):
    return _loops.at_most_once(lambda x, y: y + jnp.linalg.eigh(x)[1], count % 3 == 0, x, y)


def _decomposed(_, given):
    return jnp.linalg.eigh(given)[1]


@pytest.mark.parametrize(
    ("f", "loops"), [(_refreshed, 1), (_both_visited, 2), (_done_at_most_once, 1)]
)
def test_the_work_of_a_single_round_stays_in_its_loop(f, loops):
    """It is the same in every round, and the round is the only one. XLA moves it out of the loop
    where it looks so, and the loop is gone, and with it the order of one after another.
    """
    x, count = ONE
    text = jax.jit(f).lower(x, x, count).compile(compiler_options=TO_READ).as_text() or ""
    entry = text[text.index("ENTRY") :]
    assert entry.count(" while(") == loops
    assert text.count('"lapack_ssyevd') == loops and "syevd" not in entry


def _temporaries_per_matrix(name, layout, number):
    """The temporaries of a step, in matrices for each of the matrices that there are."""
    memory = _compiled_step(name, layout, number).memory_analysis()
    return memory.temp_size_in_bytes / number / (4 * ORDER**2)


@pytest.mark.parametrize(("name", "layout", "count"), MANY)
def test_temporaries_of_a_refresh_do_not_grow_with_the_number_of_matrices(name, layout, count):
    """All in all no more than those of a step without refreshes; buffers are donated.

    Totals, not the growth from few matrices to many: XLA packs buffers now like this, now like
    that, so that differences jump by whole matrices.
    """
    needed = _temporaries_per_matrix(name, layout, count)
    unavoidable = _temporaries_per_matrix("between refreshes", layout, count)
    assert needed <= unavoidable + 0.1, (
        f"{needed:.2f} matrices per matrix, {unavoidable:.2f} needed"
    )
