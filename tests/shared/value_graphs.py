"""Whether two versions compute the same: `python -m tests.shared.value_graphs FILE`.

It traces all methods with their policies, storages and roots, and on a mesh, and writes digests
of what they compute. If FILE is there, it prints what differs from it. With CURVAX_ALL_CELLS=1 it
traces recipes too.
"""

import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from tests.fault_model import REFRESH, STORAGE
from tests.helpers import computations, digest
from tests.registry import REGISTRY


def digests() -> dict[str, str]:
    shapes = [(32, 64), (32, 64), (64, 32), (32, 32), (160, 96), (160, 96), (160, 96)]
    params = {str(i): {"kernel": jnp.ones(x), "bias": jnp.ones(x[1])} for i, x in enumerate(shapes)}
    mesh, found = jax.make_mesh((jax.device_count(),), ("devices",)), {}
    for row in tqdm(REGISTRY):
        changes = [{}, {"mesh": mesh}, *({"refresh": REFRESH[name](2)} for name in row.policies)]
        changes += [{"method": "rotations"}, {"method": "products"}]
        storages = [{"storage": x} for x in STORAGE.values()] if row.factors else [{}]
        for given in itertools.product(changes, storages):
            try:
                t = row.make(**given[0], **given[1])
            except (TypeError, ValueError):
                continue  # the method does not take this
            values = computations(lambda p, t=t: (s := t.init(p), t.update(p, s, p)), params)
            found[f"{row.name} {given}"] = digest(str(jax.tree.leaves(values)))
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    file, found = Path(sys.argv[1]), digests()
    if not file.exists():
        file.write_text(json.dumps(found, indent=0))
    before = json.loads(file.read_text())
    other = [name for name in found if before.get(name) != found[name]]
    print(f"{len(found)} programs; differ or are new: {len(other)}", *other, sep="\n  ")
