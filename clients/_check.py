"""What every client asserts: matrices are treated as meant, the loss falls, a restart continues."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import curvax

EXPECTED = Path(__file__).parent / "expected"
STEPS = 40


def treatments(optimizer: Any, params: Any) -> str:
    """The table of `summarize` without bytes, which a new dtype may change."""
    lines = curvax.summarize(optimizer, params).split("\n\n")[0].splitlines()
    rows = [
        line.split(" | ")[:3] for line in lines[2:] if not line.startswith(("| shared", "| **"))
    ]
    return "\n".join(" | ".join(row) for row in rows) + "\n"


def check(client: str, optimizer: Any, params: Any, loss_of: Callable[..., Any]) -> None:
    """Trains `params`, an ordinary tree of arrays, on the loss of a random key."""
    found, path = treatments(optimizer, params), EXPECTED / f"{client}.md"
    if "--write" in sys.argv:
        path.write_text(found)
    assert found == path.read_text(), f"{path.name} says otherwise; now it is\n{found}"

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run(params: Any, state: Any, keys: Any) -> Any:
        losses = []
        for key in keys:
            params, state, loss = step(params, state, key)
            losses.append(float(loss))
        return params, state, losses

    keys = jax.random.split(jax.random.key(0), STEPS)
    whole, _, losses = run(params, optimizer.init(params), keys)
    print(f"loss {np.mean(losses[:5]):.3f} → {np.mean(losses[-5:]):.3f}")
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert step._cache_size() == 1

    half, state, _ = run(params, optimizer.init(params), keys[: STEPS // 2])
    saved = jax.tree.map(np.asarray, curvax.portable_state(optimizer, half, state))
    restored = curvax.place_state(optimizer, half, saved)
    resumed, *_ = run(half, restored, keys[STEPS // 2 :])
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    print("a restart continues bit for bit")
