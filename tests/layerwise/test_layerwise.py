"""A layer-wise step gives the parameters and the state of an ordinary one, for every method."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, normal, normal_like
from tests.registry import NAMED, REGISTRY, Row
from tests.shared.programs import temporaries
from tests.shared.wrong_calls import assert_refused, wrong_calls

LAYERS, STEPS = 3, 30
AXES = {"*kernel": curvax.MatrixAxes(rows=1, columns=2), "*bias": None}
SPECIFIED: dict[str, Any] = {"weight_dimension_numbers": AXES}
ADAM = optax.adam(0.1)


def block(layer: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ layer["up"]["kernel"] + layer["up"]["bias"][None])
    return x + hidden @ layer["down"]["kernel"]


@functools.cache
def stacked_layers(dtype: str = "float32") -> Any:
    up = {"kernel": (LAYERS, 4, 6), "bias": (LAYERS, 6)}
    drawn = normal(jax.random.key(0), {"up": up, "down": {"kernel": (LAYERS, 6, 4)}}, dtype)
    return jax.tree.map(lambda p: 0.5 * p, drawn)


@functools.cache
def inputs() -> list[jax.Array]:
    """The input of each step, which is also the target of its output."""
    keys = jax.random.split(jax.random.key(1), STEPS)
    return [jax.random.normal(key, (8, 4)) for key in keys]


def loss(x: Any) -> Any:
    return jnp.mean(jnp.cumsum(x**2, axis=0))


def scanned(block: Any, layers: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)[0]


def steps_of(
    optimizer: Any, block: Any = block, loss: Any = loss, whole: Any = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An ordinary step, and one during the backward pass: layers, state, gradient of the input."""
    model = whole or functools.partial(scanned, block)

    def ordinary(layers: Any, state: Any, x: Any) -> Any:
        total = lambda layers, x: loss(model(layers, x))  # noqa: E731
        gradient, dx = jax.grad(total, (0, 1))(curvax.from_int8(layers), x)
        updates, state = optimizer.update(gradient, state, layers)
        return optax.apply_updates(layers, updates), state, dx

    def during(layers: Any, state: Any, x: Any) -> Any:
        output, backward = curvax.layerwise(block, optimizer, layers, state, x)
        return backward(jax.grad(loss)(output))

    return ordinary, during


def trained(steps: Any, layers: Any, state: Any, xs: Any) -> tuple[Any, Any]:
    """Layers, state and what else a step returns, after all steps of two kinds.

    States have the same form and the same counts.
    """
    found: list[Any] = []
    for step in map(jax.jit, steps):
        own, its_state, others = layers, state, []
        for x in xs:
            own, its_state, other = step(own, its_state, x)
            others.append(other)
        found.append((own, its_state, others))
    expected, actual = found
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    counts = ([x for x in jax.tree.leaves(s) if x.dtype == jnp.int32] for _, s, _ in found)
    assert_close(*counts, factor=0)
    return expected, actual


def assert_same_steps(
    optimizer: Any, factor: float, layers: Any = None, xs: Any = None, steps: Any = None
) -> None:
    """Of `steps_of`: parameters and gradients of the input are close, and all parameters move."""
    layers = stacked_layers() if layers is None else layers
    steps, state = steps or steps_of(optimizer), optimizer.init(layers)
    expected, found = trained(steps, layers, state, xs or inputs())
    assert_close(found[::2], expected[::2], factor)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found[0], layers)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_equals_the_ordinary_step(row: Row) -> None:
    """With AdamW for the biases."""
    optimizer = row.make(0.01, weight_dimension_numbers=AXES, weight_decay=0.1)
    assert_same_steps(optimizer, row.growth)


def over_layers(f: Any, wrap: Any = lambda update: update) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: (), lambda g, state, params=None: (jax.tree.map(wrap(f), g), state)
    )


def in_codes() -> Any:
    muon = curvax.muon(0.01, **SPECIFIED)
    return curvax.quantize_state(muon, where=lambda place, leaf: leaf.ndim > 2)


def clipping() -> Any:
    return optax.chain(curvax.clip_by_last_norm(0.5), optax.sgd(0.1))


STAGGERED = {"refresh": curvax.every(3, stagger=True), **SPECIFIED}
OTHERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(0.01),
    "schedule": lambda: curvax.racs(optax.linear_schedule(0.1, 0.0, 3), **SPECIFIED),
    "injected": lambda: curvax.inject_hyperparams(curvax.racs)(0.01, **SPECIFIED),
    "accumulation": lambda: optax.MultiSteps(curvax.muon(0.01, **SPECIFIED), 2),
    "4-bit factors": lambda: curvax.shampoo(
        0.01, refresh=2, statistics_every=1, storage=curvax.cholesky(min_elements=1), **SPECIFIED
    ),
    "coded moments": in_codes,
    "no stacks": lambda: curvax.muon(0.01, matrices=curvax.MatrixRule(stack=False), **SPECIFIED),
    "clipping": clipping,
    "clipping inside accumulation": lambda: optax.MultiSteps(clipping(), 4),
    "the norm of each layer": lambda: over_layers(
        lambda g: jax.lax.map(lambda x: -0.1 * x / jnp.linalg.norm(x), g)
    ),
    "clipping around coded moments": lambda: optax.chain(curvax.clip_by_last_norm(0.5), in_codes()),
    "staggered refreshes": lambda: curvax.soap(0.01, **STAGGERED),
    "staggered bases": lambda: curvax.galore(0.01, rank=2, **STAGGERED),
    "blocks": lambda: curvax.racs(0.01, matrices=curvax.MatrixRule(block_size=3), **SPECIFIED),
}


@pytest.mark.parametrize("name", cells(OTHERS, of=14))
def test_equals_the_ordinary_step_around_and_inside_a_method(name: str) -> None:
    assert_same_steps(OTHERS[name](), 512.0)


@pytest.mark.parametrize("name", cells(["racs", "alice"], of=2))
def test_equals_the_ordinary_step_as_other_platforms_compile_it(name: str) -> None:
    """TPUs and GPUs have no loop of one round; they order the writes instead."""
    optimizer, chosen = NAMED[name].make(0.01, **SPECIFIED), jax.lax.platform_dependent
    ordinary, during = steps_of(optimizer)

    def other(*args: Any, default: Any, **others: Any) -> Any:
        return default(*args) if "cpu" in others else chosen(*args, default=default, **others)

    def elsewhere(*given: Any) -> Any:
        with mock.patch.object(jax.lax, "platform_dependent", other):
            return during(*given)

    # Several steps, and the way back through all layers.
    assert_same_steps(optimizer, max(16.0, NAMED[name].growth), steps=(ordinary, elsewhere))


@pytest.mark.parametrize("layers", cells(["bfloat16", "one"], of=2))
def test_equals_the_ordinary_step_of_other_layers(layers: str) -> None:
    given = cut(stacked_layers(), 1) if layers == "one" else stacked_layers(layers)
    optimizer = curvax.racs(0.1, **SPECIFIED)
    expected, found = trained(steps_of(optimizer), given, optimizer.init(given), inputs())
    assert_close(found[0], expected[0], 16.0)


@pytest.mark.parametrize("number", [3, 8])
def test_equals_the_ordinary_step_with_a_factored_second_moment(number: int) -> None:
    """Its means are over the two longest axes; of nine layers these would be others."""
    layers = {"kernel": normal_like(jax.random.key(0), np.zeros((number, 8, 8)))}
    square = lambda layer, x: x + jnp.tanh(x @ layer["kernel"]) / 8  # noqa: E731
    optimizer = optax.adafactor(
        0.1, min_dim_size_to_factor=8, multiply_by_parameter_scale=False, clipping_threshold=None
    )
    assert_same_steps(optimizer, 64.0, layers, [jnp.ones(8)], steps_of(optimizer, square))


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
        one = lambda given, x: noisy(given[0], x, given[1])  # noqa: E731
        return loss(scanned(one, (layers, keys), {**start, "x": x})["x"])

    gradient, dx = jax.grad(total, (0, 1))(layers, x)
    output, backward = curvax.layerwise(noisy, optimizer, layers, state, start, xs=keys)
    updated, _, found = backward({**output, "x": jax.grad(loss)(output["x"])})
    assert_close(updated, jax.tree.map(lambda p, g: p - 0.1 * g, layers, gradient))
    assert_close(found["x"], dx)


def test_the_gradient_of_the_output_gets_its_dtype() -> None:
    head, x = {"kernel": jnp.ones((4, 2), jnp.bfloat16)}, jnp.ones((2, 4), jnp.bfloat16)
    sgd = optax.sgd(0.1)
    total = lambda layer, x: jnp.mean((x @ layer["kernel"]) ** 2)  # noqa: E731
    _, backward = curvax.layerwise(total, sgd, head, sgd.init(head), x, stacked=False)
    updated, _, dx = backward(1.0)
    assert dx.dtype == updated["kernel"].dtype == jnp.bfloat16 and (updated["kernel"] < 1).all()


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


def test_one_bad_layer_shows_in_a_flag_of_all_layers_and_has_its_share_of_the_last_norm() -> None:
    """As `apply_if_finite` does where a gradient is not finite: the layer keeps its state."""
    optimizer = optax.apply_if_finite(curvax.clip_by_last_norm(1e-3), 9)
    layers = {"w": jnp.ones(2)}
    state = optimizer.init(layers)

    def hostile(layer: Any, x: Any, bad: Any) -> Any:
        w = layer["w"]
        return w * x + jax.lax.cond(bad, lambda w: jnp.sqrt(0 * w), lambda w: 0 * w, w)

    for bad in (False, True, True):
        xs = jnp.array([bad, False])
        _, backward = curvax.layerwise(hostile, optimizer, layers, state, jnp.ones(()), xs)
        _, state, _ = backward(jnp.ones(()))
        assert bool(state.last_finite) != bad
        assert_close(state.inner_state.squares, 2.0)


def traced(optimizer: Any) -> None:
    """A forward and a backward pass, without their numbers."""
    layers = stacked_layers()
    jax.eval_shape(steps_of(optimizer)[1], layers, optimizer.init(layers), inputs()[0])


def cut(layers: Any, number: int) -> Any:
    return jax.tree.map(lambda p: p[:number], layers)


@wrong_calls(r"""
layerwise(ADAM, block, p, s, x) -> optimizer, the second argument
layerwise(block, ADAM, ADAM, s, x) -> layers, the third argument | an optimizer
layerwise(block, ADAM, s, p, x) -> layers | got an optimizer's state. The order
layerwise(block, ADAM, p, x, s) -> state has
layerwise(p, ADAM, p, s, x) -> block, the first argument, must be a function
layerwise(block, ADAM, p | {'n': jnp.arange(3)}, s, x) -> 'n' has dtype int32
layerwise(block, ADAM, p | {'n': jnp.ones(2)}, s, x) -> the first axis of every array | 'n'
layerwise(block, ADAM, {}, s, x) -> at least one parameter
layerwise(block, ADAM, cut(p, 0), s, x) -> there must be at least one layer
layerwise(block, ADAM, [jax.tree.map(lambda p: p[0], p)] * 3, s, x) ->
    It is a list: stack layers | jnp.stack
layerwise(block, ADAM, p, optax.sgd(0.1, 0.9).init(p), x) -> state has | for these layers
layerwise(block, ADAM, p, ADAM.init(cut(p, 1)), x) -> state has | for these layers
layerwise(lambda p, x: block(p, x)[:1], ADAM, p, s, x) ->
    block: a layer gets float32 | stacked=False
layerwise(lambda p, x: (x, x), ADAM, p, s, x) -> block: a layer gets | returns ( | stacked=False
layerwise(lambda p, x, _: block(p, x), ADAM, p, s, x, {'keys': jnp.zeros((1, 2))}) ->
    xs: the first axis | 'keys' has shape (1, 2)
traced(muon(0.1, weight_dimension_numbers={'*kernel': MatrixAxes((0, 1), 2)})) ->
    cannot be cut by layer
traced(muon(0.1, mesh=jax.make_mesh((4,), ('x',)), **SPECIFIED)) -> mesh=
""")
def test_wrong_calls_are_named(call: str, fragments: str) -> None:
    names = {"p": stacked_layers(), "s": ADAM.init(stacked_layers()), "x": inputs()[0]}
    assert_refused(call, fragments, {**vars(curvax), **globals(), **names})


def test_a_list_of_square_layers_is_told_apart_by_its_error() -> None:
    layers, sgd = [{"kernel": jnp.eye(4)}] * 4, optax.sgd(0.1)
    with pytest.raises(TypeError) as error:
        curvax.layerwise(lambda p, x: x @ p["kernel"], sgd, layers, sgd.init(layers), jnp.ones(4))
    assert any("It is a list: stack layers" in note for note in error.value.__notes__)


def test_a_backward_pass_in_both_branches() -> None:
    layers, x, optimizer = stacked_layers(), inputs()[0], curvax.muon(0.1, **SPECIFIED)

    @jax.jit
    def step(first: Any, layers: Any, state: Any) -> Any:
        output, backward = curvax.layerwise(block, optimizer, layers, state, x)
        dx = jax.grad(loss)(output)
        return jax.lax.cond(first, lambda: backward(dx), lambda: backward(-dx))

    state = optimizer.init(layers)
    expected, _, _ = steps_of(optimizer)[1](layers, state, x)
    assert_close(step(True, layers, state)[0], expected, 64.0)
    moved, back = (step(first, layers, state)[0]["down"]["kernel"] for first in (True, False))
    assert_close(moved - layers["down"]["kernel"], layers["down"]["kernel"] - back, 64.0)


def square(layer: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ layer["kernel"])


def test_updates_in_place_and_holds_the_gradient_of_one_layer() -> None:
    width, number = 64, 40
    layers = {"kernel": jax.ShapeDtypeStruct((number, width, width), jnp.float32)}
    optimizer = curvax.muon(0.1, weight_dimension_numbers={"kernel": AXES["*kernel"]})
    _, step = steps_of(optimizer, square, lambda x: jnp.sum(x**2))
    state, x = jax.eval_shape(optimizer.init, layers), jax.ShapeDtypeStruct((4, width), jnp.float32)
    assert temporaries(step, layers, state, x) < number * width * width * 4 / 2
