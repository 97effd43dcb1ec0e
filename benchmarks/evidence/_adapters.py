"""LoRA on any task: the model stays as it is, and two thin factors are added to every kernel.

`W = W_0 + A B` with `A` of `m × r`, drawn with a standard deviation of `1/√m`, and `B = 0`. The
scale `α/r` is left out, because the learning rate is tuned. Everything else is frozen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._training import Task


def by_path(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree whose leaves are `change(path, leaf, …)`, with paths such as `layers/up/kernel`."""
    named = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda p, *x: change(named(p), *x), tree, *others)


def with_adapters(task: Task, rank: int) -> Task:
    """The same task, in which adapters of a rank are trained."""
    base = task.params(jax.random.key(0))

    def params(key: jax.Array) -> Any:
        found: dict[str, Any] = {}

        def add(path: str, x: jax.Array) -> None:
            if "kernel" in path and x.ndim > 1:
                *stack, m, n = x.shape
                own = jax.random.fold_in(key, len(found))
                a = jax.random.normal(own, (*stack, m, rank)) / m**0.5
                b = jnp.zeros((*stack, rank, n))
                found[path.replace("/", ".")] = {"lora_a": a, "lora_b": b}

        by_path(add, base)
        return found

    def merged(adapters: Any, base: Any) -> Any:
        changes = {k.replace(".", "/"): x["lora_a"] @ x["lora_b"] for k, x in adapters.items()}
        return by_path(lambda path, x: x + changes[path] if path in changes else x, base)

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
