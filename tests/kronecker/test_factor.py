"""A factor that cannot be refreshed: nothing gathered yet, not finite, a failed decomposition."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, at, generator, scanned
from tests.shared.factors import factors_of, root_of, statistic_of
from tests.shared.policies import EPS, POLICIES, STEPS, quiet_gradients, shampoo
from tests.shared.transcriptions import machine_epsilon


@pytest.mark.parametrize("policy", [curvax.every(5, offset=1), curvax.policies.foam(5)])
def test_a_factor_without_a_statistic_waits_for_one(policy):
    """A first gradient of zeros would make the root ε^(-1/2) I until the next refresh."""
    transformation = curvax.precondition(refresh=policy, side="left", root=2, b2=0.9, eps=1e-8)
    gradients = generator(jax.random.key(0)).standard_normal((7, 2, 3, 5)).astype(np.float32)
    gradients[:2, 0], gradients[0, 1] = 0, 0  # begin at the third and second step
    _, states = scanned(transformation)(gradients)
    factors = [jax.tree.map(lambda x, t=t: np.asarray(x[t]), states.left) for t in range(7)]
    assert [x.refreshes.tolist() for x in factors][:4] == [[0, 0], [0, 1], [1, 1], [1, 1]]
    assert [x.rejected.tolist() for x in factors][:4] == [[1, 1], [2, 1], [2, 1], [2, 1]]
    roots = [root_of(x, 2, 1e-8) for x in factors]
    assert_close(roots[1][0], np.eye(3), factor=0)
    for t, i in ((1, 1), (2, 0)):
        d, q = np.linalg.eigh(statistic_of(factors[t])[i])
        expected = (q * (np.maximum(d, 0) + 1e-8) ** -0.5) @ q.T
        assert_close(roots[t][i], expected, 64, condition=1e4, eps=machine_epsilon("float32"))
        assert_close(roots[3][i], roots[t][i], factor=0)
    assert factors[-1].checks.tolist() == [4, 3]  # and that of step 6


BAD = 6  # the index of step 7, when all are due
OF_ROOT = ("basis", "eigenvalues", "inverse_root", "damping", "error")
AS_PRINTED = 0.0  # FOAM's floor
STORED = curvax.eigenbases.stored_roots()
CASES: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "every": (curvax.every(2, offset=1), {}, []),
    "every, stored": (curvax.every(2, offset=1), {"method": STORED}, []),
    "every, rotations": (curvax.every(2, offset=1), {"method": "rotations"}, []),
    "every, coupled Newton": (curvax.every(2, offset=1), {"method": "coupled_newton"}, []),
    "every, Newton-Schulz": (curvax.every(2, offset=1), {"method": "newton_schulz"}, []),
    "every, products": (curvax.every(2, offset=1), {"method": "products"}, []),
    "FOAM": (POLICIES["FOAM"], {}, [POLICIES["FOAM"].rounding_floor, AS_PRINTED]),
    "FOAM, not adaptive": (POLICIES["FOAM, not adaptive"], {}, []),
    "FOAM, no refreshes": (POLICIES["FOAM, no refreshes"], {}, []),
    "DR": (POLICIES["DR"], {}, []),
}


@pytest.mark.parametrize("case", cells(CASES, of=4))
def test_a_factor_that_is_not_finite_keeps_its_last_good_root(case):
    """And starts anew, for the checks after it; the other matrix is not affected."""
    policy, settings, floors = CASES[case]
    gradients = quiet_gradients({"w": (3, 4, 6)})

    def spoiled(state, t):
        """At step BAD the statistics of two matrices are lost."""
        factor = state["w"].left
        lost = factor.statistic.at[1, 2, 2].set(jnp.nan).at[2, 0, 1].set(jnp.inf)
        statistic = jnp.where(t == BAD, lost, factor.statistic)
        return {"w": state["w"]._replace(left=factor._replace(statistic=statistic))}

    @jax.jit
    def trajectory(gradients, spoil, floor):
        own = policy if floor is None else dataclasses.replace(policy, rounding_floor=floor)
        transformation = shampoo(own, **settings)

        def step(state, now):
            t, gradient = now
            state = jax.tree.map(lambda x, y: jnp.where(spoil, y, x), state, spoiled(state, t))
            update, state = transformation.update(gradient, state)
            return state, (update, state)

        start = transformation.init(at(gradients, 0))
        return jax.lax.scan(step, start, (jnp.arange(STEPS), gradients))[1]

    for floor in floors or [None]:
        runs = [trajectory(gradients, spoil, floor) for spoil in (False, True)]
        good, spoilt = jax.tree.map(np.asarray, runs)
        _assert_last_good_root_kept(*good, *spoilt)


def _assert_last_good_root_kept(good, good_states, updates, states):
    factor, untouched = (jax.tree.map(np.asarray, x["w"].left) for x in (states, good_states))
    due = np.cumsum(np.arange(STEPS) % 2 == 0)
    assert np.array_equal(factor.checks, np.broadcast_to(due[:, None], (STEPS, 3)))
    of_root = [x for x in OF_ROOT if getattr(factor, x) is not None]
    for field in of_root:
        assert np.array_equal(getattr(factor, field)[:, 0], getattr(untouched, field)[:, 0])
    assert not factor.rejected[:, 0].any() and not factor.rejected[:BAD].any()
    assert np.array_equal(updates["w"][:, 0], good["w"][:, 0])
    assert np.isfinite(updates["w"]).all()
    for i in (1, 2):
        assert np.isfinite(factor.statistic[:, i]).all() and not factor.statistic[BAD, i].any()
        for field in (*of_root, "refreshes"):
            values = getattr(factor, field)
            assert np.array_equal(values[BAD, i], values[BAD - 1, i]), field
        lost = np.arange(STEPS) >= BAD
        assert np.array_equal(factor.rejected[:, i], lost)
        assert np.array_equal(factor.restarted[:, i], lost)
        assert factor.proxy is None or np.isfinite(factor.proxy[:, i]).all()
        if factor.proxy is None:  # no policy decides: the checks after it are refreshes
            after = due[BAD:] - due[BAD]
            assert np.array_equal(factor.refreshes[BAD:, i] - factor.refreshes[BAD, i], after)
    assert not factor.restarted[:, 0].any()


def _statistic(factor):
    return statistic_of(factor) if factor.inverse_root is None else factor.statistic


def _root(factor):
    return root_of(factor, 2, EPS) if factor.inverse_root is None else factor.inverse_root


@pytest.mark.parametrize("method", [None, STORED])
def test_statistics_every_and_warm_up(method):
    """The root after a warm-up is that of earlier refreshes; in bases their turns round."""
    gradients = quiet_gradients({"w": (5, 4)})
    settings = {"statistics_every": 3, "initial": 0.5, "b2": 0.75, "method": method}
    rounding = {"factor": 0} if method else {"factor": 64, "eps": machine_epsilon("float32")}
    updates, states = scanned(shampoo(curvax.every(2), **settings))(gradients)
    warm, warm_states = scanned(shampoo(curvax.every(2), **settings, warmup_steps=4))(gradients)
    factor = factors_of(states)[0]
    statistic = 0.5 * np.eye(5)
    for t in range(1, STEPS + 1):
        if t % 3 == 0:
            g = np.asarray(gradients["w"][t - 1], np.float64)
            statistic = 0.75 * statistic + 0.25 * (g @ g.T)
        assert_close(_statistic(factor)[t - 1], statistic, eps=machine_epsilon("float32"))
    assert not np.any(warm["w"][:4])
    assert_close(warm["w"][4:], updates["w"][4:], **rounding)
    for one, other in zip(factors_of(states), factors_of(warm_states), strict=True):
        assert_close(_statistic(other), _statistic(one), **rounding)
        assert_close(_root(other)[4:], _root(one)[4:], **rounding)
        assert other.checks[3] == 0 < one.checks[3]
