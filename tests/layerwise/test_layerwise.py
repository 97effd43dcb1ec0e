"""A layer-wise step gives the parameters and the state of an ordinary one, for every method."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, normal, normal_like
from tests.registry import NAMED, REGISTRY, Row

LAYERS, STEPS = 3, 30
AXES = {"*kernel": curvax.MatrixAxes(rows=1, columns=2), "*bias": None}
SPECIFIED: dict[str, Any] = {"weight_dimension_numbers": AXES}


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


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
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


def in_codes() -> Any:
    muon = curvax.muon(0.01, **SPECIFIED)
    return curvax.quantize_state(muon, where=lambda place, leaf: leaf.ndim > 2)


OTHERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(0.01),
    "schedule": lambda: curvax.racs(optax.linear_schedule(0.1, 0.0, 3), **SPECIFIED),
    "injected": lambda: curvax.inject_hyperparams(curvax.racs)(0.01, **SPECIFIED),
    "accumulation": lambda: optax.MultiSteps(curvax.muon(0.01, **SPECIFIED), 2),
    "4-bit factors": lambda: curvax.shampoo(
        0.01, refresh=2, statistics_every=1, storage=curvax.cholesky(min_elements=1), **SPECIFIED
    ),
    "coded moments": lambda: in_codes(),
    "no stacks": lambda: curvax.muon(0.01, matrices=curvax.MatrixRule(stack=False), **SPECIFIED),
    "clipping": lambda: optax.chain(curvax.clip_by_last_norm(0.5), optax.sgd(0.1)),
    "clipping inside accumulation": lambda: optax.MultiSteps(OTHERS["clipping"](), 4),
    "the norm of each layer": lambda: over_layers(
        lambda g: jax.lax.map(lambda x: -0.1 * x / jnp.linalg.norm(x), g)
    ),
    "clipping around coded moments": lambda: optax.chain(curvax.clip_by_last_norm(0.5), in_codes()),
    "staggered refreshes": lambda: curvax.soap(
        0.01, refresh=curvax.every(3, stagger=True), **SPECIFIED
    ),
    "staggered bases": lambda: curvax.galore(
        0.01, rank=2, refresh=curvax.every(3, stagger=True), **SPECIFIED
    ),
    "blocks": lambda: curvax.soap(0.01, matrices=curvax.MatrixRule(block_size=3), **SPECIFIED),
}


@pytest.mark.parametrize("name", cells(OTHERS, of=14))
def test_equals_the_ordinary_step_around_and_inside_a_method(name: str) -> None:
    optimizer = OTHERS[name]()
    expected, found = steps_of(ordinary, optimizer), steps_of(during, optimizer)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close([found[0], found[2]], [expected[0], expected[2]], 512.0)


@pytest.mark.parametrize("name", cells(["racs", "alice"], of=2))
def test_equals_the_ordinary_step_as_other_platforms_compile_it(name: str, monkeypatch) -> None:
    """TPUs and GPUs have no loop of one round; they order the writes instead."""
    optimizer = NAMED[name].make(0.01, weight_dimension_numbers=AXES)
    expected = steps_of(ordinary, optimizer)
    chosen = jax.lax.platform_dependent

    def other(*args: Any, default: Any, **others: Any) -> Any:
        return default(*args) if "cpu" in others else chosen(*args, default=default, **others)

    monkeypatch.setattr(jax.lax, "platform_dependent", other)
    assert_close(steps_of(during, optimizer)[0], expected[0], NAMED[name].growth)


@pytest.mark.parametrize("layers", cells(["bfloat16", "one"], of=2))
def test_equals_the_ordinary_step_of_other_layers(layers: str) -> None:
    given = cut(stacked_layers(), 1) if layers == "one" else stacked_layers(layers)
    optimizer = curvax.racs(0.1, **SPECIFIED)
    expected, found = (steps_of(step, optimizer, given) for step in (ordinary, during))
    assert_close(found[0], expected[0], 16.0)


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


def test_one_bad_layer_shows_in_a_flag_of_all_layers() -> None:
    layers = {"w": jnp.ones(3)}
    optimizer = optax.apply_if_finite(optax.sgd(0.1), 9)

    def hostile(layer: Any, x: Any, bad: Any) -> Any:
        w = layer["w"]
        return x + jax.lax.cond(bad, lambda w: jnp.sqrt(0 * w), lambda w: 0 * w, w)

    for bad in ([False, True, False], [False] * 3):
        given = layers, optimizer.init(layers), jnp.ones(()), jnp.array(bad)
        _, state, _ = curvax.layerwise(hostile, optimizer, *given)[1](jnp.ones(()))
        assert bool(state.last_finite) != any(bad)


# What cannot be done is refused.


def over_layers(f: Any, wrap: Any = lambda update: update) -> optax.GradientTransformation:
    """Applies `f` to each leaf."""
    return optax.GradientTransformation(
        lambda params: (), lambda g, state, params=None: (jax.tree.map(wrap(f), g), state)
    )


def conditional(inner: Any) -> Any:
    def update(g: Any, state: Any, params: Any = None) -> Any:
        return jax.lax.cond(True, lambda: inner.update(g, state), lambda: (g, state))

    return optax.GradientTransformation(inner.init, update)


def custom(f: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return g


def unit(g: Any) -> Any:
    return g / jnp.sqrt(jnp.sum(g**2))


def summed(g: Any) -> Any:
    """By a sum over the rounds of a loop."""
    return g / jax.lax.scan(lambda total, x: (total + jnp.sum(x**2), None), 1.0, g)[0]


def clip() -> Any:
    return optax.clip_by_global_norm(0.01)


def traced(optimizer: Any) -> None:
    """A forward and a backward pass, without their numbers."""

    def both(layers: Any, state: Any, x: Any) -> Any:
        return curvax.layerwise(block, optimizer, layers, state, x)[1](x)

    jax.eval_shape(both, stacked_layers(), optimizer.init(stacked_layers()), inputs()[0])


MIXED = {
    "clip": lambda: optax.chain(clip(), curvax.muon(0.1, **SPECIFIED)),
    "clip behind": lambda: optax.chain(curvax.racs(0.1, **SPECIFIED), clip()),
    "trust ratio": lambda: optax.lamb(0.1),
    "block norm": lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.adam(0.1)),
    "a state of all gradients": lambda: optax.contrib.prodigy(0.1),
    "accumulation": lambda: optax.MultiSteps(optax.chain(clip(), optax.sgd(0.1)), 2),
    "cond": lambda: conditional(clip()),
    "checkpoint": lambda: over_layers(unit, jax.checkpoint),
    "custom_jvp": lambda: over_layers(unit, custom),
    "map": lambda: over_layers(lambda g: jax.lax.map(lambda _: unit(g), jnp.arange(2))[0]),
    "scan": lambda: over_layers(summed),
    "while": lambda: over_layers(lambda g: jax.lax.fori_loop(0, 2, lambda _, x: unit(x), g)),
    "an axis that stays": lambda: over_layers(lambda g: g / jnp.sum(g**2, axis=0, keepdims=True)),
    "norms of parameters": lambda: optax.scale_by_param_block_norm(),
    "scales of parameters": lambda: optax.adafactor(0.1, clipping_threshold=None),
    "a state of features": lambda: optax.sm3(0.1),
}


@pytest.mark.parametrize("name", MIXED)
def test_norms_over_layers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="optimizer: its updates depend on a number computed from"):
        traced(MIXED[name]())


def test_noise_for_all_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="every layer would get the same random numbers"):
        traced(optax.add_noise(0.1, 0.5, 0))


def test_a_number_of_the_state_that_all_gradients_determine_is_refused() -> None:
    """Unless its class says how those of the layers combine: nothing uses it in this step."""
    update = lambda updates, state, params=None: (updates, optax.tree.norm(updates))  # noqa: E731
    optimizer = optax.GradientTransformation(lambda params: jnp.zeros([]), update)
    with pytest.raises(ValueError, match="a number computed from all gradients"):
        traced(optimizer)


def test_the_last_norm_has_the_share_of_a_layer_that_kept_its_state() -> None:
    """As `apply_if_finite` does where a gradient is not finite."""
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
        assert_close(state.inner_state.squares, 2.0)


@pytest.mark.parametrize("number", [3, 8])
def test_equals_the_ordinary_step_with_a_factored_second_moment(number: int) -> None:
    """Its means are over the two longest axes; of nine layers these would be others."""
    layers, x = {"kernel": normal_like(jax.random.key(0), np.zeros((number, 8, 8)))}, jnp.ones(8)
    optimizer = optax.adafactor(
        0.1, min_dim_size_to_factor=8, multiply_by_parameter_scale=False, clipping_threshold=None
    )

    def square(layer: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ layer["kernel"]) / 8

    def total(layers: Any) -> Any:
        return loss(jax.lax.scan(lambda x, p: (square(p, x), None), x, layers)[0])

    @jax.jit
    def both(layers: Any, x: Any) -> Any:
        state = optimizer.init(layers)
        updates, _ = optimizer.update(jax.grad(total)(layers), state, layers)
        output, backward = curvax.layerwise(square, optimizer, layers, state, x)
        return backward(jax.grad(loss)(output))[0], optax.apply_updates(layers, updates)

    assert_close(*both(layers, x), 64.0)


MERGED: Any = {"*kernel": curvax.MatrixAxes((0, 1), 2)}
SWAPPED: list[tuple[Any, str]] = [  # of block, optimizer, layers, state and input
    (lambda b, o, p, s, x: (o, b, p, s, x), "optimizer, the second argument"),
    (lambda b, o, p, s, x: (b, o, o, s, x), "layers, the third argument, .* an optimizer"),
    (lambda b, o, p, s, x: (b, o, s, p, x), r"layers, .* got an optimizer's state\. The order"),
    (lambda b, o, p, s, x: (b, o, p, x, s), "state has"),
    (lambda b, o, p, s, x: (p, o, p, s, x), "block, the first argument, must be a function"),
    (lambda b, o, p, s, x: (b, o, {**p, "n": jnp.arange(3)}, s, x), "'n' has dtype int32"),
    (lambda b, o, p, s, x: (b, o, {**p, "n": jnp.ones(2)}, s, x), "'n'|there are 2 layers"),
    (lambda b, o, p, s, x: (b, o, {}, s, x), "at least one parameter"),
    (lambda b, o, p, s, x: (b, o, cut(p, 0), s, x), "there must be at least one layer"),
    (
        lambda b, o, p, s, x: (b, o, [jax.tree.map(lambda p: p[0], p)] * 3, s, x),
        r"It is a list: stack layers .* jnp\.stack",
    ),
    (
        lambda b, o, p, s, x: (b, o, p, optax.sgd(0.1, 0.9).init(p), x),
        "state has .* for these layers",
    ),
    (lambda b, o, p, s, x: (b, o, p, o.init(cut(p, 1)), x), "state has .* for these layers"),
    (
        lambda b, o, p, s, x: (lambda layer, x: block(layer, x)[:1], o, p, s, x),
        r"block: a layer gets float32.*stacked=False",
    ),
    (
        lambda b, o, p, s, x: (lambda layer, x: (x, x), o, p, s, x),
        r"block: a layer gets .* returns \(.*stacked=False",
    ),
    (
        lambda b, o, p, s, x: (lambda l, x, _: b(l, x), o, p, s, x, {"keys": jnp.zeros((1, 2))}),
        r"xs: the first axis .* 'keys' has shape \(1, 2\)",
    ),
]


def cut(layers: Any, number: int) -> Any:
    return jax.tree.map(lambda p: p[:number], layers)


@pytest.mark.parametrize(("swapped", "message"), SWAPPED)
def test_wrong_arguments_are_named(swapped: Any, message: str) -> None:
    optimizer, layers, x = optax.adam(0.1), stacked_layers(), inputs()[0]
    with pytest.raises(ValueError, match=message):
        curvax.layerwise(*swapped(block, optimizer, layers, optimizer.init(layers), x))[1](x)


def test_states_that_are_not_cut_by_layer_are_refused() -> None:
    merged = curvax.muon(0.1, weight_dimension_numbers=MERGED)
    divided = curvax.muon(0.1, mesh=jax.make_mesh((4,), ("x",)), **SPECIFIED)
    for optimizer, message in ((merged, "cannot be cut by layer"), (divided, "mesh=")):
        with pytest.raises(ValueError, match=message):
            traced(optimizer)


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
    expected = during(optimizer, layers, state, x)
    assert_close(step(True, layers, state)[0], expected[0], 64.0)
    moved, back = (step(first, layers, state)[0]["down"]["kernel"] for first in (True, False))
    assert_close(moved - layers["down"]["kernel"], layers["down"]["kernel"] - back, 64.0)


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

    x = jax.ShapeDtypeStruct((4, width), jnp.float32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(layers, state, x)
    memory: Any = lowered.compile().memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((layers, state))]
    assert memory.alias_size_in_bytes >= sum(sizes)
    gradients = number * width * width * 4
    assert memory.temp_size_in_bytes < gradients / 2
