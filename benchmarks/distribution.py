"""What dividing matrices among devices moves and saves, from compiled programs.

    python benchmarks/distribution.py                 # eight simulated devices, about 6 minutes
    python benchmarks/distribution.py --method soap   # one method

The model is 12 layers of {4 of (d, d), (d, 4d), (4d, d)}, d = 64. Bytes received by a device in a
step are summed over the collectives in the optimized program (an all-gather brings all but what the
device has) and shown over the bytes of the matrices; in brackets the number of collectives. State
is that of one device over what it would be undivided, times the number of devices: 1 is perfect.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import curvax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hlo import collectives  # pyright: ignore[reportMissingImports]

DEVICES = 8
LAYERS, WIDTH = 12, 64
CUTS = {"replicated": P(), "by row": P("x"), "by column": P(None, "x")}
METHODS = {
    "muon": curvax.muon,
    "shampoo": functools.partial(curvax.shampoo, base=None, refresh=20),
    "soap": functools.partial(curvax.soap, refresh=20),
    "alice": functools.partial(curvax.alice, rank=16, leading=5),
    "shampoo, CQ+EF": functools.partial(
        curvax.shampoo,
        base=None,
        refresh=20,
        storage=curvax.cholesky(error_feedback=0.95),
    ),
}
TITLES = ("method", "mesh axis", *CUTS, "state")


def model(sharding: NamedSharding | None) -> Any:
    """The matrices' shapes."""

    def matrix(m: int, n: int) -> Any:
        return {"kernel": jax.ShapeDtypeStruct((m, n), jnp.float32, sharding=sharding)}

    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= {name: (WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    return {
        f"{i:02}": {name: matrix(*shape) for name, shape in shapes.items()} for i in range(LAYERS)
    }


def received(optimizer: Any, params: Any, state: Any) -> str:
    """Bytes that a device receives in a step, over those of the matrices."""
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(optimizer.update, out_shardings=shardings, donate_argnums=1)
    found = collectives(step.lower(params, state, params).compile().as_text() or "")
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    inside = sum(c.inside for c in found)
    note = f", {inside} of them in loops or branches" if inside else ""
    return f"{sum(c.received(DEVICES) for c in found) / size:.2f} ({len(found)}{note})"


def row(name: str, make: Any, kind: str) -> list[str]:
    """One line of the table."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(getattr(AxisType, kind),))
    optimizer, cells, share = make(0.1, mesh=mesh), [], 0.0
    for cut in CUTS.values():
        params = model(NamedSharding(mesh, cut))
        shapes = jax.eval_shape(optimizer.init, params)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            curvax.state_sharding(optimizer, params, mesh),
        )
        cells.append(received(optimizer, params, state))
        own = sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(state)
        )
        share = DEVICES * own / curvax.state_bytes(make(0.1, stack=True), params)
    return [name, kind, *cells, f"{share:.3f}"]


def peer(kind: str) -> list[str]:
    """`optax.contrib.muon` on the same trees."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(getattr(AxisType, kind),))
    cells = []
    for cut in CUTS.values():
        params = model(NamedSharding(mesh, cut))
        optimizer = optax.contrib.muon(0.1)
        try:  # on Explicit axes it raises, each version of JAX something else
            state = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                jax.eval_shape(optimizer.init, params),
                curvax.state_sharding(optimizer, params, mesh),
            )
            cells.append(received(optimizer, params, state))
        except Exception as error:
            cells.append(type(error).__name__)
    return ["optax.contrib.muon", kind, *cells, "as parameters"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", choices=METHODS, help="this one only")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    chosen = {args.method: METHODS[args.method]} if args.method else METHODS
    kinds = ("Auto", "Explicit")
    cells = [(name, make, kind) for name, make in chosen.items() for kind in kinds]
    rows = [row(*cell) for cell in tqdm(cells, unit="row")] + [peer(kind) for kind in kinds]
    print("| " + " | ".join(TITLES) + " |")
    print("|---|---" + "|---:" * (len(TITLES) - 2) + "|")
    for line in rows:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
