"""A pipeline of two stages: a process has one, its parameters and an optimizer of its own.

python -m tests.shared.stages HOST:PORT FOLDER PROCESS trains a stage on two devices of its own, and
writes its portable state.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import curvax

STAGES, STEPS = 2, 3
SHAPES = {"up/kernel": (8, 12), "down/kernel": (12, 8), "out/kernel": (8, 12), "up/bias": (12,)}


def make(**mesh: Any) -> Any:
    """An optimizer of one stage, or of both."""
    return curvax.soap(0.1, refresh=2, weight_decay=0.1, **mesh)


def arrays(stage: int, step: int) -> dict[str, np.ndarray]:
    """Gradients of a stage at a step from 1 on, or its parameters at 0."""
    draws = np.random.default_rng((stage, step))
    return {
        f"stage{stage}/{name}": draws.standard_normal(shape, np.float32)
        for name, shape in SHAPES.items()
    }


def on(mesh: Mesh, tree: Any) -> Any:
    """Arrays with their first axes along the devices."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("x"))), tree)


def path_of(folder: Path, stage: int) -> Path:
    return folder / f"{stage}.npz"


def main(address: str, folder: str, process: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, STAGES, int(process))
    assert jax.device_count() == 4
    mesh, stage = Mesh(np.array(jax.local_devices()), "x"), jax.process_index()
    optimizer, params = make(mesh=mesh), on(mesh, arrays(stage, 0))
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for step in range(1, STEPS):
        _, state = update(on(mesh, arrays(stage, step)), state, params)
    leaves = jax.tree.leaves(curvax.portable_state(optimizer, params, state))
    np.savez(path_of(Path(folder), stage), *map(np.asarray, leaves))


if __name__ == "__main__":
    main(*sys.argv[1:])
