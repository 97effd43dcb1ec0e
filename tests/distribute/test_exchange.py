"""What a state takes on each device, and what devices exchange at a step."""

import collections
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.helpers import OPTIMIZED
from tests.hlo import Collective, collectives
from tests.registry import NAMED
from tests.shared.meshes import AXIS_TYPES, abstract, abstract_state, explicit_by_default, mesh_of

DEVICES = 8


def layers(order: int, scanned: bool) -> dict[str, tuple[int, ...]]:
    """The matrices of a transformer: of twelve layers in one array, or of four in an array each.

    Either way they are stacks, on different ways there.
    """
    one = {f"{name}/kernel": (order, order) for name in "qkvo"}
    one |= {"up/kernel": (order, 4 * order), "down/kernel": (4 * order, order)}
    if scanned:
        return {name: (12, *shape) for name, shape in one.items()}
    return {f"{layer}/{name}": shape for layer in range(4) for name, shape in one.items()}


def scanned_axes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Which axes the matrices are, where there is one more."""
    axes = curvax.MatrixAxes(rows=1, columns=2)
    three = {name: axes for name, shape in shapes.items() if len(shape) == 3}
    return {"weight_dimension_numbers": three} if three else {}


@pytest.mark.parametrize(
    ("name", "kind"),
    cells(
        [("shampoo", "auto"), ("soap", "explicit"), ("muon", "auto"), ("alice", "explicit")], of=2
    ),
)
def test_a_device_has_its_share_of_the_state(name: str, kind: str) -> None:
    mesh = mesh_of(kind, DEVICES)
    shapes = layers(16, scanned=True) | {"head/kernel": (16, 4)}  # one that is left over
    make = functools.partial(NAMED[name].make, **scanned_axes(shapes))
    optimizer, params = make(mesh=mesh), abstract(shapes, NamedSharding(mesh, P()))
    state, one = abstract_state(optimizer, params, mesh), curvax.state_bytes(make(), params)
    leaves = jax.tree.leaves(state)
    each = sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    assert all(len(x.sharding.device_set) == DEVICES for x in leaves)
    assert one / DEVICES <= each <= 1.15 * one / DEVICES
    # All devices together, padding counted; scalars are counted once.
    total = curvax.state_bytes(optimizer, params)
    assert one <= total <= DEVICES * each <= total + 64 * DEVICES


def exchanged(make: Any, shapes: Any, specs: P, mesh: Mesh) -> list[Collective]:
    """The collectives of a step, parameters cut like this."""
    optimizer, params = make(), abstract(shapes, NamedSharding(mesh, specs))
    state = abstract_state(optimizer, params, mesh)
    outputs = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(optimizer.update, out_shardings=outputs)
    program: Any = step.lower(params, state, params).compile().as_text()
    return collectives(program)


LAYOUTS = {"whole": (), "by_row": ("x",), "by_column": (None, "x")}


@pytest.mark.parametrize(
    ("name", "kind", "layout", "scanned"),
    cells(("muon", "shampoo"), AXIS_TYPES, LAYOUTS, (True, False), of=24),
)
def test_a_step_exchanges_at_most_twice_the_matrices(
    name: str, kind: str, layout: str, scanned: bool
) -> None:
    """And nothing within a refresh or another loop, where devices would wait for each other."""
    mesh, shapes = mesh_of(kind, DEVICES), layers(8, scanned)
    make = functools.partial(NAMED[name].make, mesh=mesh, **scanned_axes(shapes))
    if name == "shampoo":
        make = functools.partial(make, side="left")
    specs = P(None, *LAYOUTS[layout]) if scanned else P(*LAYOUTS[layout])
    found = exchanged(make, shapes, specs, mesh)
    assert found and not any(x.inside for x in found)
    matrices, received = 4 * numbers(shapes), sum(x.received(DEVICES) for x in found)
    # Every device needs the updates of others' matrices, at the least of its own part of each.
    assert matrices / DEVICES <= received <= 2 * matrices


FEWER = {f"{i}/up": (32, 64) for i in range(3)} | {f"{i}/down": (64, 32) for i in range(4)}
UNEVEN = {f"{i}/kernel": (32, 17) for i in range(DEVICES)}
LAYER = {"q": (16, 16), "up": (16, 64), "down": (64, 16)}
TWELVE = {f"{i}/{name}": shape for i in range(12) for name, shape in LAYER.items()}


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


BOUNDS: dict[str, tuple[Any, P, float, float]] = {  # of the numbers that a device receives
    # What it owns, twice each way, and not the whole gradients
    "rows where devices do not divide columns": (UNEVEN, P("x"), 1, 4 * numbers(UNEVEN) / DEVICES),
    # One matrix of each shape there and back, and not the gradients and the updates of all
    "fewer matrices than devices": (FEWER, P(None, "x"), 1, 2 * (32 * 64 + 64 * 32)),
    # As the docs say: of twelve layers eight are divided evenly, `B`; four are dealt out, `S` each.
    "layers cut by rows": (
        TWELVE,
        P("x"),
        numbers(LAYER),
        4 * (8 * numbers(LAYER)) / DEVICES + 4 * numbers(LAYER),
    ),
}


@explicit_by_default
@pytest.mark.parametrize("name", BOUNDS)
def test_a_device_receives_what_it_needs(name: str, kind: str) -> None:
    mesh, (shapes, specs, least, most) = mesh_of(kind, DEVICES), BOUNDS[name]
    found = exchanged(lambda: curvax.muon(0.1, mesh=mesh), shapes, specs, mesh)
    assert not any(x.inside for x in found)
    assert 4 * least <= sum(x.received(DEVICES) for x in found) <= 4 * most


def test_muon_gathers_far_less_often_than_optax_does() -> None:
    """Whose iterations multiply matrices that are cut. In one layer."""
    mesh = mesh_of("auto", DEVICES)
    shapes = {name: shape[1:] for name, shape in layers(8, scanned=True).items()}
    ours = exchanged(lambda: curvax.muon(0.1, mesh=mesh), shapes, P("x"), mesh)
    theirs = exchanged(lambda: optax.contrib.muon(0.1, ns_steps=5), shapes, P("x"), mesh)
    kinds = ("all-gather", "all-reduce")
    gathers = [sum(x.kind in kinds for x in found) for found in (ours, theirs)]
    assert 10 * gathers[0] <= gathers[1], gathers


# Optax 0.2.6 has no GaLore yet.
THEIRS = [name for name in ("muon", "galore") if hasattr(optax.contrib, name)]


@pytest.mark.parametrize("name", THEIRS)
def test_explicit_axes_along_matrices_stop_optax_but_not_us(name: str) -> None:
    """Optax multiplies matrices along axes that are sharded, in whose type JAX sees it."""
    mesh, theirs = mesh_of("explicit", DEVICES), getattr(optax.contrib, name)
    params = abstract({"kernel": (16, 32)}, NamedSharding(mesh, P("x")))
    settings = {"rank": 4} if name == "galore" else {}

    def updated(optimizer: Any) -> Any:
        update = lambda g, p: optimizer.update(g, optimizer.init(p), p)[0]  # noqa: E731
        return jax.eval_shape(update, params, params)

    with pytest.raises(Exception, match="shard") as caught:
        updated(theirs(0.1, **settings))
    assert caught.type.__name__ == "ShardingTypeError"  # JAX does not export it
    found = updated(getattr(curvax, name)(0.1, mesh=mesh, **settings))
    assert found["kernel"].sharding.spec == P("x", None)


def test_the_reader_of_programs_finds_what_is_there() -> None:
    """The negative control: exchanges within a loop, within a branch, and outside."""
    mesh, reduce = mesh_of(), functools.partial(jax.lax.psum, axis_name="x")

    def mapped(x: jax.Array) -> Any:
        looped = jax.lax.fori_loop(0, x.shape[0], lambda _, y: reduce(jnp.sin(y)), x)
        branch = jax.lax.cond(
            reduce(x)[0] > 0,
            lambda y: jax.lax.all_gather(y, "x"),
            lambda y: jnp.stack([y] * 4),
            looped,
        )
        return branch, jax.lax.all_to_all(branch, "x", 0, 0)

    step = jax.shard_map(mapped, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    program: Any = jax.jit(step).lower(jnp.ones(12)).compile(OPTIMIZED).as_text()
    found = collections.Counter((x.kind, x.inside) for x in collectives(program))
    assert found["all-reduce", True] == 1 and found["all-reduce", False] == 1
    assert found["all-gather", True] == 1 and found["all-gather", False] == 0
    assert found["all-to-all", False] == 1
    sizes = {x.kind: x.received(4) for x in collectives(program)}
    assert sizes == {"all-reduce": 12, "all-gather": 48 * 3 / 4, "all-to-all": 48}


def test_the_reader_of_programs_tells_groups_of_devices() -> None:
    """Devices along one of two axes, near and far ones, gather a fourth and a half of the whole."""
    mesh = mesh_of("auto", 2, 4)
    for axis, size in (("x", 2), ("y", 4)):
        gather = functools.partial(jax.lax.all_gather, axis_name=axis)
        step = jax.shard_map(gather, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False)
        program: Any = jax.jit(step).lower(jnp.ones(16)).compile(OPTIMIZED).as_text()
        (found,) = collectives(program)
        assert (found.group, found.received(8)) == (size, 64 * (size - 1) / size)
