"""Factors: the first ones, what cannot be refreshed, when statistics are gathered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

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
OF_ROOT = ("basis", "eigenvalues", "inverse_root", "damping", "error", "refreshes")
STORED = curvax.eigenbases.stored_roots()
EVERY = curvax.every(2, offset=1)
CASES: dict[str, tuple[Any, Any]] = {
    "every": (EVERY, None),
    "every, stored": (EVERY, STORED),
    "every, rotations": (EVERY, "rotations"),
    "every, coupled Newton": (EVERY, "coupled_newton"),
    "every, Newton-Schulz": (EVERY, "newton_schulz"),
    "every, products": (EVERY, "products"),
    "FOAM, as printed": (dataclasses.replace(POLICIES["FOAM"], rounding_floor=0.0), None),
    **{
        name: (POLICIES[name], None)
        for name in ("FOAM", "FOAM, not adaptive", "FOAM, no refreshes", "DR")
    },
}


@pytest.mark.parametrize("case", cells(CASES, of=8))
def test_a_factor_that_is_not_finite_keeps_its_last_good_root(case):
    """And starts anew, for the checks after it; the other matrix is not affected."""
    policy, method = CASES[case]
    transformation, gradients = shampoo(policy, method=method), quiet_gradients({"w": (3, 4, 6)})
    update, state = jax.jit(transformation.update), jax.jit(transformation.init)(at(gradients, 0))
    for t in range(BAD):
        _, state = update(at(gradients, t), state)
    before = state["w"].left
    lost = before.statistic.at[1, 2, 2].set(jnp.nan).at[2, 0, 1].set(jnp.inf)
    spoilt = {"w": state["w"]._replace(left=before._replace(statistic=lost))}
    for t in range(BAD, STEPS):
        good, state = update(at(gradients, t), state)
        found, spoilt = update(at(gradients, t), spoilt)
        factor = spoilt["w"].left
        assert_close(at(factor, 0), at(state["w"].left, 0), factor=0)
        assert np.array_equal(found["w"][0], good["w"][0])
        assert np.isfinite(found["w"]).all() and np.isfinite(factor.statistic).all()
        assert factor.rejected.tolist() == factor.restarted.tolist() == [0, 1, 1]
        assert np.array_equal(factor.checks, [t // 2 + 1] * 3)
        if t == BAD:
            assert not factor.statistic[1:].any()
            for field in OF_ROOT:
                now, then = (getattr(x, field) for x in (factor, before))
                assert now is None or np.array_equal(now[1:], then[1:]), field
        if factor.proxy is None:  # no policy decides: the checks after it are refreshes
            done, checks = (
                getattr(factor, x) - getattr(before, x) for x in ("refreshes", "checks")
            )
            assert np.array_equal(done[1:], checks[1:] - 1)
        else:
            assert np.isfinite(factor.proxy).all()


def _statistic(factor):
    return statistic_of(factor) if factor.inverse_root is None else factor.statistic


def _root(factor):
    return root_of(factor, 2, EPS) if factor.inverse_root is None else factor.inverse_root


@pytest.mark.parametrize("method", [None, STORED])
def test_statistics_every_and_warm_up(method):
    """The root after a warm-up is that of earlier refreshes; in bases their turns round."""
    gradients = quiet_gradients({"w": (5, 4)})
    settings = {"statistics_every": 3, "initial": 0.5, "b2": 0.75, "method": method}
    # Each turn rounds, and so does the basis: by 10 float32 epsilons in eight turns, on one CPU.
    rounding: dict[str, float] = {"factor": 16 if method else 64, "eps": machine_epsilon("float32")}
    updates, states = scanned(shampoo(curvax.every(2), **settings))(gradients)
    warm, warm_states = scanned(shampoo(curvax.every(2), **settings, warmup_steps=4))(gradients)
    factor = factors_of(states)[0]
    statistic = 0.5 * np.eye(5)
    for t in range(1, STEPS + 1):
        if t % 3 == 0:
            g = np.asarray(gradients["w"][t - 1], np.float64)
            statistic = 0.75 * statistic + 0.25 * (g @ g.T)
        assert_close(_statistic(factor)[t - 1], statistic, **rounding)
    assert not np.any(warm["w"][:4])
    alike = {"factor": 0} if method else rounding
    assert_close(warm["w"][4:], updates["w"][4:], **alike)
    for one, other in zip(factors_of(states), factors_of(warm_states), strict=True):
        assert_close(_statistic(other), _statistic(one), **alike)
        assert_close(_root(other)[4:], _root(one)[4:], **alike)
        assert other.checks[3] == 0 < one.checks[3]


@pytest.mark.parametrize("where", [{}, {"offset": 1}, {"stagger": True}], ids=str)
def test_roots_of_the_first_steps_have_statistics(where):
    """Those of the start, `εI`, would make a direction a thousand times as long as its gradient."""
    g = quiet_gradients({"w": (5, 4)})["w"][0]
    direction = curvax.scale_by_shampoo(refresh=curvax.every(100, **where), graft=None)
    found, _ = direction.update(g, direction.init(g))
    assert np.linalg.norm(found) <= (4 / (1 - 0.95)) ** 0.5


def folded(jaxpr: Any, inputs: list[bool]) -> set[str]:
    """What reads matrices that depend on no input: XLA computes it while it compiles."""
    found: set[str] = set()
    depends = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        given = [not hasattr(x, "val") and depends.get(x, False) for x in equation.invars]
        inner = [getattr(x, "jaxpr", x) for x in jaxprs_in_params(equation.params)]
        for each in inner:  # what a loop or a branch is given counts as not constant
            found |= folded(each, given if name == "jit" else [True] * len(each.invars))
        if not (inner or any(given)):
            found |= {name for x in equation.invars if x.aval.size >= 128**2}
        made = any(given) or name == "optimization_barrier"
        depends |= dict.fromkeys(equation.outvars, made)
    return found


@pytest.mark.parametrize("form", ["precondition", "in_eigenbasis"])
def test_no_compiler_encodes_the_first_factors_itself(form: str) -> None:
    """XLA's evaluator of constants took 30 s for the codes of an identity of order 3072."""
    inner = () if form == "precondition" else (optax.scale_by_adam(),)
    own = {"refresh": curvax.every(2), "storage": curvax.quantized()}
    transformation = getattr(curvax, form)(*inner, **own)
    gradient = {"kernel": jnp.ones((2, 128, 128))}
    state = jax.eval_shape(transformation.init, gradient)
    for program, given in ((transformation.init, ()), (transformation.update, (state,))):
        jaxpr = jax.make_jaxpr(program)(gradient, *given).jaxpr
        assert not {x for x in folded(jaxpr, [True] * len(jaxpr.invars)) if "reduce" in x}
