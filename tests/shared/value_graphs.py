"""Whether two versions compute the same: `python -m tests.shared.value_graphs FILE`.

It traces all methods with their policies, storages and solvers, and on a mesh, and writes digests
of what they compute. If FILE is there, it prints what differs from it.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(CURVAX_ALL_CELLS="1", XLA_FLAGS="--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
from tqdm import tqdm

from tests.fault_model import REFRESH, STORAGE
from tests.helpers import computations, digest
from tests.registry import REGISTRY, Row


def settings(row: Row) -> list[dict[str, Any]]:
    changes = [{}, {"method": "tracked"}, {"solver": "tracked"}, {"solver": "products"}]
    changes += [{"refresh": REFRESH[name](2)} for name in row.policies]
    changes += [{"mesh": jax.make_mesh((4,), ("devices",))}]
    storages = [{"storage": x} for x in STORAGE.values()] if row.factors else [{}]
    return [change | storage for change, storage in itertools.product(changes, storages)]


def digests() -> dict[str, str]:
    shapes = [(32, 64), (32, 64), (64, 32), (32, 32), (160, 96), (160, 96), (160, 96)]
    params = {str(i): {"kernel": jnp.ones(x), "bias": jnp.ones(x[1])} for i, x in enumerate(shapes)}
    found, cells = {}, [(row, given) for row in REGISTRY for given in settings(row)]
    for row, given in tqdm(cells):
        try:
            optimizer = row.make(**given)
        except (TypeError, ValueError):
            continue  # the method does not take this
        values = computations(lambda p, f=optimizer: (s := f.init(p), f.update(p, s, p)), params)
        found[f"{row.name} {given}"] = digest(str(jax.tree.leaves(values)))
    return found


if __name__ == "__main__":
    file, found = Path(sys.argv[1]), digests()
    if not file.exists():
        file.write_text(json.dumps(found, indent=0))
    before = json.loads(file.read_text())
    other = [name for name in found if before.get(name) != found[name]]
    print(f"{len(found)} programs; differ or are new: {len(other)}", *other, sep="\n  ")
