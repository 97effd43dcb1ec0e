"""A training run of the model of `examples/train_lm.py`, for scripts that study its gradients."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_lm

SIZES = {"batch": 32, "context": 64, "width": 128, "depth": 4, "weight_decay": 0.01}


def matrices_of(tree) -> dict[str, jax.Array]:
    """The kernels and embeddings, by name, attention's merged to matrices."""
    matrices = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        if leaf.ndim == 3:
            rows = -1 if ".out." in name else leaf.shape[0]
            matrices[name] = leaf.reshape(rows, leaf.shape[-1] if rows == -1 else -1)
        elif leaf.ndim == 2:
            matrices[name] = leaf
    return matrices


def gradients(
    optimizer: str, learning_rate: float, steps: int, seed: int
) -> Iterator[dict[str, jax.Array]]:
    """Trains with one of the example's optimizers and yields each step's gradients as matrices."""
    corpus = train_lm.read_corpus(None, SIZES["context"])
    settings = {**SIZES, "steps": steps, "seed": seed}
    config = train_lm.Config(optimizer, learning_rate, corpus.digest, **settings)
    graph, params = nnx.split(train_lm.GPT(config, corpus.symbols), nnx.Param)
    transformation = config.make_optimizer()
    opt_state = transformation.init(params)

    def loss_of(params, windows):
        logits = nnx.merge(graph, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    @jax.jit
    def step(params, opt_state, count):
        key = jax.random.fold_in(jax.random.key(seed), count)
        last = len(corpus.train) - config.context
        starts = jax.random.randint(key, (config.batch, 1), 0, last)
        windows = corpus.train[starts + jnp.arange(config.context + 1)]
        grads = jax.grad(loss_of)(params, windows)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, matrices_of(grads)

    for count in range(steps):
        params, opt_state, matrices = step(params, opt_state, count)
        yield matrices
