"""The assertions of every client: matrices are treated as meant, the loss falls, a restart
continues."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import curvax

EXPECTED = Path(__file__).parent / "expected"
STEPS = 40


# What every client asserts


def treatments(optimizer: Any, params: Any) -> str:
    """The table of `summarize` without bytes, which a new dtype may change."""
    lines = curvax.summarize(optimizer, params).split("\n\n")[0].splitlines()
    rows = [
        line.split(" | ")[:3] for line in lines[2:] if not line.startswith(("| shared", "| **"))
    ]
    return "\n".join(" | ".join(row) for row in rows) + "\n"


def check_treatments(client: str, optimizer: Any, params: Any) -> None:
    """Compares with the stored table; `--write` stores it."""
    found, path = treatments(optimizer, params), EXPECTED / f"{client}.md"
    if "--write" in sys.argv:
        path.write_text(found)
    assert found == path.read_text(), f"{path.name} says otherwise; now it is\n{found}"


def check_falls(losses: Sequence[float], to: float = 0.8) -> None:
    """Compares the last fifth of the losses with the first."""
    fifth = len(losses) // 5
    first, last = np.mean(losses[:fifth]), np.mean(losses[-fifth:])
    print(f"loss {first:.3f} → {last:.3f}")
    assert last < to * first


def check_equal(whole: Any, resumed: Any) -> None:
    """Both trees have the same bits."""
    a, b = named_arrays(whole), named_arrays(resumed)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)
    print(f"a restart continues bit for bit ({len(a)} arrays)")


def named_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths; of a random key its bits."""

    def bits(leaf: Any) -> np.ndarray:
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves}


# For a model that is trained here


def check(client: str, optimizer: Any, params: Any, loss_of: Callable[..., Any]) -> None:
    """Trains `params`, an ordinary tree of arrays, on the loss of a random key."""
    check_treatments(client, optimizer, params)

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
    check_falls(losses)
    assert step._cache_size() == 1

    half, state, _ = run(params, optimizer.init(params), keys[: STEPS // 2])
    saved = jax.tree.map(np.asarray, curvax.portable_state(optimizer, half, state))
    restored = curvax.place_state(optimizer, half, saved)
    resumed, *_ = run(half, restored, keys[STEPS // 2 :])
    check_equal(whole, resumed)


# For a code base that trains by itself


def watched(client: str, optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which compares how it treats the parameters before it starts."""

    def init(params: Any) -> Any:
        check_treatments(client, optimizer, params)
        return optimizer.init(params)

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def check_restart(
    train: Callable[[str, Path, int], tuple[Sequence[float], Any]],
    clients: Sequence[str],
    steps: int = STEPS,
) -> dict[str, list[float]]:
    """Trains without a break, and with one, each part in a process of its own.

    `train(client, folder, steps)` trains until there are `steps` steps in all, from the checkpoint
    that it finds in the folder, with the code base's own loop and checkpoints. It returns the
    losses of its steps, and the parameters and the state of the optimizer after the last.

    Returns the losses of each client.
    """
    found = {}
    if "--train" in sys.argv:
        client, folder, until = sys.argv[sys.argv.index("--train") + 1 :][:3]
        result = train(client, Path(folder), int(until))
        with (Path(folder) / "result.pickle").open("wb") as file:
            pickle.dump((list(map(float, result[0])), named_arrays(result[1])), file)
        return found
    for client in clients:
        with tempfile.TemporaryDirectory() as scratch:
            start = time.perf_counter()
            losses, whole = _in_a_process(client, Path(scratch, "whole"), steps)
            first, _ = _in_a_process(client, Path(scratch, "half"), steps // 2)
            rest, resumed = _in_a_process(client, Path(scratch, "half"), steps)
            print(f"{client}: {time.perf_counter() - start:.0f} s")
        check_falls(losses)
        assert (len(losses), len(first), len(rest)) == (steps, steps // 2, steps - steps // 2)
        check_equal(whole, resumed)
        found[client] = losses
    return found


def _in_a_process(client: str, folder: Path, steps: int) -> tuple[list[float], Any]:
    folder.mkdir(exist_ok=True)
    log = folder / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, *sys.argv, "--train", client, str(folder), str(steps)]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{log.read_text()}\n{client} failed")
    with (folder / "result.pickle").open("rb") as file:
        return pickle.load(file)
