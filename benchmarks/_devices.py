"""What dividing matrices among simulated devices moves and saves, from compiled programs."""

from __future__ import annotations

import collections
import contextlib
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import curvax

from ._trees import Shapes, abstract_kernels

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hlo import Collective, collectives

CUTS = {"replicated": P(), "by row": P("x"), "by column": P(None, "x")}
MODULES = ("linalg._eigh", "linalg._inverse_root", "kronecker._factor")  # that decompose


class Point(NamedTuple):
    """What was found on so many devices, of the device that has most."""

    state: int
    decompositions: int
    received: float


def simulate(devices: int) -> None:
    """Makes as many devices of the CPU, if JAX has not started yet."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)
    if len(jax.devices("cpu")) < devices:
        raise RuntimeError(f"JAX has started with less than {devices} devices of the CPU")


def mesh_of(devices: int, kind: str = "Auto") -> Mesh:
    """The first devices of the CPU."""
    types = (getattr(AxisType, kind),)
    return jax.make_mesh((devices,), ("x",), types, devices=jax.devices("cpu")[:devices])


def abstract_state(optimizer: Any, params: Any, mesh: Mesh) -> Any:
    """The state's shapes, and how it lies."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        curvax.state_sharding(optimizer, params, mesh),
    )


def own_bytes(state: Any) -> int:
    """Of a state on one device."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state)
    )


def compiled_step(optimizer: Any, params: Any, state: Any) -> Any:
    """The update, its state donated."""
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(optimizer.update, out_shardings=shardings, donate_argnums=1)
    return step.lower(params, state, params).compile()


def exchanged(optimizer: Any, params: Any, state: Any) -> list[Collective]:
    """The collectives of a step."""
    return collectives(compiled_step(optimizer, params, state).as_text() or "")


@contextlib.contextmanager
def logged_decompositions(log: collections.Counter[int]) -> Iterator[None]:
    """What is compiled inside counts the decompositions that each device executes."""
    modules = [importlib.import_module(f"curvax.transforms.{name}") for name in MODULES]
    plain = modules[0].eigh

    def logged(a: jax.Array) -> Any:
        device = jax.lax.axis_index("x")
        jax.debug.callback(lambda device, _: log.update([int(device)]), device, a[..., 0, 0])
        return plain(a)

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "eigh", logged))
        yield


def point(make: Any, model: Shapes, devices: int, seed: int) -> Point:
    """State, decompositions executed at a refresh and bytes received, kernels cut by columns."""
    mesh = mesh_of(devices)
    optimizer = make(mesh=mesh)
    params = abstract_kernels(model, jnp.float32, sharding=NamedSharding(mesh, CUTS["by column"]))
    state = abstract_state(optimizer, params, mesh)
    log: collections.Counter[int] = collections.Counter()
    with logged_decompositions(log):
        step = compiled_step(optimizer, params, state)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    grads = treedef.unflatten(
        jax.device_put(jax.random.normal(key, x.shape), x.sharding)
        for key, x in zip(keys, leaves, strict=True)
    )
    lying = jax.tree.map(lambda x: x.sharding, state)
    first = jax.jit(optimizer.init, out_shardings=lying)(grads)
    jax.block_until_ready(step(grads, first, grads))
    jax.effects_barrier()
    received = sum(c.received(devices) for c in collectives(step.as_text() or ""))
    return Point(own_bytes(state), max(log.values(), default=0), received)


def traffic(name: str, make: Any, model: Shapes, kind: str, devices: int) -> dict[str, Any]:
    """Bytes received by a device over those of the matrices, by cut, and its share of the state."""
    mesh = mesh_of(devices, kind)
    theirs = name.startswith("optax")
    optimizer = make() if theirs else make(mesh=mesh)
    row: dict[str, Any] = {"method": name, "axis": kind}
    for label, cut in CUTS.items():
        params = abstract_kernels(model, jnp.float32, sharding=NamedSharding(mesh, cut))
        try:
            state = abstract_state(optimizer, params, mesh)
            found = exchanged(optimizer, params, state)
        except Exception as error:
            if not theirs:
                raise
            # On Explicit axes it raises, each version of JAX something else.
            row |= {label: type(error).__name__, f"{label}, collectives": None}
            continue
        size = sum(4 * x.size for x in jax.tree.leaves(params))
        row[label] = sum(c.received(devices) for c in found) / size
        row[f"{label}, collectives"] = len(found)
        row["inside"] = row.get("inside", 0) + sum(c.inside for c in found)
        if not theirs:
            whole = curvax.state_bytes(
                make(matrices=curvax.MatrixRule(block_size=None, stack=True)), params
            )
            row["state"] = devices * own_bytes(state) / whole
    return row


PEER = ("optax.contrib.muon", lambda: optax.contrib.muon(0.1))
