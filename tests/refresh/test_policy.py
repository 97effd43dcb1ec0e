"""Refresh policies: when they are due, what is executed then, and what the state says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import at
from tests.shared.policies import (
    COUNTERS,
    FACTORS,
    POLICIES,
    STEPS,
    drain,
    number_of,
    quiet_gradients,
    shampoo,
    stepped,
)
from tests.shared.transcriptions import program_of_step


@pytest.mark.parametrize("first", [False, True, "doubling"])
@pytest.mark.parametrize("k", range(1, 8))
def test_every_is_due_at_the_steps_of_its_definition(k, first):
    for offset in range(-3, 11):
        # Integers of NumPy count as integers.
        policy = curvax.every(np.int64(k), offset=np.int64(offset), first=first)
        steps = range(1, 30)
        early = {False: [], True: [1], "doubling": [2**i for i in range(5) if 2**i < k]}[first]
        expected = [t % k == offset % k or t in early for t in steps]
        assert [bool(policy.due(t)) for t in steps] == expected
        counts = jnp.arange(1, 30, dtype=jnp.int32)
        assert jax.vmap(policy.due)(counts).tolist() == expected


@pytest.mark.parametrize("stagger", [False, 1])
def test_a_growing_period_grows_by_one_in_a_hundred_steps(stagger):
    """From 3, and is the given one in the long run; a staggered factor is refreshed as often."""
    policy = curvax.every(10, first="growing", stagger=stagger)
    steps, number = np.arange(1, 1001), sum(100 / k for k in range(3, 10))
    for phase in range(10 if stagger else 1):
        due = steps[np.asarray(jax.vmap(lambda t, p=phase: policy.due(t, p))(steps))]
        gaps, periods = np.diff(due), np.minimum(10, 3 + due[1:] // 100)
        assert due[0] == 1 and (gaps[due[1:] < 100][1:] == 3).all()
        assert (gaps < 2 * periods).all() and (gaps[due[1:] > 720] == 10).all()
        assert abs(np.sum(due < 700) - number) < 8
    short = curvax.every(2, first="growing")
    assert [t for t in range(1, 9) if short.due(t)] == [1, 2, 4, 6, 8]


DUE = {
    "every": [1, 3, 6, 9, 12, 15],
    "every, not at first": [4, 8, 12, 16],
    "every, offset": [1, 3, 7, 11, 15],
    "every, doubling at first": [1, 2, 4, 7, 14],
    "FOAM": range(1, STEPS + 1, 2),
    "FOAM, not adaptive": range(1, STEPS + 1, 2),
    "FOAM, no refreshes": range(1, STEPS + 1, 2),
    "DR": range(1, STEPS + 1, 2),
    "a user's": range(1, STEPS + 1, 2),
    "a user's schedule": [1, 2],
}
FIXED = (*(name for name in DUE if name.startswith("every")), "a user's schedule")


METHODS = [(name, None) for name in cells(POLICIES, of=8)]
METHODS += [(name, curvax.eigenbases.stored_roots()) for name in cells(FIXED, of=6)]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_what_is_executed_is_what_the_state_counts(executed, name, method):
    """Step by step, under jit; and off the schedule nothing is executed."""
    before, total = dict.fromkeys(COUNTERS, 0), 0
    transformation = shampoo(POLICIES[name], method=method)
    for t, (_, state) in enumerate(stepped(transformation, quiet_gradients()), start=1):
        done = sum(drain(executed).values())
        now = {field: number_of(state, field) for field in COUNTERS}
        new = {field: now[field] - before[field] for field in COUNTERS}
        assert done == new["refreshes"] <= new["checks"] <= FACTORS
        assert new["rejected"] == 0
        if name in DUE:
            assert new["checks"] == (FACTORS if t in DUE[name] else 0)
        if name in FIXED:
            assert new["refreshes"] == new["checks"]
        before, total = now, total + done
    if name == "FOAM, no refreshes":
        assert total == FACTORS
    elif name in FIXED:
        assert total == FACTORS * len(DUE[name])
    elif "staggered" not in name:
        assert FACTORS < total < before["checks"]  # some decisions each way


@pytest.mark.parametrize("apart", [0, 1])
def test_refreshes_of_replicas_under_vmap_keep_their_period(executed, apart):
    """Nothing is decomposed at other steps; where one replica is due, the work is done for all."""
    single = shampoo(POLICIES["every"])
    replicas = [quiet_gradients(seed=seed) for seed in (0, 1)]
    gradients = jax.tree.map(lambda *g: np.stack(g, axis=1), *replicas)
    state = jax.vmap(single.init)(at(gradients, 0))
    own = state["w"]
    state = {"w": own._replace(count=own.count + np.array([0, apart], np.int32))}
    update = jax.jit(jax.vmap(lambda g, s: single.update(g, s)))
    drain(executed)
    for t in range(STEPS):
        _, state = update(at(gradients, t), state)
        due = any(POLICIES["every"].due(step) for step in (t + 1, t + 1 + apart))
        assert sum(drain(executed).values()) == (2 * FACTORS if due else 0)


def test_the_period_of_soap_grows_to_ten_by_default() -> None:
    growing, ten = (curvax.every(10, first=first) for first in ("growing", True))
    given = ({}, {"refresh": growing}, {"refresh": ten})
    default, same, other = (program_of_step(curvax.scale_by_soap(**x)) for x in given)
    assert default == same != other
