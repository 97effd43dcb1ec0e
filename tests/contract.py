"""Small parameters, and every optimizer's steps on them, compiled once for all contract tests."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import nnx

from tests.cells import cells
from tests.helpers import gradients_like, normal, run, traced
from tests.registry import REGISTRY, Row

PLAIN = cells(REGISTRY, of=4)
"""Methods for tests that compare something with plain steps, which are compiled for these alone."""


def small_tree(dtype: str = "float32") -> dict[str, dict[str, jax.Array]]:
    """Parameters for all that follows, in one shape and one stack so that little is compiled."""
    shapes = {"dense": {"kernel": (4, 6), "bias": (6,)}, "head": {"kernel": (4, 6)}}
    return normal(jax.random.key(2), shapes, dtype)


def two_stacks() -> dict[str, dict[str, jax.Array]]:
    """`small_tree` with its head transposed."""
    params = small_tree()
    return params | {"head": {"kernel": params["head"]["kernel"].T}}


@functools.cache
def compiled(row: Row) -> Any:
    """The optimizer with a jitted update, which compiles once for all tests on `small_tree`."""
    optimizer = row.make()
    return optax.GradientTransformationExtraArgs(optimizer.init, jax.jit(optimizer.update))


def shapes_and_dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@functools.cache
def small_run(row: Row) -> tuple[list[Any], list[Any]]:
    """Three plain steps on `small_tree`, with which compositions are compared.

    The updates are NumPy arrays.
    """
    params = small_tree()
    updates, states = run(compiled(row), gradients_like(params, 3), params, jit=False)
    return jax.device_get(updates), states


def small_updates(row: Row, rates: Sequence[float]) -> list[Any]:
    """The updates of `small_run`, but at these learning rates instead of 0.1."""
    updates, states = small_run(row)
    if not row.blind_to_norms:  # they are proportional to the rate
        scaled = zip(rates, updates, strict=False)
        return [jax.tree.map(lambda x, r=rate: x * (r / 0.1), u) for rate, u in scaled]
    params = small_tree()
    step = jax.jit(lambda rate, *given: row.make(rate).update(*given)[0])
    steps = zip(rates, gradients_like(params, 3), [compiled(row).init(params), *states])  # noqa: B905
    return [step(rate, gradient, state, params) for rate, gradient, state in steps]


@functools.cache
def small_training(row: Row) -> Any:
    """`small_tree` after three steps of training."""
    params, optimizer = small_tree(), compiled(row)
    state = optimizer.init(params)
    for gradient in gradients_like(params, 3):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@functools.cache
def plain_step(row: Row) -> tuple[str, Any, Any]:
    """What a plain step on `small_tree` computes; the shapes of the state before and after it."""
    params, optimizer = small_tree(), row.make()
    state = jax.eval_shape(optimizer.init, params)
    text, (_, after) = traced(optimizer.update, params, state, params)
    return text, state, after


class Model(nnx.Module):
    """The NNX counterpart of `small_tree`."""

    def __init__(self) -> None:
        params = small_tree()
        self.dense = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 6, use_bias=False, rngs=nnx.Rngs(0))
        nnx.update(self, params)
