"""LoRA on any task: the model stays as it is, and two thin factors are added to every kernel.

`W = W_0 + A B` with `A` of `m × r`, drawn with a standard deviation of `1/√m`, and `B = 0`. The
scale `α/r` is left out, because the learning rate is tuned. Everything else is frozen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._tasks import Task


def kernels_of(params: Any) -> dict[str, jax.Array]:
    """Matrices and stacks of them by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    return {name: x for name, x in named.items() if "kernel" in name and x.ndim > 1}


def added(params: Any, changes: dict[str, jax.Array]) -> Any:
    """The parameters with changes added to some of them, by path."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x + changes[name] if name in changes else x

    return jax.tree_util.tree_map_with_path(one, params)


def with_adapters(task: Task, rank: int) -> Task:
    """The same task, in which adapters of a rank are trained."""
    base = task.params(jax.random.key(0))

    def params(key: jax.Array) -> Any:
        found = {}
        for i, (name, x) in enumerate(kernels_of(base).items()):
            *stack, m, n = x.shape
            a = jax.random.normal(jax.random.fold_in(key, i), (*stack, m, rank)) / m**0.5
            found[name.replace("/", ".")] = {"lora_a": a, "lora_b": jnp.zeros((*stack, rank, n))}
        return found

    def merged(adapters: Any, base: Any) -> Any:
        changes = {k.replace(".", "/"): x["lora_a"] @ x["lora_b"] for k, x in adapters.items()}
        return added(base, changes)

    return dataclasses.replace(
        task,
        data=(task.data, base),
        params=params,
        loss_of=lambda adapters, data, places: task.loss_of(
            merged(adapters, data[1]), data[0], places
        ),
        evaluate=lambda adapters: task.evaluate(merged(adapters, base)),
        test=lambda adapters: task.test(merged(adapters, base)),
    )
