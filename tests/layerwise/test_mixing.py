"""What mixes layers in a layer-wise step is refused, and what does not is accepted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.layerwise.test_layerwise import over_layers, traced, unit


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


ALONG_LAYERS = {
    "powers of the index": by_layer(lambda number: 0.5 ** jnp.arange(number)),
    "linspace": by_layer(lambda number: jnp.linspace(0, 1, number)),
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
}
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
}
DRAWS: dict[str, Any] = {
    "normal": jax.random.normal,
    "gamma": lambda key, shape: jax.random.gamma(key, 2.0, shape),
    "beta": lambda key, shape: jax.random.beta(key, 2.0, 2.0, shape),
    "poisson": lambda key, shape: jax.random.poisson(key, 3.0, shape) * 1.0,
    "bits": lambda key, shape: (
        1.0 * jax.lax.rng_bit_generator(jax.random.key_data(key).repeat(2), shape)[1]
    ),
}


@pytest.mark.parametrize("name", ALONG_LAYERS)
def test_what_runs_along_the_layers_or_depends_on_their_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="optimizer: its updates depend on"):
        traced(over_layers(ALONG_LAYERS[name]))


@pytest.mark.parametrize("name", APART)
def test_the_same_within_a_layer_is_not_refused(name: str) -> None:
    traced(over_layers(APART[name]))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_for_all_layers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="every layer would get the same random numbers"):
        traced(drawn(DRAWS[name]))
