"""Transformations in eigenbases: orthonormal bases, linear methods, zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.storage import _quantized
from tests.cells import cells
from tests.helpers import assert_close
from tests.shared.soap import soap_gradients, soap_trajectory


@functools.cache
def _storage(name):
    """A storage in small blocks, and how its roots are decoded; compiled once."""
    options = {"block": 4, "min_elements": 1, "bits": 8} if name != "dense" else {}
    storage = getattr(curvax, name)(**options)
    return storage, jax.jit(lambda roots: [storage.decode_basis(root) for root in roots])


@pytest.mark.parametrize(
    ("policy", "storage"),
    cells(["every", "staggered", "residual"], ["dense", "quantized", "cholesky"], of=9),
)
def test_bases_stay_orthonormal_and_states_advance(policy, storage):
    policies = {
        "every": curvax.every(4),
        "staggered": curvax.every(4, stagger=True),
        "residual": curvax.policies.diagonal_residual(2, 0.05),
    }
    kept, decode = _storage(storage)
    direction = curvax.scale_by_soap(refresh=policies[policy], storage=kept)
    gradients = [
        np.stack(pair) for pair in zip(*map(soap_gradients, ((6, 9),) * 2, (0, 1)), strict=True)
    ]
    found, states = soap_trajectory(direction, gradients, "float32")
    assert np.isfinite(found).all()
    sides = states.left, states.right
    ends = [jax.tree.map(lambda x: x[-1], side) for side in sides]
    bases = decode([last.basis for last in ends])
    for side, last, u, order in zip(sides, ends, map(np.float64, bases), (6, 9), strict=True):
        error = np.abs(np.swapaxes(u, 1, 2) @ u - np.eye(order)).max()
        assert error <= (1e-5 if storage == "dense" else 0.1)
        assert (np.diff(side.checks, axis=0) >= 0).all() and (last.refreshes >= 2).all()
        assert (last.checks >= last.refreshes).all() and not last.rejected.any()
    if policy == "residual":
        assert (states.left.refreshes[-1] < states.left.checks[-1]).any()
    assert (np.abs(np.diff(states.inner.nu, axis=0)).max(axis=(1, 2, 3)) > 0).all()


def test_warm_qr_ends_when_its_policy_asks_for_no_more():
    """Each refresh leaves a residual below the threshold, with as few steps as that takes."""
    gradients = soap_gradients((5, 5))

    def residuals(iterations):
        direction = curvax.scale_by_soap(
            method=curvax.eigenbases.qr(iterations),
            refresh=curvax.policies.diagonal_residual(3, 0.01),
            side="left",
        )
        _, states = soap_trajectory(direction, gradients)
        found = []
        for t in range(3, len(gradients), 3):
            basis = states.left
            assert basis.refreshes[t] >= basis.refreshes[t - 1]
            rotated = basis.statistic[t]
            off = rotated - np.diag(np.diag(rotated))
            found.append(np.linalg.norm(off) / np.linalg.norm(rotated))
        return np.array(found), int(states.left.refreshes[-1])

    with jax.enable_x64(True):
        (one, refreshes), (many, fewer) = residuals(1), residuals(50)
    assert one.max() > 0.01 >= many.max()
    # Not decomposed: a basis by `eigh` would leave only rounding errors.
    assert many.min() > 1e-6
    assert refreshes > 1 and fewer > 1


def test_the_first_moment_may_be_in_bfloat16():
    gradients = soap_gradients((5, 9))
    direction = curvax.scale_by_soap(dtype=jnp.bfloat16, refresh=2, side="smaller")
    state = jax.eval_shape(direction.init, jnp.zeros((5, 9)))
    assert (state.inner.mu.dtype, state.inner.nu.dtype) == (jnp.bfloat16, jnp.float32)
    found, states = soap_trajectory(direction, gradients, "float32")
    assert states.inner.mu.dtype == jnp.bfloat16
    whole, _ = soap_trajectory(
        curvax.scale_by_soap(refresh=2, side="smaller"), gradients, "float32"
    )
    error = np.linalg.norm(found - whole) / np.linalg.norm(whole)
    assert 1e-5 < error < 0.02  # bfloat16 has 8 bits


def test_bases_that_are_read_one_by_one_give_the_same_directions(monkeypatch):
    """In a loop over the matrices of a leaf, with the inner transformation and its state inside."""
    storage = curvax.packed(block=4, min_elements=25)
    settings = {"refresh": curvax.every(2), "side": "left", "storage": storage}
    wrapped = curvax.in_eigenbasis(optax.scale_by_adam(), **settings)
    draw = np.random.default_rng(0)
    gradients = [
        {"large": draw.standard_normal((2, 6, 9)), "small": draw.standard_normal((3, 4))}
        for _ in range(4)
    ]

    def run(start):
        monkeypatch.setattr(_quantized, "SINGLY_FROM", start)
        update = jax.jit(lambda g, s: wrapped.update(g, s))
        state, found = jax.jit(wrapped.init)(jax.tree.map(jnp.float32, gradients[0])), []
        for g in jax.tree.map(jnp.float32, gradients):
            directions, state = update(g, state)
            found.append(directions)
        return found, state

    at_once, one_by_one = run(1000), run(5)
    assert_close(one_by_one, at_once, 256)
    assert jax.tree.leaves(one_by_one[1]["large"].inner)[0] == len(gradients)
