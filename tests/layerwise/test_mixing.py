"""What mixes layers in a layer-wise step is refused, and what does not is accepted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.layerwise.test_layerwise import SPECIFIED, over_layers, traced


def unit(g: Any) -> Any:
    return g / jnp.sqrt(jnp.sum(g**2))


def summed(g: Any) -> Any:
    """By a sum over the rounds of a loop."""
    return g / jax.lax.scan(lambda total, x: (total + jnp.sum(x**2), None), 1.0, g)[0]


def custom(f: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return g


def conditional(inner: Any) -> Any:
    def update(g: Any, state: Any, params: Any = None) -> Any:
        return jax.lax.cond(True, lambda: inner.update(g, state), lambda: (g, state))

    return optax.GradientTransformation(inner.init, update)


def by_layer(weights: Any) -> Any:
    """A function that multiplies each layer by its own weight."""
    return lambda g: g * jnp.asarray(weights(len(g))).reshape(-1, *[1] * (g.ndim - 1))


def drawn(draw: Any) -> optax.GradientTransformation:
    """Adds `draw(key, shape)` with a key that all layers share."""

    def update(g: Any, key: Any, params: Any = None) -> Any:
        key = jax.random.wrap_key_data(key)
        return jax.tree.map(lambda x: x + draw(key, x.shape), g), jax.random.key_data(key)

    init = lambda params: jax.random.key_data(jax.random.key(0))  # noqa: E731
    return optax.GradientTransformation(init, update)


def running(g: Any) -> Any:
    """The carry of a scan over layers, before each of them."""
    start = jnp.zeros(g.shape[1:])
    return jax.lax.scan(lambda mean, x: (0.9 * mean + x, mean), start, g)[1]


def shrunk(g: Any) -> Any:
    """Halved until the largest entry is at most 1."""
    return jax.lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1, lambda x: x / 2, g)


def backwards(x: Any) -> Any:
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.asarray(x)[::-1].copy(), kind, x)


def each(f: Any) -> Any:
    """`f(layer, index)`, taken from all layers and put back by a loop."""

    def turn(i: Any, g: Any) -> Any:
        layer = jax.lax.dynamic_index_in_dim(g, i, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(g, f(layer, i), i, 0)

    return lambda g: jax.lax.fori_loop(0, len(g), turn, g)


def counted(start: Any, step: Any) -> Any:
    """`step(carry, layer)` of a scan over layers."""
    return lambda g: jax.lax.scan(step, start, g)[1]


def halved_in_rounds(f: Any) -> Any:
    """Each layer halved as often as its index says, by a loop inside of a map or a batch."""
    rounds = lambda x, i: jax.lax.fori_loop(0, i + 1, lambda _, x: x / 2, x)  # noqa: E731
    return lambda g: f(lambda given: rounds(*given))((g, jnp.arange(len(g))))


def halved_until(number: Any) -> Any:
    """Halved so often, by a loop that knows the number or not."""
    return lambda g: jax.lax.fori_loop(0, number(g), lambda _, x: x / 2, g)


def counting(f: Any, number: Any = lambda g: 1) -> optax.GradientTransformation:
    """`f(g, count)`, with a count to which each step adds `number(g)`: the number of steps."""

    def update(g: Any, count: Any, params: Any = None) -> Any:
        more = number(jax.tree.leaves(g)[0])
        return jax.tree.map(lambda x: f(x, count), g), count + more

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def padded(g: Any, number: int) -> Any:
    """Moved back by so many entries, with zeros in front."""
    flat = jnp.pad(g.reshape(len(g), -1), ((0, 0), (number, 0)))
    return flat[:, : g[0].size].reshape(g.shape)


def largest_first(g: Any) -> Any:
    return jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(g, 0, -1), len(g))[0], -1, 0)


def of_its_place(g: Any) -> Any:
    return g * jnp.argsort(jnp.sum(g.reshape(len(g), -1), 1)).reshape(-1, *[1] * (g.ndim - 1))


KEY, TABLE = jax.random.key(0), jnp.linspace(0, 1, 100)
ALONG_LAYERS = {
    "powers of the index": by_layer(lambda number: 0.5 ** jnp.arange(number)),
    "linspace of NumPy": by_layer(lambda number: np.linspace(0, 1, number, dtype=np.float32)),
    "the first layers": by_layer(lambda number: jnp.arange(number) < 2),
    "the number of layers": lambda g: g / len(g),
    "any": lambda g: jnp.where(jnp.any(jnp.abs(g) > 1), g, 0),
    "a count": lambda g: jnp.where(jnp.sum(jnp.abs(g) > 1) > 3, g, 0),
    "the place of the largest": lambda g: jnp.where(jnp.argmax(g.ravel()) > 3, g, 0),
    "a condition": lambda g: jax.lax.cond(jnp.any(g > 1), lambda x: x, lambda x: 2 * x, g),
    "the end of a loop": shrunk,
    "cumulative sum": lambda g: jnp.cumsum(g, 0),
    "cumulative maximum": lambda g: jax.lax.cummax(g, 0),
    "flip": lambda g: jnp.flip(g, 0),
    "roll": lambda g: jnp.roll(g, 1, 0),
    "sort": lambda g: jnp.sort(g, 0),
    "order": lambda g: g[jnp.argsort(jnp.sum(g.reshape(len(g), -1), 1))],
    "fft": lambda g: jnp.fft.fft(g, axis=0).real,
    "carry": running,
    "associative scan": lambda g: jax.lax.associative_scan(jnp.add, g),
    "matrix of layers": lambda g: jnp.einsum("lk,k...->l...", jnp.ones((len(g), len(g))), g),
    "one layer": lambda g: g.at[0].set(0),
    "callback": backwards,
    "largest first": largest_first,
    "a permutation": lambda g: g[jnp.arange(len(g)) * 2 % len(g)],
    "sums in one place": lambda g: jnp.zeros_like(g).at[jnp.zeros(len(g), int)].add(g),
    "a slice for all": lambda g: g + jax.lax.dynamic_index_in_dim(g, 0, 0),
    "a slice for each": lambda g: each(lambda x, i: x + jax.lax.dynamic_index_in_dim(g, 0, 0)[0])(
        g
    ),
    "a reshape": lambda g: g.reshape(len(g), -1).T.reshape(g.shape),
    "a floating counter": counted(0.0, lambda c, x: (c + 1, x * c)),
    "a counter": counted(0, lambda c, x: (c + 1, jnp.where(c % 2 == 0, x, 0))),
    "a sum of signs": counted(0, lambda c, x: (c + jnp.sum(x > 0), x * (c % 3))),
    "a flag": counted(False, lambda c, x: (jnp.any(x > 1) | c, jnp.where(c, x, 0))),
    "a branch for each": each(lambda x, i: jax.lax.switch(i % 2, [jnp.copy, lambda x: 2 * x], x)),
    "the index of a loop": each(lambda x, i: x * (i + 1)),
    "its place by size": of_its_place,
    "rounds by the index in a batch": halved_in_rounds(jax.vmap),
    "rounds by the index in a map": halved_in_rounds(lambda f: lambda given: jax.lax.map(f, given)),
    "as many rounds as layers": halved_until(len),
    "a rate for each layer of all": lambda g: jax.lax.scan(
        lambda x, rate: (rate * x, None), g, jnp.full(len(g), 0.9)
    )[0],
    "the number as an end": lambda g: jnp.tile(g, 9).at[..., : len(g)].set(0)[..., : g.shape[-1]],
    "so many ones": lambda g: g * jnp.sum(jnp.zeros(89).at[: len(g)].set(1.0)),
    "zeros and ones": lambda g: g * jnp.concatenate([jnp.zeros(len(g)), jnp.ones(89 - len(g))])[9],
    "the number as a power": lambda g: g ** len(g),
    "a bounded number": lambda g: g * min(len(g), 4),
    "its parity": lambda g: g * (1 + len(g) % 2),
    "a sign by its parity": lambda g: -g if len(g) % 2 else g,
    "an axis by its parity": lambda g: jnp.flip(g, 1 if len(g) % 2 else -1),
    "a dtype by its parity": lambda g: g.astype("bfloat16").astype(g.dtype) if len(g) % 2 else g,
    "a place by its parity": lambda g: g * jax.lax.dynamic_slice_in_dim(g, len(g) % 2, 1, 1),
    "its logarithm": lambda g: jax.lax.fori_loop(0, int(np.log2(len(g))), lambda _, x: x / 2, g),
    "the number as a bound": lambda g: jnp.clip(g, -len(g), len(g)),
    "the number less one": lambda g: g * jnp.float32(1 / (len(g) - 1)),
    "a sum of ones": lambda g: g / jnp.sum(jnp.ones(len(g), int)),
    "the number as a seed": lambda g: g * jax.random.uniform(jax.random.key(len(g))),
    "so many entries further": lambda g: jnp.roll(g, len(g), 1),
    "so many zeros": lambda g: padded(g, len(g)),
    "half as many rounds": halved_until(lambda g: len(g) // 2),
    "the last of each": lambda g: each(
        lambda x, i: x + jax.lax.dynamic_index_in_dim(g, len(g) - 1, 0)[0]
    )(g),
}
CLIP = optax.clip_by_global_norm(0.01)
REFUSED: dict[str, Any] = {
    **{name: over_layers(f) for name, f in ALONG_LAYERS.items()},
    "clip": optax.chain(CLIP, curvax.muon(0.1, **SPECIFIED)),
    "clip behind": optax.chain(curvax.racs(0.1, **SPECIFIED), CLIP),
    "trust ratio": optax.lamb(0.1),
    "block norm": optax.chain(optax.clip_by_block_rms(1.0), optax.adam(0.1)),
    "a state of all gradients": optax.contrib.prodigy(0.1),
    "accumulation": optax.MultiSteps(optax.chain(CLIP, optax.sgd(0.1)), 2),
    "cond": conditional(CLIP),
    "checkpoint": over_layers(unit, jax.checkpoint),
    "custom_jvp": over_layers(unit, custom),
    "map": over_layers(lambda g: jax.lax.map(lambda _: unit(g), jnp.arange(2))[0]),
    "scan": over_layers(summed),
    "while": over_layers(lambda g: jax.lax.fori_loop(0, 2, lambda _, x: unit(x), g)),
    "an axis that stays": over_layers(lambda g: g / jnp.sum(g**2, axis=0, keepdims=True)),
    "norms of parameters": optax.scale_by_param_block_norm(),
    "scales of parameters": optax.adafactor(0.1, clipping_threshold=None),
    "a state of features": optax.sm3(0.1),
    # Unless its class says how those of the layers combine: nothing uses it in this step.
    "a norm in the state": optax.GradientTransformation(
        lambda params: jnp.zeros([]), lambda g, state, params=None: (g, optax.tree.norm(g))
    ),
    "every so many steps": counting(lambda g, count: jnp.where(count % len(g) == 0, g, 0)),
    "in the first so many": counting(lambda g, count: jnp.where(count < len(g), g, 0)),
    "steps in units of it": counting(lambda g, count: g * (count // (len(g) - 1))),
    "steps after it": counting(lambda g, count: g * (count + len(g))),
    "a branch by it": counting(
        lambda g, count: jax.lax.cond(count > len(g), lambda x: x, lambda x: 2 * x, g)
    ),
    "a count of layers": counting(lambda g, count: g * (count % 5), len),
}
unit_of_each = jax.vmap(unit)
APART = {
    "norms": jax.vmap(unit),
    "any": jax.vmap(lambda x: jnp.where(jnp.any(x > 1), x, 0)),
    "cumulative sum": lambda g: jnp.cumsum(g, 1),
    "sort": lambda g: jnp.sort(g, -1),
    "median": lambda g: jnp.where(g >= jnp.median(g, axis=1, keepdims=True), g, 0),
    "flip": lambda g: g[:, ::-1],
    "one row": lambda g: g.at[:, 0].set(0),
    "carry": lambda g: jax.lax.map(running, g),
    "loops": lambda g: jax.lax.map(shrunk, g),
    "loops of a batch": jax.vmap(shrunk),
    "slices in turn": each(lambda x, i: unit(x)),
    "a counter that nothing needs": counted(0.0, lambda c, x: (c + 1, unit(x))),
    "rounds": halved_until(lambda g: 5),
    "largest": lambda g: jnp.where(g >= jax.lax.top_k(g, 2)[0][..., -1:], g, 0),
    "a permutation": lambda g: g[:, jnp.arange(g.shape[1])[::-1]],
    "places": jax.vmap(lambda x: x.at[jnp.argmax(x[..., 0])].add(1.0)),
    "a reshape": lambda g: unit_of_each(g.reshape(len(g), -1)).reshape(g.shape),
    "an entry from the end": lambda g: each(lambda x, i: x * x[jnp.int32(-1)][None])(g),
    "a sum of all columns' ones": lambda g: g / jnp.sum(jnp.ones(g.shape[1])),
    "entries further": lambda g: padded(jnp.roll(g, 5, 1), 7),
    "a key from outside": lambda g: g * jax.random.uniform(KEY),
    "an entry of a table": lambda g: g * TABLE[5],
    "an end": lambda g: jnp.tile(g, 9).at[..., :3].set(0)[..., : g.shape[-1]],
    "zeros and ones": lambda g: g * jnp.concatenate([jnp.zeros(2), jnp.ones(87)])[9],
    "another program for many layers": lambda g: jnp.sort(g, 1) if len(g) > 9 else g,
    "the sum of no entries": lambda g: g + jnp.sum(jnp.zeros((0,))),
}
ALLOWED: dict[str, Any] = {
    **{name: over_layers(f) for name, f in APART.items()},
    "every five steps": counting(lambda g, count: jnp.where(count % 5 == 0, g, 0)),
    "in the first seven": counting(lambda g, count: jnp.where(count < 7, g, 0)),
    "an entry by the step": counting(lambda g, count: g * g[:, count % 3 - 1][:, None]),
    "a count of steps": counting(lambda g, count: g * (count % 5)),
}
DRAWS: dict[str, Any] = {
    "Optax's noise": optax.add_noise(0.1, 0.5, 0),
    "normal": drawn(jax.random.normal),
    "gamma": drawn(lambda key, shape: jax.random.gamma(key, 2.0, shape)),
    "beta": drawn(lambda key, shape: jax.random.beta(key, 2.0, 2.0, shape)),
    "poisson": drawn(lambda key, shape: jax.random.poisson(key, 3.0, shape) * 1.0),
    "bits": drawn(
        lambda key, shape: (
            1.0 * jax.lax.rng_bit_generator(jax.random.key_data(key).repeat(2), shape)[1]
        )
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_layers_or_depends_on_their_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="optimizer: its updates depend on a number computed from"):
        traced(REFUSED[name])


@pytest.mark.parametrize("name", ALLOWED)
def test_the_same_within_a_layer_is_not_refused(name: str) -> None:
    traced(ALLOWED[name])


@pytest.mark.parametrize("name", DRAWS)
def test_draws_for_all_layers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="every layer would get the same random numbers"):
        traced(DRAWS[name])
