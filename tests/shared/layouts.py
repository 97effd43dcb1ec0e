"""How code that people train with lays out its kernels over meshes, and what a step exchanges."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.hlo import Collective, collectives
from tests.shared.meshes import abstract_state, mesh_of

DEVICES = 8
KINDS = ("auto", "auto, shardings", "explicit")
"""Axes, and whether `mesh=` is a mesh or the shardings of the parameters."""
ALONE = ("auto, no mesh", "explicit, no mesh")
"""The same axes without `mesh=`."""


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    spec: P
    axes: curvax.MatrixAxes = curvax.MatrixAxes(0, 1)


class Layout(NamedTuple):
    """A mesh, kernels on it, and `matrices=`."""

    mesh: tuple[int, ...]
    leaves: Mapping[str, Leaf]
    rule: Mapping[str, Any] = {}


BATCH, TWO = curvax.MatrixAxes(1, 2), curvax.MatrixAxes(2, 3)
PARTS = curvax.MatrixAxes(0, 1, column_parts=(32, 16, 16))
GROUPED = curvax.MatrixAxes(0, 1, column_parts=(32, 8, 8))
HEADS, OUT = curvax.MatrixAxes(0, (1, 2)), curvax.MatrixAxes((0, 1), 2)


def several(count: int, *leaf: Any) -> dict[str, Leaf]:
    return {f"{i}/kernel": Leaf(*leaf) for i in range(count)}


def attention(count: int, over: P, out: P, heads: int = 8, groups: int = 4) -> dict[str, Leaf]:
    """Queries, keys of grouped queries, and outputs."""
    found = {}
    for i in range(count):
        found[f"{i}/query"] = Leaf((32, heads, 8), over, HEADS)
        found[f"{i}/key"] = Leaf((32, groups, 8), over, HEADS)
        found[f"{i}/out"] = Leaf((heads, 8, 32), out, OUT)
    return found


def maxtext() -> dict[str, Leaf]:
    """A scanned Mixtral of MaxText: FSDP along the model's width, and experts over "y"."""
    wide, narrow = (8, 4, 32, 64), (8, 4, 64, 32)
    heads, out = (32, 4, 8, 8), (8, 4, 8, 32)
    return {
        "wi_0": Leaf(wide, P("y", None, "x"), TWO),
        "wi_1": Leaf(wide, P("y", None, "x"), TWO),
        "wo": Leaf(narrow, P("y", None, None, "x"), TWO),
        "query": Leaf(heads, P("x"), curvax.MatrixAxes(0, (2, 3))),
        "out": Leaf(out, P(None, None, None, "x"), curvax.MatrixAxes((0, 2), 3)),
    }


def levanter() -> dict[str, Leaf]:
    """A scanned Llama of Levanter, `(out, in)`: FSDP along its width, heads and MLP over "y"."""
    turned, queries = curvax.MatrixAxes(2, 1), curvax.MatrixAxes(4, (1, 2, 3))
    return {
        "gate": Leaf((4, 64, 32), P(None, "y", "x"), turned),
        "down": Leaf((4, 32, 64), P(None, "x", "y"), turned),
        "query": Leaf((4, 4, 2, 8, 32), P(None, "y", None, None, "x"), queries),
        "out": Leaf((4, 32, 8, 8), P(None, "x", "y"), curvax.MatrixAxes((2, 3), 1)),
    }


LAYOUTS = {
    "dense, FSDP along rows": Layout((8,), several(8, (32, 64), P("x"))),
    "dense, FSDP along columns": Layout((8,), several(8, (32, 64), P(None, "x"))),
    "dense, FSDP over two axes": Layout((2, 4), several(8, (32, 64), P(("x", "y")))),
    "dense, FSDP and tensor": Layout((2, 4), several(8, (32, 64), P("x", "y"))),
    "dense, tensor and FSDP": Layout((2, 4), several(8, (32, 64), P("y", "x"))),
    "dense, three axes": Layout((2, 2, 2), several(8, (32, 64), P(("x", "z"), "y"))),
    "dense, mixed": Layout(
        (2, 4),
        several(8, (32, 32), P("x", "y"))
        | {f"{i}/out": Leaf((32, 32), P("y", "x")) for i in range(8)},
    ),
    "dense, an uneven count": Layout((2, 4), several(13, (32, 64), P("x", "y"))),
    "scanned, an uneven count": Layout((2, 4), several(2, (6, 32, 64), P(None, "x", "y"), BATCH)),
    "heads, an uneven count": Layout(
        (2, 4), attention(5, P("y", "x"), P("x", None, "y"), heads=6, groups=2)
    ),
    "scanned, FSDP": Layout((8,), several(2, (8, 32, 64), P(None, "x"), BATCH)),
    "scanned, FSDP and tensor": Layout((2, 4), several(2, (8, 32, 64), P(None, "x", "y"), BATCH)),
    "scanned, layers over stages": Layout((2, 4), several(2, (8, 32, 64), P("x", "y"), BATCH)),
    "experts over a part, FSDP along rows": Layout(
        (2, 4), several(2, (8, 32, 64), P("x", "y"), BATCH)
    ),
    "experts over a part, FSDP along columns": Layout(
        (2, 4), several(2, (8, 32, 64), P("x", None, "y"), BATCH)
    ),
    "experts over a part, whole along the other": Layout(
        (2, 4), several(2, (8, 32, 64), P("y"), BATCH)
    ),
    "experts over all devices": Layout((2, 4), several(2, (8, 32, 64), P(("x", "y")), BATCH)),
    "experts over three axes": Layout((2, 2, 2), several(2, (8, 32, 64), P("x", "y", "z"), BATCH)),
    "experts, an uneven count": Layout((2, 4), several(1, (12, 32, 64), P("y", "x"), BATCH)),
    "layers over stages, an uneven count": Layout(
        (2, 4), several(1, (6, 32, 64), P("x", "y"), BATCH)
    ),
    "layers and experts": Layout((2, 4), several(2, (4, 8, 32, 64), P(None, "x", None, "y"), TWO)),
    "layers and experts, rows": Layout((2, 4), several(2, (4, 8, 32, 64), P(None, "y", "x"), TWO)),
    "heads": Layout((2, 4), attention(8, P(None, "y"), P("y"))),
    "heads and FSDP": Layout((2, 4), attention(8, P("x", "y"), P("y", None, "x"))),
    "heads and FSDP, three axes": Layout(
        (2, 2, 2), attention(8, P("x", "y", "z"), P("y", "z", "x"))
    ),
    "merged heads, each a matrix": Layout(
        (2, 4), several(2, (32, 64), P("x", "y"), curvax.MatrixAxes(0, 1, column_heads=8))
    ),
    "merged heads, FSDP": Layout(
        (8,), several(4, (32, 64), P(None, "x"), curvax.MatrixAxes(0, 1, column_heads=4))
    ),
    "merged heads, whole along an axis": Layout(
        (2, 2, 2),
        several(4, (32, 64), P(None, ("x", "y")), curvax.MatrixAxes(0, 1, column_heads=2)),
    ),
    "queries, keys and values in one": Layout((2, 4), several(8, (32, 64), P("x", "y"), PARTS)),
    "blocks": Layout((2, 4), several(8, (32, 64), P("x", "y")), {"block_size": 32}),
    "blocks along both sides": Layout(
        (2, 4), several(8, (32, 64), P("x", "y")), {"block_size": 16}
    ),
    "blocks along both sides, cut": Layout(
        (4, 2), several(8, (32, 64), P("x", "y")), {"block_size": 16}
    ),
    "blocks that do not divide": Layout((8,), several(8, (64, 80), P("x")), {"block_size": 30}),
    "merged heads, three for four devices": Layout(
        (2, 4), several(4, (32, 48), P("x", "y"), curvax.MatrixAxes(0, 1, column_heads=6))
    ),
    "grouped queries, keys and values in one": Layout(
        (2, 4), several(5, (32, 48), P("x", "y"), GROUPED)
    ),
    "parts of an uneven count": Layout((2, 4), several(9, (32, 64), P("x", "y"), PARTS)),
    "scanned parts of an uneven count": Layout(
        (2, 4),
        several(
            1, (12, 32, 48), P(None, "x", "y"), curvax.MatrixAxes(1, 2, column_parts=(32, 8, 8))
        ),
    ),
    "convolutions over their inputs": Layout(
        (8,), several(8, (3, 3, 16, 32), P(None, None, "x"), curvax.MatrixAxes((0, 1, 2), 3))
    ),
    "MaxText, FSDP and experts": Layout((2, 4, 1), maxtext()),
    "Levanter, FSDP and tensor": Layout((2, 4), levanter()),
    "whole on every device": Layout((2, 4), several(8, (32, 64), P())),
}


class Cost(NamedTuple):
    """What a device receives in a step, over its share of the matrices' bytes."""

    collectives: tuple[Collective, ...]
    received: float
    gathered: float


def optimizer_of(layout: Layout, **settings: Any) -> Any:
    """Muon for a layout."""
    axes = {name: leaf.axes for name, leaf in layout.leaves.items()}
    rule = curvax.MatrixRule(weight_dimension_numbers=axes, **layout.rule)
    return curvax.muon(0.1, matrices=rule, **settings)


def lowered(name: str, kind: str, dtype: str = "float32", **settings: Any) -> tuple[Any, Any]:
    """A step in a layout before it is compiled, and the parameters, all of this dtype."""
    layout, (axes, *given) = LAYOUTS[name], kind.split(", ")
    mesh = mesh_of(axes, *layout.mesh)
    params = {
        key: jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(mesh, x.spec))
        for key, x in layout.leaves.items()
    }
    if "no mesh" not in given:
        known = jax.tree.map(lambda x: x.sharding, params)
        settings["mesh"] = known if "shardings" in given else mesh
    optimizer = optimizer_of(layout, **settings)
    state = abstract_state(optimizer, params, mesh)
    outputs = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(optimizer.update, out_shardings=outputs)
    return step.lower(params, state, params), params


def share_of(params: Any) -> float:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in params.values()) / DEVICES


def bound_of(name: str) -> float:
    """What a device may receive in a step, over its share of the matrices, both ways.

    Twice its share each way, and what it has of updates beyond a share: the updates of kernels that
    are whole along a mesh axis have to come from devices along it.
    """
    layout = LAYOUTS[name]
    mesh = mesh_of("auto", *layout.mesh)
    whole = sum(math.prod(x.shape) for x in layout.leaves.values())
    own = sum(
        math.prod(NamedSharding(mesh, x.spec).shard_shape(x.shape)) for x in layout.leaves.values()
    )
    return 4 + (own * DEVICES / whole - 1)


def cost_of(name: str, kind: str) -> Cost:
    """The exchange of a step in a layout, in the compiled program."""
    step, params = lowered(name, kind)
    found, share = collectives(step.compile().as_text()), share_of(params)
    gathered = sum(x.received(DEVICES) for x in found if x.kind == "all-gather")
    return Cost(tuple(found), sum(x.received(DEVICES) for x in found) / share, gathered / share)
