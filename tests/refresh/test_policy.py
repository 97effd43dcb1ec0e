"""Refresh policies: when they are due, what is executed then, and what the state says of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, at, scanned, trajectory
from tests.shared.factors import factors_of, root_of
from tests.shared.policies import (
    COUNTERS,
    EPS,
    FACTORS,
    LARGEST,
    POLICIES,
    STEPS,
    drain,
    number_of,
    quiet_gradients,
    shampoo,
    stepped,
)
from tests.shared.transcriptions import machine_epsilon, program_of_step


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


@functools.cache
def trajectory_of(name):
    """That of a policy of `POLICIES`, from ε and gradients, compiled once for all tests."""
    return jax.jit(lambda eps, g: trajectory(shampoo(POLICIES[name], eps=eps))(g))


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


METHODS = [(name, None) for name in cells(POLICIES, of=4)]
METHODS += [(name, curvax.eigenbases.stored_roots()) for name in cells(FIXED, of=3)]


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


@pytest.mark.parametrize(("name", "side"), cells([("FOAM", "left"), ("every", "both")], of=2))
def test_a_batch_and_its_matrices_are_refreshed_alike(executed, name, side):
    """In a scan: as many executions as counted, and the same numbers."""
    gradients = quiet_gradients({"w": (2, 4, 6)})
    tree = {f"w{i}": gradients["w"][:, i] for i in range(2)}
    transformation = shampoo(POLICIES[name], side=side)
    batched, states = scanned(transformation)(gradients)
    done = sum(drain(executed).values())
    assert done == number_of(jax.tree.map(lambda x: x[-1], states), "refreshes")
    view = curvax.on_matrices(transformation, matrices="all", stack=False)
    updates, states = scanned(view)(tree)
    assert sum(drain(executed).values()) == done
    assert done == number_of(jax.tree.map(lambda x: x[-1], states), "refreshes")
    for i in range(2):
        assert_close(updates[f"w{i}"], batched["w"][:, i], 64, condition=LARGEST / EPS)


@pytest.mark.parametrize("name", cells(["FOAM", "DR"], of=2))
def test_two_optimizers_under_vmap_are_two_optimizers(name):
    """With dampings of their own."""
    replicas = [quiet_gradients(seed=seed) for seed in (0, 1)]
    together = jax.tree.map(lambda *g: np.stack(g), *replicas)
    dampings, numbers = (EPS, 2 * EPS), []
    single = trajectory_of(name)
    updates, states = jax.tree.map(
        np.asarray, jax.jit(jax.vmap(single))(np.array(dampings, np.float32), together)
    )
    for i, gradients in enumerate(replicas):
        alone, alone_states = single(dampings[i], gradients)
        assert_close(jax.tree.map(lambda x, i=i: x[i], updates), alone, 64)
        for one, other in zip(factors_of(states), factors_of(alone_states), strict=True):
            for field in COUNTERS:
                assert np.array_equal(getattr(one, field)[i], getattr(other, field))
        numbers.append([np.asarray(f.refreshes[-1]).tolist() for f in factors_of(alone_states)])
    assert numbers[0] != numbers[1]


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


def test_a_users_policy_is_obeyed():
    """Its damping and its eigenvalues make the root `Q (d + ε)^(-1/p) Qᵀ`."""
    policy: Any = POLICIES["a user's"]
    assert isinstance(policy, curvax.policies.RefreshPolicy)
    gradients = quiet_gradients({"w": (5, 4)})
    _, states = scanned(shampoo(policy, b2=0.8))(gradients)
    factor = jax.tree.map(np.asarray, factors_of(states)[0])
    found = root_of(factor, 2, EPS)
    statistic, trace, damping, refreshes = np.zeros((5, 5)), 0.0, EPS, 0
    raised = 0
    for t in range(STEPS):
        g = np.asarray(gradients["w"][t], np.float64)
        statistic = 0.8 * statistic + 0.2 * (g @ g.T)
        if t % 2 == 0:
            ratio = np.trace(statistic) / trace if trace else np.inf
            if not 1 / 1.3 <= ratio <= 1.3:
                trace, damping, refreshes = np.trace(statistic), EPS, refreshes + 1
                d, q = np.linalg.eigh(statistic)
            else:
                damping, raised = 2 * damping, raised + 1
            if t:
                assert_close(factor.proxy[t], ratio, 64)
            root = (q * (np.maximum(d, 0) + damping) ** -0.5) @ q.T
        assert factor.refreshes[t] == refreshes and factor.checks[t] == t // 2 + 1
        assert factor.damping[t] == damping
        condition = float(d[-1] / damping)
        assert_close(found[t], root, 64, condition=condition, eps=machine_epsilon("float32"))
    assert raised > 1 and refreshes > 1


def test_the_period_of_soap_grows_to_ten_by_default() -> None:
    growing, ten = (curvax.every(10, first=first) for first in ("growing", True))
    given = ({}, {"refresh": growing}, {"refresh": ten})
    default, same, other = (program_of_step(curvax.scale_by_soap(**x)) for x in given)
    assert default == same != other
