"""Fine-tuning: a GPT that has read prose learns code.

The model that everything starts from is trained here once, by nanoGPT's recipe with its published
numbers for AdamW, and kept under runs/evidence.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax

from .._training import Task, load, save
from ._adapters import by_path
from ._language import RECIPE, language
from ._methods import optimizer

RUNS = Path("runs", "evidence")
STEPS = 2000  # of the model that is fine-tuned
PUBLISHED = {"rate": 1e-3, "decay": 1e-4, "b1": 0.9, "b2": 0.99}  # nanoGPT's, for AdamW
EXTRACTED = (8, 16)  # ranks at which the change is extracted


def trained(task: Task, optimizer: optax.GradientTransformation, seed: int) -> Any:
    """The parameters after the task's steps."""
    params = task.params(jax.random.key(seed))
    batches = task.batches(seed)

    @jax.jit
    def step(params: Any, state: Any, data: Any, places: jax.Array) -> Any:
        grads = jax.grad(task.loss_of)(params, data, places)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for places in batches:
        params, state = step(params, state, task.data, places)
    return params


def base(sizes: Mapping[str, int], steps: int = STEPS) -> Any:
    """A model trained on prose, from the file that keeps it if there is one."""
    task = language("prose", steps, **sizes)
    told = repr([sorted(sizes.items()), steps, task.sizes["text"], jax.__version__])
    path = RUNS / f"prose-{hashlib.sha256(told.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        adamw = optimizer("adamw", steps, {}, PUBLISHED)
        save(path, trained(task, adamw, seed=0))
    return load(path, jax.eval_shape(task.params, jax.random.key(0)))


def digest(params: Any) -> str:
    """The digest of parameters; the same base on another machine may differ by rounding."""
    whole = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    return hashlib.sha256(whole).hexdigest()[:16]


def extracted(before: Any, after: Any, rank: int) -> Any:
    """`after` with the change of its matrices as `curvax.extract_adapter` gives it at a rank."""
    adapters = curvax.extract_adapter(before, after, rank=rank)

    def one(path: str, old: jax.Array, new: jax.Array) -> jax.Array:
        own = adapters.get(path.removesuffix("/value"))
        return new if own is None else old + (own.a @ own.b).reshape(old.shape)

    return by_path(one, before, after)


def finetune(steps: int, first: int = STEPS, **sizes: int) -> Task:
    """From prose to code; tested on prose, and on code with the change at low ranks."""
    sizes = RECIPE | sizes
    before = base(sizes, first)
    code = language("code", steps, **sizes)
    prose = language("prose", steps, **sizes)

    def test(params: Any) -> dict[str, jax.Array]:
        found = {"prose": prose.evaluate(params)}
        for rank in EXTRACTED:
            found[f"extracted at {rank}"] = code.evaluate(extracted(before, params, rank))
        return found

    return dataclasses.replace(
        code,
        sizes={**code.sizes, "before": prose.sizes["text"], "first": first, "base": digest(before)},
        params=lambda key: jax.tree.map(jnp.copy, before),
        test=test,
    )
