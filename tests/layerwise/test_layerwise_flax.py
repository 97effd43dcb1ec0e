"""Layers that Flax has scanned or stacked: `nn.scan`, and `nnx.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import curvax
from tests.helpers import assert_close

LAYERS, WIDTH, VOCABULARY = 3, 8, 11
KERNELS: dict[str, Any] = {
    "weight_dimension_numbers": {"*kernel": curvax.MatrixAxes(rows=1, columns=2)}
}
INNER = curvax.muon(0.01, **KERNELS)
ENDS = optax.adamw(0.01)


def tokens_of(step: int) -> jax.Array:
    return jax.random.randint(jax.random.key(step), (4, 6), 0, VOCABULARY)


def loss_of(logits: Any, targets: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def ordinary(apply: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step of a whole model, with one optimizer for its layers and another for the rest."""

    def step(params: Any, states: Any, tokens: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: loss_of(apply(p, tokens), tokens))(params)
        new, new_states = {}, {}
        for name, optimizer in (("layers", INNER), ("embed", ENDS), ("head", ENDS)):
            updates, new_states[name] = optimizer.update(gradient[name], states[name], params[name])
            new[name] = optax.apply_updates(params[name], updates)
        return new, new_states, loss

    return step


def during(embed: Any, block: Any, head: Any) -> Callable[..., Any]:
    """The same step, layer-wise."""

    def step(params: Any, states: Any, tokens: Any) -> Any:
        def call(name: str, f: Any, optimizer: Any, x: Any, **more: Any) -> Any:
            return curvax.layerwise(f, optimizer, params[name], states[name], x, **more)

        loss = lambda p, x, targets: loss_of(head(p, x), targets)  # noqa: E731
        x, embed_back = call("embed", embed, ENDS, tokens, stacked=False)
        x, layers_back = call("layers", block, INNER, x)
        value, head_back = call("head", loss, ENDS, x, xs=tokens, stacked=False)
        new, new_states = {}, {}
        new["head"], new_states["head"], dx = head_back(1.0)
        new["layers"], new_states["layers"], dx = layers_back(dx)
        new["embed"], new_states["embed"], _ = embed_back(dx)
        return new, new_states, value

    return step


def assert_same_training(params: Any, first: Any, second: Any) -> None:
    """Parameters, states and losses of three steps."""
    found = []
    for step in (first, second):
        compiled, own = jax.jit(step), params
        optimizers = {"layers": INNER, "embed": ENDS, "head": ENDS}
        states = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}
        losses = []
        for i in range(3):
            own, states, loss = compiled(own, states, tokens_of(i))
            losses.append(loss)
        found.append((own, states, losses))
    assert jax.tree.structure(found[1]) == jax.tree.structure(found[0])
    assert_close((found[1][0], found[1][2]), (found[0][0], found[0][2]), 4096.0)
    moved = jax.tree.map(lambda p, q: float(jnp.abs(p - q).max()), found[1][0], params)
    assert min(jax.tree.leaves(moved)) > 1e-3


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(hidden))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = scan(Block(name="layers"), x, None)
        return nn.Dense(VOCABULARY, name="head")(x)


def test_a_linen_model_with_scanned_layers() -> None:
    model = Model()
    with jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), tokens_of(0))["params"]
        assert params["layers"]["up"]["kernel"].shape == (LAYERS, WIDTH, 2 * WIDTH)
        assert_same_training(
            params,
            ordinary(lambda params, tokens: model.apply({"params": params}, tokens)),
            during(
                lambda p, tokens: nn.Embed(VOCABULARY, WIDTH).apply({"params": p}, tokens),
                lambda p, x: Block().apply({"params": p}, x),
                lambda p, x: nn.Dense(VOCABULARY).apply({"params": p}, x),
            ),
        )


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def test_an_nnx_model_with_stacked_layers() -> None:
    rngs = nnx.Rngs(0)
    stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))
    modules = {
        "embed": nnx.Embed(VOCABULARY, WIDTH, rngs=rngs),
        "layers": stack(rngs),
        "head": nnx.Linear(WIDTH, VOCABULARY, rngs=rngs),
    }
    graphs, params = {}, {}
    for name, module in modules.items():
        graphs[name], params[name] = nnx.split(module, nnx.Param)

    def applied(name: str) -> Callable[[Any, Any], Any]:
        return lambda p, x: nnx.merge(graphs[name], p)(x)

    def apply(params: Any, tokens: Any) -> Any:
        x = applied("embed")(params["embed"], tokens)
        visit = lambda x, p: (applied("layers")(p, x), None)  # noqa: E731
        x, _ = jax.lax.scan(visit, x, params["layers"])
        return applied("head")(params["head"], x)

    with jax.numpy_rank_promotion("allow"):
        step = during(applied("embed"), applied("layers"), applied("head"))
        assert_same_training(params, ordinary(apply), step)
