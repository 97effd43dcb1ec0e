"""Optimizers of weights in bfloat16: what they add up to, and every way to run them."""

from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.contract import PLAIN, compiled, small_tree
from tests.helpers import gradients_like, run, trained
from tests.hlo import collectives
from tests.registry import Row
from tests.shared.meshes import explicit_by_default, mesh_of

WRAPPERS = {
    "stochastic": curvax.stochastic_rounding,
    "kahan": curvax.kahan_summation,
    "masters": curvax.master_weights,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
some_wrappers = pytest.mark.parametrize("wrap", cells(WRAPPERS.values(), of=2))


def as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), tree)


def rounded(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), tree)


def assert_same(actual: Any, desired: Any) -> None:
    """Bit for bit, with equal dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


LEFT = {"stochastic": 0.03, "kahan": 0.005, "masters": 0.002}


@pytest.mark.parametrize(("name", "error"), LEFT.items())
def test_small_updates_add_up(name, error):
    """1000 updates of 1/40 of a unit; rounded to the nearest, none arrives."""
    params = {"kernel": jnp.ones((32, 32), jnp.bfloat16)}
    gradient = {"kernel": np.full((32, 32), -(2.0**-7) / 40, np.float32)}
    total = 1000 * 2.0**-7 / 40

    def after(optimizer: Any) -> np.ndarray:
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = params, optimizer.init(params)
        (found, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=1000))(start)
        return np.asarray(found["kernel"]).astype(np.float64) - 1

    assert (after(optax.sgd(1.0)) == 0).all()
    moved = after(WRAPPERS[name](optax.sgd(1.0)))
    assert abs(moved.mean() - total) < error * total + (2.0**-8 if name != "stochastic" else 0)


def test_a_parameter_that_was_changed_replaces_its_master():
    params = {"kernel": jnp.ones((4, 4), jnp.bfloat16)}
    optimizer = curvax.master_weights(optax.sgd(0.0))
    state = optimizer.init(params)
    params["kernel"] = params["kernel"].at[0].set(3.0)
    updates, state = optimizer.update(params, state, params)
    assert_same(optax.apply_updates(params, updates), params)
    assert_same(state.masters, as_float32(params))


def test_a_compensation_is_what_rounding_took():
    params = {"bias": jnp.linspace(0.5, 2.0, 64).astype(jnp.bfloat16)}
    gradients = gradients_like(params, 3, dtype=jnp.float32)
    optimizer = curvax.kahan_summation(optax.sgd(1e-3))
    exact = np.asarray(params["bias"], np.float64)
    exact = exact - sum(np.asarray(g["bias"], np.float64) * 1e-3 for g in gradients)
    found, state = trained(optimizer, params, gradients)
    together = np.asarray(found["bias"], np.float64) + np.asarray(
        state.compensation["bias"], np.float64
    )
    assert state.compensation["bias"].dtype == jnp.bfloat16
    assert np.abs(together - exact).max() < 3 * 2.0**-17
    assert np.abs(np.asarray(found["bias"], np.float64) - exact).max() > 2.0**-11


@pytest.mark.parametrize("row", cells(PLAIN, of=5))
def test_every_method_rounds_its_own_step_in_float32(row: Row):
    """Two steps: to one of the two neighbors of the sum; for Kahan and masters to the nearest.

    Parameters in float32 beside them are as without a wrapper, bit for bit.
    """
    inner, (gradients, params) = compiled(row), narrow_head(small_tree())
    for name, wrap in WRAPPERS.items():
        optimizer, p, wide = wrap(inner), params, as_float32(params)
        state, plain = optimizer.init(p), inner.init(wide)
        for gradient in gradients:
            updates, plain = inner.update(as_float32(gradient), plain, wide)
            total = as_float32(optax.apply_updates(wide, updates))
            changes, state = optimizer.update(gradient, state, p)
            p = optax.apply_updates(p, changes)
            assert jax.tree.map(jnp.result_type, p) == jax.tree.map(jnp.result_type, params)
            assert_same(p["dense"], total["dense"])
            if name == "stochastic":
                assert_neighbors(as_float32(p)["head"]["kernel"], total["head"]["kernel"])
            else:
                assert_same(p["head"], rounded(total["head"]))
            wide = total if name == "masters" else as_float32(p)
            if name == "kahan":
                break  # later sums have a compensation
        assert_same(state.inner, plain)
        if name == "masters":
            assert_same(state.masters["head"], wide["head"])  # those of the run in float32


def narrow_head(params: Any) -> tuple[Any, Any]:
    """Two gradients and parameters, of which the head's are in bfloat16."""
    gradients = gradients_like(params, 2)
    narrow = [{**tree, "head": rounded(tree["head"])} for tree in (*gradients, params)]
    return narrow[:2], narrow[2]


def assert_neighbors(found: np.ndarray, total: np.ndarray) -> None:
    """Whether numbers of bfloat16 are the next below or above `total`, float32."""
    low = (total.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = ((low.view(np.uint32)) + np.uint32(0x10000)).view(np.float32)
    assert ((found == low) | ((found == high) & (low != total))).all()


def test_seeds_steps_paths_and_rows_have_bits_of_their_own():
    params = {name: jnp.ones((16, 16), jnp.bfloat16) for name in "ab"}
    params["c"] = jnp.ones(256, jnp.bfloat16)
    gradient = jax.tree.map(lambda p: jnp.full(p.shape, -(2.0**-8)), params)

    def two_steps(seed: int) -> list[np.ndarray]:
        optimizer = curvax.stochastic_rounding(optax.sgd(1.0), seed=seed)
        updates, _ = run(optimizer, [gradient] * 2, params)
        return [np.reshape(u[name], (16, 16)) > 0 for u in updates for name in "abc"]

    drawn = two_steps(0) + two_steps(1)
    drawn += [drawn[0].T, np.roll(drawn[0], 1, 0), np.roll(drawn[0], 1, 1)]
    for i, x in enumerate(drawn):
        assert 0.3 < x.mean() < 0.7
        assert all(0.3 < (x == y).mean() < 0.7 for y in drawn[:i])


@explicit_by_default
@pytest.mark.parametrize("spec", cells([P("x"), P(None, "x")], of=2), ids=str)
@some_wrappers
def test_a_mesh_changes_no_bit_and_nothing_travels_on_it(wrap, spec, kind):
    params = {"kernel": jnp.ones((8, 8), jnp.bfloat16), "layers": jnp.ones((4, 8, 4), jnp.bfloat16)}
    gradients = gradients_like(params, 2, dtype=jnp.float32)
    optimizer = wrap(optax.sgd(1e-3))
    plain, _ = trained(optimizer, params, gradients)
    mesh = mesh_of(kind)
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    with jax.set_mesh(mesh):
        found, _ = trained(optimizer, put(params), [put(g) for g in gradients])
        step = jax.jit(optimizer.update).lower(put(gradients[0]), optimizer.init(found), found)
    assert_same(found, plain)
    assert all(not x.sharding.is_fully_replicated for x in jax.tree.leaves(found))
    assert not collectives(step.compile().as_text())


@some_wrappers
def test_a_layer_that_is_cut_out_is_rounded_as_in_the_stack(wrap):
    """A step of one layer, with its part of the state, is its part of the step of all."""
    number = 3
    shapes = {"kernel": (number, 4, 6), "scale": (number, 6), "gates": (number,)}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    (gradient,) = gradients_like(params, 1, dtype=jnp.float32)
    optimizer = wrap(optax.sgd(3e-3))
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    whole, _ = update(gradient, state, params)
    one = jax.eval_shape(optimizer.init, jax.tree.map(lambda p: p[:1], params))

    def cut(tree: Any, layer: int) -> Any:
        return jax.tree.map(lambda x: np.asarray(x)[layer : layer + 1], tree)

    for layer in range(number):
        own = jax.tree.map(lambda x, y, i=layer: x if x.shape == y.shape else cut(x, i), state, one)
        assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, one)
        found, _ = update(cut(gradient, layer), own, cut(params, layer))
        assert_same(found, cut(whole, layer))


@some_wrappers
def test_states_are_described_checked_placed_and_saved(wrap):
    params = jax.tree.map(jnp.asarray, rounded(small_tree()))
    mesh = mesh_of("auto")
    for optimizer in (wrap(curvax.muon(0.02)), wrap(curvax.muon(0.02, mesh=mesh))):
        state = jax.jit(optimizer.init)(params)
        description = curvax.describe_state(optimizer, params)
        curvax.check_state(optimizer, params, description)
        portable = curvax.portable_state(optimizer, params, state)
        assert_same(curvax.place_state(optimizer, params, portable), state)
        saved = flax.serialization.to_bytes(portable)
        assert_same(flax.serialization.from_bytes(portable, saved), portable)
        assert curvax.state_of(optimizer, params, state, "dense/kernel")
        assert "dense/kernel" in curvax.report(optimizer, params, state)
        doubled = optax.tree.map_params(optimizer, lambda x: x, state)
        shardings = curvax.state_sharding(optimizer, params, mesh)
        assert len({jax.tree.structure(x) for x in (state, doubled, shardings)}) == 1


def test_bytes_of_the_states():
    params = {"kernel": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
    inner = optax.sgd(0.1)
    size = {name: curvax.state_bytes(wrap(inner), params) for name, wrap in WRAPPERS.items()}
    assert size == {"stochastic": 4 + 8 + 4 * 64, "kahan": 2 * 64 * 32, "masters": 4 * 64 * 32}


INSIDE = {
    "finite": lambda inner: optax.apply_if_finite(inner, 5),
    "spikes": lambda inner: curvax.skip_spikes(inner, warmup_steps=1),
    "accumulation": lambda inner: optax.MultiSteps(inner, 2),
}


@pytest.mark.parametrize("inside", cells(INSIDE, of=2))
@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), curvax.int8_weights])
def test_what_skips_or_accumulates_goes_inside(wrap, inside):
    """The second gradient is skipped, or waits: the weights stay as they are, and then move."""
    params = {"kernel": jnp.full((4, 6), 0.75, jnp.bfloat16)}
    params = curvax.to_int8(params) if wrap is curvax.int8_weights else params
    optimizer = wrap(INSIDE[inside](optax.sgd(0.5)))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    bad = {"finite": jnp.nan, "spikes": 100.0, "accumulation": 1.0}[inside]
    second = 2 if inside == "accumulation" else 1
    seen = [params]
    for size in (1.0,) * second + (bad, 1.0):
        gradient = {"kernel": jnp.full((4, 6), size, jnp.bfloat16)}
        updates, state = update(gradient, state, seen[-1])
        seen.append(optax.apply_updates(seen[-1], updates))
    assert_same(seen[-2], seen[-3])
    moved = [np.asarray(curvax.from_int8(p)["kernel"], float).mean() for p in seen]
    np.testing.assert_allclose(np.diff([moved[0], moved[-3], moved[-1]]), -0.5, rtol=0.05)


@every_wrapper
def test_trees_with_holes_without_leaves_and_of_scalars(wrap):
    optimizer = wrap(optax.sgd(1.0))
    for params in (
        {},
        {"a": None, "b": jnp.ones(3, jnp.bfloat16), "c": optax.MaskedNode()},
        {"a": jnp.ones((), jnp.bfloat16), "b": 1.0, "c": np.ones(2)},
    ):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert not any(jax.tree.leaves(jax.tree.map(np.any, optax.apply_updates(params, updates))))
