"""What moments do when a basis changes: the rules, and which arrays are moments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import subspaces
from curvax.transforms._carry import put_moments, take_moments
from tests.helpers import assert_close
from tests.shared.low_rank import GRADIENTS, RANK, oriented, trajectories


def test_carry_rules_are_their_formulas():
    turn = np.float32(np.linalg.qr(np.random.default_rng(2).standard_normal((3, 3)))[0])
    moment = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert_close(subspaces.rotate().first(moment, turn), turn @ moment, 4)
    assert_close(subspaces.rotate().second(moment, turn), turn**2 @ moment, 4)
    assert (subspaces.rotate().second(moment, turn) >= 0).all()
    for kind in ("first", "second"):
        assert_close(getattr(subspaces.keep(), kind)(moment, turn), moment, factor=0)
        assert_close(getattr(subspaces.reset(), kind)(moment, turn), 0 * moment, factor=0)


@pytest.mark.parametrize(("carry", "name"), [("rotate", "tall"), ("reset", "wide")])
def test_moments_follow_a_change_of_basis(carry, name):
    inner, rule = optax.scale_by_adam(0.9, 0.99), getattr(subspaces, carry)()
    direction = curvax.in_subspace(
        inner, RANK, basis=subspaces.svd(), refresh=curvax.every(4), carry=rule
    )
    with jax.enable_x64(True):
        _, states = trajectories(direction, {name: GRADIENTS[name]})
        own = states[name]
        basis = own.subspace.basis
        mu, nu = (oriented(name, x) for x in (own.inner.mu, own.inner.nu))
        for t in (3, 4):  # before and at the refresh of step 4
            g = oriented(name, GRADIENTS[name][t - 1])
            turn = basis[t - 1].T @ basis[t - 2]
            before = (mu[t - 2], nu[t - 2])
            if t == 4:
                before = (rule.first(before[0], turn), rule.second(before[1], turn))
            sigma = basis[t - 1].T @ g
            assert_close(mu[t - 1], 0.9 * before[0] + 0.1 * sigma, 64)
            assert_close(nu[t - 1], 0.99 * before[1] + 0.01 * sigma**2, 64)


class Declared(NamedTuple):
    """A state that says what its fields are."""

    speed: Any
    energy: Any
    norm: Any

    first_moments = ("speed",)
    second_moments = ("energy",)


@pytest.mark.parametrize(
    ("inner", "first", "second"),
    [
        (optax.adam(0.1), ["0/mu"], ["0/nu"]),
        (optax.chain(optax.trace(0.9), optax.scale_by_rms()), ["0/trace"], ["1/nu"]),
        (curvax.momentum(), ["mu"], []),
        (curvax.moment_ratio(), ["mu"], ["nu"]),
        (curvax.limit_norm_growth(), [], []),
        (
            optax.GradientTransformation(lambda x: Declared(x, x, x[0, 0]), None),
            ["speed"],
            ["energy"],
        ),
    ],
    ids=["adam", "a chain", "momentum", "moment_ratio", "none", "declared"],
)
def test_moments_are_those_that_a_state_declares(inner, first, second):
    state = inner.init(jnp.zeros((3, 4)))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    numbered = jax.tree.unflatten(jax.tree.structure(state), range(len(leaves)))
    moments = take_moments(numbered)
    assert [names[i] for i in moments.first] == first
    assert [names[i] for i in moments.second] == second
    other = put_moments(numbered, jax.tree.map(lambda i: -i - 1, moments))
    moved = [-i - 1 if name in (*first, *second) else i for i, name in enumerate(names)]
    assert jax.tree.leaves(other) == moved


UNKNOWN = optax.GradientTransformation(lambda x: {"memory": x}, lambda u, s, p=None: (u, s))


@pytest.mark.parametrize(
    ("inner", "field"),
    [
        (UNKNOWN, None),
        (optax.scale_by_rss(), "sum_of_squares"),
        (curvax.in_eigenbasis(curvax.moment_ratio(), refresh=curvax.every(2)), "statistic"),
        (curvax.precondition(refresh=curvax.every(2)), "statistic"),
        (curvax.quantize_state(optax.scale_by_adam(), min_elements=1), "codes"),
        (curvax.scale_by_racs(), "rows"),
    ],
)
def test_states_that_cannot_be_carried_are_rejected(inner, field):
    """But they may be kept."""
    like = {"a": jax.ShapeDtypeStruct((2, 6, 8), "float32")}
    message = f"field {field!r} holds more than one number per"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(curvax.in_eigenbasis(inner, refresh=curvax.every(2)).init, like)
    given = {"basis": subspaces.svd(), "refresh": curvax.every(2)}
    for carry in (subspaces.rotate(), subspaces.reset()):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(curvax.in_subspace(inner, 3, carry=carry, **given).init, like)
    jax.eval_shape(curvax.in_subspace(inner, 3, **given).init, like)
