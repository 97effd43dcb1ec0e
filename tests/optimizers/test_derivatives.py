"""Derivatives through updates: of a loss after two steps, by what the gradients depend on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.registry import REGISTRY, Row

# With as many columns as rows no factor has an eigenvalue of 0, twice or more often, where
# eigenvectors have no derivative.
SHAPES = {"a": {"kernel": (5, 5)}, "b": {"kernel": (5, 5)}, "bias": (4,)}


def trees(seed: int, dtype: Any) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=is_shape)


def distance(a: Any, b: Any) -> Any:
    return sum(jnp.sum(jnp.tanh(x - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (a, b))))  # noqa: B905


def after_two_steps(row: Row, params: Any, target: Any) -> Any:
    """A loss, in which the second state has a derivative too."""
    # Turbo-Muon's own precision, bfloat16, has steps where differences see no derivative.
    optimizer = row.optimizer(0.05, **{k: row.settings[k] for k in {"method"} & {*row.settings}})

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(distance)(params, target), state, params)
        return (optax.apply_updates(params, updates), state), None

    (end, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), None, 2)
    return distance(end, params)


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_derivatives_of_two_jitted_steps_are_those_of_differences(row: Row) -> None:
    with jax.enable_x64(True):
        params, target, along = (trees(seed, jnp.float64) for seed in range(3))
        loss = jax.jit(lambda target: after_two_steps(row, params, target))
        found = optax.tree.vdot(jax.jit(jax.grad(loss))(target), along)
        step = 1e-6  # rotations to new bases have third derivatives of a million
        ahead, behind = (
            loss(jax.tree.map(lambda t, v, c=c: t + c * v, target, along)) for c in (step, -step)
        )
        difference = float(ahead - behind) / (2 * step)
    assert abs(float(found) - difference) < 1e-5 * abs(difference)
    assert difference != 0


def test_entries_without_a_gradient_have_a_derivative_of_zero_in_a_ratio_of_moments() -> None:
    direction = curvax.moment_ratio(0.9, 0.95)
    g = jnp.ones((3, 4)).at[1].set(0)
    state = direction.init(g)
    found = jax.jit(jax.grad(lambda g: jnp.sum(jnp.tanh(direction.update(g, state)[0] * g))))(g)
    assert jnp.isfinite(found).all() and found[0].all() and not found[1].any()


OF_ZEROS = {
    "newton_schulz": curvax.orthogonalize("newton_schulz"),
    "gram": curvax.orthogonalize(curvax.polar.newton_schulz(norm="gram")),
    "normalize_rows": curvax.normalize_rows(),
    "standardize_rows": curvax.standardize_rows(),
    "normalize_matrices": curvax.normalize_matrices(),
    "spectral": curvax.normalize_matrices(norm="spectral"),
    "racs": curvax.scale_by_racs(),
    "limit_norm_growth": curvax.limit_norm_growth(1.01),
    "qr_svd": curvax.orthogonalize("qr_svd"),
    "foam": curvax.scale_by_foam(),
    # On one side: the other has the same program.
    "kl_shampoo": curvax.scale_by_kl_shampoo(side="left"),
    "osgdm": curvax.scale_by_osgdm(),
    "sumo": curvax.scale_by_sumo(rank=2),
    "fira": curvax.scale_by_fira(rank=2),  # whose direction has GaLore's as a part
    "apollo": curvax.scale_by_apollo(rank=2),
}


@pytest.mark.parametrize("name", cells(OF_ZEROS, of=3))
def test_zeros_have_a_derivative(name: str) -> None:
    """In reverse mode; and the matrix beside them has that which it has beside itself."""
    direction = OF_ZEROS[name]
    g = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32).at[1].set(0)

    @jax.jit
    def back(g: Any) -> Any:
        state = direction.init(g)
        found, pull = jax.vjp(lambda g: direction.update(g, state)[0], g)
        return pull(jnp.tanh(found) + 1)[0]

    derivative = back(g)
    assert jnp.isfinite(derivative).all()
    beside_itself = back(g.at[1].set(g[0]))
    np.testing.assert_allclose(derivative[0], beside_itself[0], rtol=1e-4, atol=1e-4)


def test_other_parameters_without_a_gradient_have_a_derivative_of_zero() -> None:
    optimizer = curvax.muon(0.1)
    zeros = {"kernel": jnp.zeros((3, 3)), "bias": jnp.zeros(3)}
    state = optimizer.init(zeros)
    biases = lambda g: jnp.sum(optimizer.update(g, state, zeros)[0]["bias"])  # noqa: E731
    found = jax.jit(jax.grad(biases))(zeros)
    assert jnp.isfinite(found["bias"]).all()


def test_a_length_of_zero_has_a_derivative_in_the_next_step() -> None:
    clip = curvax.clip_by_last_norm(1.0)

    def loss(g: Any) -> Any:
        _, state = clip.update(g, clip.init(g))
        return jnp.sum(clip.update(g + 1, state)[0])

    assert (jax.jit(jax.grad(loss))(jnp.zeros(1)) == 1).all()


def test_eigenbases_without_a_limit_have_derivatives_in_reverse_mode() -> None:
    direction = curvax.in_eigenbasis(
        curvax.moment_ratio(eps=1e-8), refresh=curvax.every(10), method="qr", side="left"
    )
    g, along = (jnp.asarray(np.random.default_rng(s).normal(size=(3, 3))) for s in range(2))
    state = direction.init(g)
    loss = lambda g: jnp.sum(jnp.tanh(direction.update(g, state)[0]))  # noqa: E731
    both = jax.jit(lambda g: (jax.jvp(loss, (g,), (along,))[1], jnp.vdot(jax.grad(loss)(g), along)))
    expected, found = both(g)
    assert expected != 0
    np.testing.assert_allclose(found, expected, rtol=1e-3)
