"""A layer-wise step gives the parameters and the state of an ordinary one, for every method."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cases import in_turns
from tests.helpers import assert_close, normal_like
from tests.registry import NAMED, Row
from tests.shared.donation import not_in_place

LAYERS, STEPS = 3, 30
AXES = {"*kernel": curvax.MatrixAxes(rows=1, columns=2), "*bias": None}
SPECIFIED: dict[str, Any] = {"weight_dimension_numbers": AXES}


def block(layer: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ layer["up"]["kernel"] + layer["up"]["bias"][None])
    return x + hidden @ layer["down"]["kernel"]


def stacked_layers(dtype: str = "float32") -> Any:
    shapes = {"up": {"kernel": (4, 6), "bias": (6,)}, "down": {"kernel": (6, 4)}}
    zeros = jax.tree.map(
        lambda shape: np.zeros((LAYERS, *shape), jnp.dtype(dtype)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return jax.tree.map(lambda p: 0.5 * p, normal_like(jax.random.key(0), zeros))


def inputs() -> list[jax.Array]:
    """The input of each step, which is also the target of its output."""
    keys = jax.random.split(jax.random.key(1), STEPS)
    return [jax.random.normal(key, (8, 4)) for key in keys]


def loss(x: Any) -> Any:
    return jnp.mean(jnp.cumsum(x**2, axis=0))


def ordinary(optimizer: Any, layers: Any, state: Any, x: Any) -> Any:
    def total(layers: Any, x: Any) -> Any:
        return loss(jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)[0])

    gradient, dx = jax.grad(total, (0, 1))(layers, x)
    updates, state = optimizer.update(gradient, state, layers)
    return optax.apply_updates(layers, updates), state, dx


def during(optimizer: Any, layers: Any, state: Any, x: Any) -> Any:
    output, backward = curvax.layerwise(block, optimizer, layers, state, x)
    return backward(jax.grad(loss)(output))


def steps_of(step: Any, optimizer: Any, layers: Any = None) -> Any:
    """Layers and state after all steps, and the gradients of the inputs."""
    layers = stacked_layers() if layers is None else layers
    state, step = optimizer.init(layers), jax.jit(functools.partial(step, optimizer))
    gradients = []
    for x in inputs():
        layers, state, dx = step(layers, state, x)
        gradients.append(dx)
    return layers, state, gradients


@in_turns(0, of=2)
def test_equals_the_ordinary_step(row: Row) -> None:
    """Parameters, states and gradients of the input, with AdamW for the biases."""
    optimizer = row.make(0.01, weight_dimension_numbers=AXES, weight_decay=0.1)
    expected, found = steps_of(ordinary, optimizer), steps_of(during, optimizer)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close([found[0], found[2]], [expected[0], expected[2]], row.growth)
    counters = lambda tree: [x for x in jax.tree.leaves(tree) if x.dtype == jnp.int32]  # noqa: E731
    assert_close(counters(found[1]), counters(expected[1]), factor=0)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found[0], stacked_layers())
    assert min(jax.tree.leaves(moved)) > 1e-3


OTHERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(0.01),
    "schedule": lambda: curvax.racs(optax.linear_schedule(0.1, 0.0, 3), **SPECIFIED),
    "injected": lambda: curvax.inject_hyperparams(curvax.racs)(0.01, **SPECIFIED),
    "accumulation": lambda: optax.MultiSteps(curvax.muon(0.01, **SPECIFIED), 2),
    "4-bit factors": lambda: curvax.shampoo(
        0.01, refresh=2, statistics_every=1, storage=curvax.cholesky(min_elements=1), **SPECIFIED
    ),
    "coded moments": lambda: curvax.quantize_state(
        curvax.muon(0.01, **SPECIFIED), where=lambda place, leaf: leaf.ndim > 2
    ),
    "no stacks": lambda: curvax.muon(0.01, matrices=curvax.MatrixRule(stack=False), **SPECIFIED),
    "clipping": lambda: optax.chain(curvax.clip_by_last_norm(0.5), optax.sgd(0.1)),
    "clipping around coded moments": lambda: optax.chain(
        curvax.clip_by_last_norm(0.5),
        curvax.quantize_state(
            curvax.muon(0.01, **SPECIFIED), where=lambda place, leaf: leaf.ndim > 2
        ),
    ),
    "staggered refreshes": lambda: curvax.soap(
        0.01, refresh=curvax.every(3, stagger=True), **SPECIFIED
    ),
    "staggered bases": lambda: curvax.galore(
        0.01, rank=2, refresh=curvax.every(3, stagger=True), **SPECIFIED
    ),
    "blocks": lambda: curvax.soap(0.01, matrices=curvax.MatrixRule(block_size=3), **SPECIFIED),
}


@pytest.mark.parametrize("name", OTHERS)
def test_equals_the_ordinary_step_around_and_inside_a_method(name: str) -> None:
    optimizer = OTHERS[name]()
    expected, found = steps_of(ordinary, optimizer), steps_of(during, optimizer)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close([found[0], found[2]], [expected[0], expected[2]], 512.0)


@pytest.mark.parametrize("name", ["racs", "alice"])
def test_equals_the_ordinary_step_as_other_platforms_compile_it(name: str, monkeypatch) -> None:
    """TPUs and GPUs have no loop of one round; they order the writes instead."""
    optimizer = NAMED[name].make(0.01, weight_dimension_numbers=AXES)
    expected = steps_of(ordinary, optimizer)
    chosen = jax.lax.platform_dependent

    def other(*args: Any, default: Any, **others: Any) -> Any:
        return default(*args) if "cpu" in others else chosen(*args, default=default, **others)

    monkeypatch.setattr(jax.lax, "platform_dependent", other)
    assert_close(steps_of(during, optimizer)[0], expected[0], NAMED[name].growth)


def test_bfloat16_layers_stay_bfloat16() -> None:
    optimizer = curvax.racs(0.1, **SPECIFIED)
    layers, _, _ = steps_of(during, optimizer, stacked_layers("bfloat16"))
    expected, _, _ = steps_of(ordinary, optimizer, stacked_layers("bfloat16"))
    assert_close(layers, expected, 16.0)


def test_a_single_layer() -> None:
    layers = jax.tree.map(lambda p: p[:1], stacked_layers())
    optimizer = curvax.soap(0.01, **SPECIFIED)
    expected, found = (steps_of(step, optimizer, layers) for step in (ordinary, during))
    assert_close(found[0], expected[0], NAMED["soap"].growth)


def test_inputs_of_each_layer_and_integers_that_pass_through() -> None:
    """Random keys and positions reach the block; only floating inputs have gradients."""
    layers, x = stacked_layers(), inputs()[0]
    optimizer = optax.sgd(0.1)
    state, start = optimizer.init(layers), {"x": x, "positions": jnp.arange(8)}
    keys = jax.random.split(jax.random.key(0), LAYERS)

    def noisy(layer: Any, inside: Any, key: Any) -> Any:
        x = block(layer, inside["x"]) + 0.1 * jax.random.normal(key, inside["x"].shape)
        return {**inside, "x": x * jnp.cos(inside["positions"])[:, None]}

    def total(layers: Any, x: Any) -> Any:
        step = lambda x, given: (noisy(given[0], x, given[1]), None)  # noqa: E731
        return loss(jax.lax.scan(step, {**start, "x": x}, (layers, keys))[0]["x"])

    gradient, dx = jax.grad(total, (0, 1))(layers, x)
    output, backward = curvax.layerwise(noisy, optimizer, layers, state, start, xs=keys)
    updated, _, found = backward({**output, "x": jax.grad(loss)(output["x"])})
    assert_close(updated, jax.tree.map(lambda p, g: p - 0.1 * g, layers, gradient))
    assert_close(found["x"], dx)


def test_a_layer_whose_gradient_is_not_finite_stands_still() -> None:
    """As the guard of an ordinary step leaves the matrices of one layer."""
    layers = stacked_layers()
    optimizer = curvax.muon(0.1, **SPECIFIED)

    def hostile(layer: Any, x: Any, bad: Any) -> Any:
        x = block(layer, x)
        return jax.lax.cond(bad, lambda x: x + jnp.sqrt(0 * x), lambda x: x, x)

    bad = jnp.array([False, True, False])  # and NaN for the layers below
    state = optimizer.init(layers)
    _, backward = curvax.layerwise(hostile, optimizer, layers, state, inputs()[0], xs=bad)
    updated, state, _ = backward(jnp.ones((8, 4)))
    change = jnp.abs(updated["up"]["kernel"] - layers["up"]["kernel"]).max(axis=(1, 2))
    assert change[0] == change[1] == 0 < change[2]
    skipped = curvax.state_of(optimizer, layers, state, "up/kernel")
    assert any(np.array_equal(x, [1, 1, 0]) for x in skipped.values())


# What cannot be done is refused.


MIXED = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), curvax.muon(0.1, **SPECIFIED)),
    "clip behind": lambda: optax.chain(
        curvax.racs(0.1, **SPECIFIED), optax.clip_by_global_norm(1.0)
    ),
    "trust ratio": lambda: optax.lamb(0.1),
    "block norm": lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.adam(0.1)),
    "a state of all gradients": lambda: optax.contrib.prodigy(0.1),
}


@pytest.mark.parametrize("name", MIXED)
def test_norms_over_layers_are_refused(name: str) -> None:
    optimizer, layers = MIXED[name](), stacked_layers()
    with pytest.raises(ValueError, match="optimizer: its updates depend on a number computed from"):
        curvax.layerwise(block, optimizer, layers, optimizer.init(layers), inputs()[0])


def test_a_number_of_the_state_that_all_gradients_determine_is_refused() -> None:
    """Unless its class says how those of the layers combine: nothing uses it in this step."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, optax.tree.norm(updates)

    optimizer = optax.GradientTransformation(lambda params: jnp.zeros([]), update)
    with pytest.raises(ValueError, match="a number computed from all gradients"):
        curvax.layerwise(block, optimizer, stacked_layers(), jnp.zeros([]), inputs()[0])


def test_states_that_are_not_cut_by_layer_are_refused() -> None:
    layers = stacked_layers()
    merged = curvax.muon(0.1, weight_dimension_numbers={"*kernel": curvax.MatrixAxes((0, 1), 2)})
    divided = curvax.muon(0.1, mesh=jax.make_mesh((4,), ("x",)), **SPECIFIED)
    for optimizer, message in ((merged, "cannot be cut by layer"), (divided, "mesh=")):
        with pytest.raises(ValueError, match=message):
            curvax.layerwise(block, optimizer, layers, optimizer.init(layers), inputs()[0])
    uneven = {**layers, "scale": jnp.ones(2)}
    with pytest.raises(ValueError, match="'scale'|there are 2 layers"):
        curvax.layerwise(block, optax.sgd(0.1), uneven, None, inputs()[0])
    with pytest.raises(ValueError, match="at least one parameter"):
        curvax.layerwise(block, optax.sgd(0.1), {}, None, inputs()[0])


def test_what_does_not_fit_is_named() -> None:
    layers, x = stacked_layers(), inputs()[0]
    optimizer = curvax.racs(0.1, **SPECIFIED)
    one = jax.tree.map(lambda p: p[:1], layers)
    for other in (optax.adamw(0.1).init(layers), optimizer.init(one)):
        with pytest.raises(ValueError, match="state has .* for these layers"):
            curvax.layerwise(block, optimizer, layers, other, x)[1](x)
    state = optimizer.init(layers)
    with pytest.raises(ValueError, match=r"block: a layer gets float32.*stacked=False"):
        curvax.layerwise(lambda layer, x: block(layer, x)[:1], optimizer, layers, state, x)
    with pytest.raises(ValueError, match=r"block: a layer gets .* returns \(.*stacked=False"):
        curvax.layerwise(lambda layer, x: (x, x), optimizer, layers, state, x)
    with pytest.raises(ValueError, match=r"xs: the first axis .* 'keys' has shape \(1, 2\)"):
        xs = {"keys": jnp.zeros((1, 2))}
        curvax.layerwise(lambda layer, x, _: block(layer, x), optimizer, layers, state, x, xs)


# Memory.


def test_updates_in_place_and_holds_the_gradient_of_one_layer() -> None:
    """Parameters and states are donated whole; temporaries do not grow with the gradients."""
    width, number = 64, 40
    layers = {"kernel": jax.ShapeDtypeStruct((number, width, width), jnp.float32)}
    axes = {"kernel": curvax.MatrixAxes(rows=1, columns=2)}
    optimizer = curvax.muon(0.1, weight_dimension_numbers=axes)
    square = lambda layer, x: x + jnp.tanh(x @ layer["kernel"])  # noqa: E731
    state = jax.eval_shape(optimizer.init, layers)

    def step(layers: Any, state: Any, x: Any) -> Any:
        output, backward = curvax.layerwise(square, optimizer, layers, state, x)
        return backward(2 * output)

    def compiled_for(*donated: int) -> Any:
        return jax.jit(step, donate_argnums=donated).lower(layers, state, x).compile()

    x = jax.ShapeDtypeStruct((4, width), jnp.float32)
    compiled = compiled_for(0, 1)
    assert not_in_place(compiled, layers, state) == []
    copied = not_in_place(compiled_for(0), layers, state)  # only the kernels are donated
    assert len(copied) == len(jax.tree.leaves(state))
    assert all(name.startswith("[1]") for name in copied)
    memory = compiled.memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((layers, state))]
    assert memory.alias_size_in_bytes >= sum(sizes)
    gradients = number * width * width * 4
    assert memory.temp_size_in_bytes < gradients / 2
