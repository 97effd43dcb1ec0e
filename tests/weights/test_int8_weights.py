"""Weights in 8 bits: what they decode to, what they learn, and the steps that they run in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, normal, trained
from tests.layerwise.test_layerwise import SPECIFIED, inputs, stacked_layers, steps_of
from tests.shared.meshes import both_axis_types, mesh_of

SGD = curvax.int8_weights(optax.sgd(1.0))  # whose steps are compiled once for all tests
SHAPES = {
    "up": {"kernel": (3, 24, 40), "bias": (40,)},
    "odd": {"kernel": (3, 17, 5)},
    "embed": {"embedding": (32, 16)},
}


def drawn(dtype: Any = jnp.float32) -> Any:
    return normal(jax.random.key(0), SHAPES, dtype)


def gap_of(weights: Any) -> np.ndarray:
    """The distance of two codes in each row of a coded matrix `(…, m, n)`."""
    return 2 * np.asarray(weights.scales, np.float64) / 255


def values_of(weights: Any) -> np.ndarray:
    """What a coded matrix stands for, not rounded to the dtype of its scales."""
    return gap_of(weights) * (2 * np.asarray(weights.codes, np.float64) - 255) / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_decoded(dtype: Any) -> None:
    params = drawn(dtype)
    weights = curvax.to_int8(params)
    kernel = weights["up"]["kernel"]
    assert kernel.codes.shape == (3, 24, 40) and kernel.codes.dtype == jnp.uint8
    assert kernel.scales.shape == (3, 24, 1) and kernel.scales.dtype == dtype
    for place in (("up", "bias"), ("embed", "embedding")):
        assert weights[place[0]][place[1]] is params[place[0]][place[1]]
    decoded = curvax.from_int8(weights)
    assert jax.tree.map(jnp.shape, decoded) == jax.tree.map(jnp.shape, params)
    assert jax.tree.map(jnp.result_type, decoded) == jax.tree.map(jnp.result_type, params)
    for name in ("up", "odd"):
        given, found = (np.asarray(x[name]["kernel"], np.float64) for x in (params, decoded))
        rounding = 2.0**-8 * np.abs(given) * (dtype == jnp.bfloat16)
        assert np.all(np.abs(given - found) <= 0.501 * gap_of(weights[name]["kernel"]) + rounding)
    largest = float(jnp.max(jnp.abs(params["up"]["kernel"][0, 0])))
    assert largest <= float(kernel.scales[0, 0, 0]) <= 1.13 * largest


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [1e-37, 1e-36, 1e30, 1e38, 3e38])
def test_the_ends_of_the_range_decode(size: float, dtype: Any) -> None:
    x = {"kernel": jnp.asarray(np.linspace(-size, size, 12).reshape(2, 6), dtype)}
    weights = curvax.to_int8(x)
    found, given = (np.asarray(t["kernel"], np.float64) for t in (curvax.from_int8(weights), x))
    # A gap, not a half: near the smallest numbers, products are flushed to zero.
    assert np.all(np.abs(found - given) <= gap_of(weights["kernel"]) + 2.0**-8 * size)
    updates, _ = SGD.update({"kernel": 0.1 * given}, SGD.init(weights), weights)
    moved = np.asarray(curvax.from_int8(optax.apply_updates(weights, updates))["kernel"])
    error = np.abs(moved.astype(np.float64) - 0.9 * found)
    assert np.all(error <= 1.1 * gap_of(weights["kernel"]) + 2.0**-8 * size)


def test_what_is_not_finite_does_not_go_into_int8() -> None:
    for bad, size in ((jnp.inf, 4), (jnp.nan, 2048)):  # XLA's max leaves NaN out of 4096 entries
        x = {"up": {"kernel": jnp.ones((3, size)).at[1, 2].set(bad)}}
        with pytest.raises(ValueError, match="'up/kernel' must be finite.*1 of its rows"):
            curvax.to_int8(x)
        found = curvax.from_int8(jax.jit(curvax.to_int8)(x))["up"]["kernel"]
        assert np.isnan(found[1]).all() and np.allclose(found[0], 1, atol=0.01)


def test_small_updates_add_up() -> None:
    """A hundred updates of less than a gap, of many sizes, move a weight by their sum."""
    weights = curvax.to_int8({"kernel": drawn()["up"]["kernel"]})
    gap = gap_of(weights["kernel"])
    shape = weights["kernel"].codes.shape
    change = gap * np.linspace(-0.003, 0.003, np.prod(shape)).reshape(shape)
    steps = 100
    found, _ = trained(SGD, weights, [{"kernel": -change}] * steps)
    before, after = (values_of(x["kernel"]) for x in (weights, found))
    error = (after - before - steps * change) / gap
    assert np.max(np.abs(error)) < 2.5
    assert abs(np.mean(error)) < 0.02
    # Rounding to the nearest would leave all of them where they are.
    assert np.sqrt(np.mean(error**2)) < 0.6


def test_a_zero_update_changes_nothing() -> None:
    weights = curvax.to_int8(drawn(jnp.bfloat16))
    zero = jax.tree.map(jnp.zeros_like, curvax.from_int8(weights))
    found, _ = trained(SGD, weights, [zero] * 50)
    assert_close(found, weights, factor=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scales_follow_the_weights(dtype: Any) -> None:
    params = {"kernel": drawn(dtype)["up"]["kernel"]}
    weights = curvax.to_int8(params)
    for factor in (40.0, 1 / 300.0):
        old = values_of(weights["kernel"])
        gradient = [{"kernel": jnp.asarray((1 - factor) * old, jnp.float32)}]
        weights, _ = trained(SGD, weights, gradient)
        error = np.abs(values_of(weights["kernel"]) - factor * old) / gap_of(weights["kernel"])
        assert np.max(error) < 1.01  # of a code, as dither rounds it
        assert np.max(gap_of(weights["kernel"])) < 1.2 * 2 * np.abs(factor * old).max() / 255


def test_a_matrix_with_an_update_that_is_not_finite_stands_still() -> None:
    weights = curvax.to_int8(drawn())
    gradient = jax.tree.map(jnp.ones_like, curvax.from_int8(weights))
    bad = gradient["up"]["kernel"].at[1, 2, 3].set(jnp.nan)
    gradient["up"]["kernel"] = bad
    found, _ = trained(curvax.int8_weights(optax.sgd(0.1)), weights, [gradient])
    before, after = weights["up"]["kernel"], found["up"]["kernel"]
    np.testing.assert_array_equal(before.codes[1], after.codes[1])
    np.testing.assert_array_equal(before.scales[1], after.scales[1])
    assert not np.array_equal(before.codes[0], after.codes[0])
    assert np.isfinite(curvax.from_int8(found)["up"]["kernel"]).all()


def test_other_parameters_are_as_without() -> None:
    params, inner = drawn(), optax.adamw(0.1)
    gradients = gradients_like(params, 3)
    found, _ = trained(curvax.int8_weights(inner), curvax.to_int8(params), gradients)
    plain, _ = trained(inner, params, gradients)
    for name, leaf in (("up", "bias"), ("embed", "embedding")):
        np.testing.assert_array_equal(found[name][leaf], plain[name][leaf])


def test_the_inner_optimizer_sees_matrices() -> None:
    """A method finds the same matrices by name and shape as without codes."""
    params = {"up": {"kernel": drawn()["up"]["kernel"][0]}}
    weights, gradients = curvax.to_int8(params), gradients_like(params, 4)
    found, state = trained(curvax.int8_weights(curvax.muon(0.01)), weights, gradients)
    plain, own = trained(curvax.muon(0.01), curvax.from_int8(weights), gradients)
    # Four sums that are rounded down or up, by less than a gap each.
    error = np.abs(np.asarray(curvax.from_int8(found)["up"]["kernel"] - plain["up"]["kernel"]))
    assert np.max(error / gap_of(found["up"]["kernel"])) < 4
    assert jax.tree.structure(state.inner) == jax.tree.structure(own)
    assert state.count == 4


@pytest.mark.parametrize("name", cells(["adamw", "racs"], of=2))
def test_layerwise_equals_the_ordinary_step(name: str) -> None:
    inner = {"racs": curvax.racs(0.05, **SPECIFIED), "adamw": optax.adamw(0.01)}[name]
    layers, optimizer, found = curvax.to_int8(stacked_layers()), curvax.int8_weights(inner), []
    for step in map(jax.jit, steps_of(optimizer)):
        params, state = layers, optimizer.init(layers)
        for x in inputs()[:5]:
            params, state, _ = step(params, state, x)
        found.append((params, state))
    (params, state), (other, other_state) = found
    assert jax.tree.structure(state) == jax.tree.structure(other_state)
    for name in ("up", "down"):
        a, b, start = (tree[name]["kernel"].codes.astype(int) for tree in (params, other, layers))
        # Rounding errors of a gradient take some entries past a threshold.
        assert np.mean(a != b) < 0.01 and np.max(np.abs(a - b)) <= 1
        assert np.mean(a != start) > 0.2


@both_axis_types
def test_a_mesh_changes_no_bit(kind: str) -> None:
    weights, inner = curvax.to_int8({"kernel": drawn()["up"]["kernel"]}), optax.sgd(0.01)
    gradients = gradients_like(curvax.from_int8(weights), 3)
    optimizer = curvax.int8_weights(inner)
    plain, _ = trained(optimizer, weights, gradients)
    sharding = jax.sharding.NamedSharding(mesh_of(kind, 2), jax.sharding.PartitionSpec(None, "x"))
    found, _ = trained(optimizer, *(jax.device_put(x, sharding) for x in (weights, gradients)))
    assert_close(found, plain, factor=0)
