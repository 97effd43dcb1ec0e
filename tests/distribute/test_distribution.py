"""Matrices divided among devices: the numbers of one device, a share of its state and its work.

Every method is compared with itself on one device, on meshes with Auto and Explicit axes, for
parameters that are whole on every device or cut by rows, by columns and by both. By default every
third method takes one of these eight cells. All of them:

    CURVAX_ALL_CELLS=1 pytest tests/distribute/test_distribution.py
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from algebra import leaves_in
from helpers import (
    ALL_CELLS,
    OPTIMIZED,
    assert_close,
    gradients_like,
    normal_like,
    run,
    share,
    states_by_parameter,
)
from hlo import Collective, collectives
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from registry import GROWTH, REGISTRY, Row

import curvax
from curvax.transforms.distribute import _shares
from curvax.transforms.kronecker import _factor
from curvax.transforms.linalg import _inverse_root

STEPS = 3
ROWS = {row.name: row for row in REGISTRY}
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
both_axis_types = pytest.mark.parametrize("kind", AXIS_TYPES)
explicit_by_default = pytest.mark.parametrize("kind", share(["explicit", "auto"], of=2))


class Leaf(NamedTuple):
    """A shape, and how meshes cut it: of four devices "x", or of two times two, "x" and "y"."""

    shape: tuple[int, ...]
    by_row: P
    by_column: P
    by_both: P


# Seven matrices of one shape: on four devices one each, and three are left.
LEAVES = {
    "layers/kernel": Leaf((4, 8, 16), P(None, "x"), P("x"), P("x", None, "y")),
    "out/kernel": Leaf((4, 2, 16), P("x"), P(None, None, "x"), P("x", None, "y")),
    "query/kernel": Leaf((8, 4, 4), P("x"), P(None, "x"), P("x", "y")),
    "wide/kernel": Leaf((8, 16), P("x"), P(None, "x"), P("x", "y")),
    "wide/bias": Leaf((16,), P("x"), P("x"), P(("x", "y"))),
}
SHAPES = {name: leaf.shape for name, leaf in LEAVES.items()}
SCANNED = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
CUTS = ("whole", "by_row", "by_column", "by_both")

# Two shapes: on four devices one matrix each, and a round of two tall ones and a wide one.
TWO_SHAPES = {**{f"{i}/kernel": (4, 6) for i in range(5)}, "a/bias": (6,)}
TWO_SHAPES |= {"tall/kernel": (6, 4), "taller/kernel": (6, 4)}


# Meshes and arrays on them.


@functools.cache
def mesh_of(kind: str = "auto", *shape: int) -> Mesh:
    """The first devices, four of them by default."""
    shape = shape or (4,)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple("xyz"[: len(shape)]), axis_types=(AXIS_TYPES[kind],) * len(shape))


def on(mesh: Mesh, tree: Any, specs: Mapping[str, P] | None = None) -> Any:
    """A copy of a tree of parameters on a mesh; whole on every device by default."""
    if specs is None:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), NamedSharding(mesh, P())), tree)
    return {
        k: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[k])) for k, x in tree.items()
    }


def begin(optimizer: Any, params: Any, mesh: Mesh) -> Any:
    """The state as it lies on a mesh."""
    return jax.jit(optimizer.init, out_shardings=curvax.state_sharding(optimizer, params, mesh))(
        params
    )


def steps(optimizer: Any, gradients: Any, params: Any, mesh: Mesh) -> tuple[list[Any], Any]:
    """Updates of every step on a mesh, and the last state."""
    state, step, updates = begin(optimizer, params, mesh), jax.jit(optimizer.update), []
    for gradient in gradients:
        update, state = step(gradient, state, params)
        updates.append(update)
    # JAX has another name for where things lie on a mesh of one device.
    assert mesh.size == 1 or step._cache_size() == 1  # pyright: ignore
    return updates, state


def together(trees: Any) -> Any:
    """Trees in one, along a new first axis."""
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def alone(optimizer: Any, gradients: Any, params: Any) -> tuple[list[Any], list[Any]]:
    """Updates and states of every step without a mesh, from one program."""

    def step(state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return state, (updates, state)

    trajectory = jax.jit(lambda x: jax.lax.scan(step, optimizer.init(params), x)[1])
    found = trajectory(together(gradients))
    found = jax.tree.map(np.asarray, found)
    each = [jax.tree.map(lambda x, t=t: x[t], found) for t in range(len(gradients))]
    return [updates for updates, _ in each], [state for _, state in each]


def jitted(optimizer: Any) -> Any:
    """The same optimizer, its first state from one program."""
    return optax.GradientTransformationExtraArgs(jax.jit(optimizer.init), optimizer.update)


def given(shapes: Mapping[str, tuple[int, ...]], number: int = STEPS) -> tuple[Any, list[Any]]:
    """Parameters of these shapes, and gradients."""
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    params = normal_like(jax.random.key(1), params)
    return params, gradients_like(params, number)


def cast(tree: Any, dtypes: Mapping[str, str]) -> Any:
    """Parameters in other dtypes, by name; float32 by default."""
    return {k: np.asarray(x).astype(jnp.dtype(dtypes.get(k, "float32"))) for k, x in tree.items()}


@functools.cache
def on_no_mesh(name: str) -> tuple[list[Any], list[Any]]:
    """Updates and states of a method for `TWO_SHAPES`."""
    params, gradients = given(TWO_SHAPES)
    return alone(ROWS[name].make(), gradients, params)


@functools.cache
def begun(name: str, kind: str, *shape: int) -> tuple[Any, Any, Any, Any]:
    """A method on a mesh: itself, its parameters `TWO_SHAPES`, gradients and the first state."""
    mesh = mesh_of(kind, *shape)
    optimizer = ROWS[name].make(mesh=mesh)
    params, gradients = on(mesh, given(TWO_SHAPES))
    return optimizer, params, gradients, begin(optimizer, params, mesh)


# Every method, on every kind of mesh.

CELLS: list[tuple[str, str]] = list(itertools.product(AXIS_TYPES, CUTS))


def cells_of(place: int) -> list[tuple[str, str]]:
    """Which cells the method at this place of the registry takes: every third method takes one.

    The others are on a mesh in the tests below, or others of their family are.
    """
    if ALL_CELLS:
        return CELLS
    return [] if place % 3 else [CELLS[place % len(CELLS)]]


SAMPLE = [
    pytest.param(
        row, *cell, id="-".join((row.name, *cell)), marks=pytest.mark.xdist_group(row.name)
    )
    for place, row in enumerate(REGISTRY)
    for cell in cells_of(place)
]


@functools.cache
def on_one_device(row: Row) -> tuple[list[Any], Any]:
    """Updates and the last state."""
    params, gradients = given(SHAPES)
    updates, states = alone(row.make(weight_dimension_numbers=SCANNED), gradients, params)
    return updates, states[-1]


@pytest.mark.parametrize(("row", "kind", "cut"), SAMPLE)
def test_a_method_on_a_mesh_is_the_method_on_one_device(row: Row, kind: str, cut: str) -> None:
    mesh = mesh_of(kind, *((2, 2) if cut == "by_both" else (4,)))
    specs = {name: getattr(leaf, cut, P()) for name, leaf in LEAVES.items()}
    whole, gradients = given(SHAPES)
    optimizer = row.make(weight_dimension_numbers=SCANNED, mesh=mesh)
    params = on(mesh, whole, specs)
    updates, state = steps(optimizer, [on(mesh, g, specs) for g in gradients], params, mesh)
    expected, expected_state = on_one_device(row)
    assert_close(updates, expected, GROWTH[row.name])
    portable = curvax.portable_state(optimizer, params, state)
    assert shapes_and_dtypes(portable) == shapes_and_dtypes(expected_state)
    keys = entries(portable, "key"), entries(expected_state, "key")
    assert all(map(np.array_equal, *keys))  # the same draws
    for name in SHAPES:
        for update in updates:
            assert update[name].dtype == params[name].dtype
            if kind == "explicit":
                like = params[name].sharding
                assert update[name].sharding.is_equivalent_to(like, update[name].ndim), name
    # Its matrices were divided: what belongs to them is on no device in full.
    summary = curvax.summarize(optimizer, params)
    assert summary.count("on 4 of 4 devices") == 4
    parts = [x for x in divided_arrays(state) if x.ndim]
    assert all(not x.is_fully_replicated for x in parts)
    assert parts


def test_the_sample_has_every_cut_and_both_types_of_axes() -> None:
    kinds, cuts = zip(*(cell for i in range(len(REGISTRY)) for cell in cells_of(i)), strict=True)
    assert set(cuts) == set(CUTS)
    assert all(kinds.count(kind) >= 2 for kind in AXIS_TYPES)


def divided_arrays(state: Any) -> list[Any]:
    """The arrays of the divided parts of a state."""
    from curvax.transforms.distribute._layout import is_divided

    nodes = filter(is_divided, jax.tree.leaves(state, is_leaf=is_divided))
    return jax.tree.leaves(list(nodes))


def shapes_and_dtypes(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) for x in leaves]


# Every other way in which an optimizer can differ.


class Variant(NamedTuple):
    """An optimizer from `mesh=`, and its parameters."""

    make: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]] = TWO_SHAPES
    factor: float = 512.0
    dtypes: Mapping[str, str] = {}
    mesh: tuple[int, ...] = (4,)


ONE_SHAPE = {f"{i}/kernel": (4, 6) for i in range(5)}
EVENLY = {f"{i}/kernel": (4, 6) for i in range(4)}  # one on each of four devices
LEFT = {f"{i}/kernel": (4, 6) for i in range(3)}  # all of them left over
TILES = {"block": 4, "min_elements": 1}
ADAMW = functools.partial(optax.adamw, weight_decay=0.1)


MIXED = (AxisType.Auto, AxisType.Explicit)
STACKED = curvax.MatrixRule(stack=True)
BLOCKS = curvax.MatrixRule(block_size=3)


def coded_muon(**settings: Any) -> Any:
    """Coded by a rule that does not look at how many matrices a stack has."""
    moments = curvax.quantize_state(
        curvax.scale_by_muon(steps=3), block=4, where=lambda _, leaf: leaf.ndim > 1
    )
    return curvax.assemble(moments, 0.1, matrices=STACKED, **settings)


def blocked_muon(**settings: Any) -> Any:
    """All in blocks of three rows and at most three columns."""
    return curvax.assemble(curvax.scale_by_muon(steps=3), 0.1, matrices=BLOCKS, **settings)


VARIANTS = {
    "blocks": Variant(blocked_muon, {"a/kernel": (4, 6), "b/kernel": (6, 4), "c/kernel": (3, 3)}),
    "a base, warm-up, decay": Variant(
        functools.partial(ROWS["shampoo"].make, base=ADAMW, warmup_steps=1, side="left"), ONE_SHAPE
    ),
    "quantized": Variant(
        functools.partial(ROWS["eigen_adam"].make, storage=curvax.quantized(**TILES)), LEFT
    ),
    "randomized basis": Variant(
        functools.partial(ROWS["galore"].make, basis=curvax.subspaces.randomized()), LEFT
    ),
    "heads": Variant(
        functools.partial(
            ROWS["muon"].make, matrices=curvax.MatrixRule(head_wise=True), weight_decay=0.1
        ),
        {"query/kernel": (8, 6, 2), "key/kernel": (8, 5, 2), "wide/kernel": (8, 6)},
    ),
    "one entry each, named as stacks and fields are": Variant(
        functools.partial(ROWS["muon"].make, matrices=curvax.MatrixRule(stack=False)),
        {"4x6": (4, 6), "mu": (4, 6), "whole": (4, 6), "tall/kernel": (6, 4)},
    ),
    "two dtypes in a stack": Variant(
        functools.partial(ROWS["muon"].make, matrices=STACKED),
        ONE_SHAPE,
        dtypes={"0/kernel": "bfloat16", "3/kernel": "bfloat16"},
    ),
    "coded moments": Variant(coded_muon, ONE_SHAPE, factor=1e5),
    "more devices than matrices": Variant(ROWS["soap"].make, {"wide/kernel": (4, 6)}, mesh=(8,)),
    "no matrices left over": Variant(ROWS["muon"].make, EVENLY),
}
"""Coded moments: an entry may be rounded to the next code, a part in 255 of a tile's largest."""
if ALL_CELLS:
    VARIANTS["error feedback"] = Variant(
        functools.partial(ROWS["asgo"].make, storage=curvax.cholesky(error_feedback=0.95, **TILES)),
        ONE_SHAPE,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_an_optimizer_on_a_mesh_is_the_optimizer_on_one_device(name: str) -> None:
    variant = VARIANTS[name]
    kind = ("auto", "explicit")[list(VARIANTS).index(name) % 2]
    params, gradients = given(variant.shapes)
    params, *gradients = (cast(tree, variant.dtypes) for tree in (params, *gradients))
    expected, states = alone(variant.make(), gradients, params)
    mesh = mesh_of(kind, *variant.mesh)
    optimizer, placed = variant.make(mesh=mesh), on(mesh, params)
    updates, state = steps(optimizer, [on(mesh, g) for g in gradients], placed, mesh)
    assert_close(updates, expected, variant.factor)
    portable = curvax.portable_state(optimizer, placed, state)
    assert shapes_and_dtypes(portable) == shapes_and_dtypes(states[-1])
    for ours, theirs in zip(entries(portable, "key"), entries(states[-1], "key"), strict=True):
        assert np.array_equal(ours, theirs)
    assert_same_arrays(curvax.place_state(optimizer, placed, portable), state)


def entries(state: Any, field: str) -> list[Any]:
    """The leaves of a state below fields of this name."""
    return [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if jax.tree_util.GetAttrKey(field) in path
    ]


def assert_same_arrays(one: Any, other: Any) -> None:
    """The same structure, numbers bit for bit, and shardings."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize(
    ("params_dtype", "gradients_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_gradients_of_another_dtype_need_the_parameters(
    params_dtype: str, gradients_dtype: str
) -> None:
    """The layout of the state follows from the parameters' dtypes."""
    params, gradients = given(ONE_SHAPE, 2)
    params = cast(params, dict.fromkeys(params, params_dtype))
    gradients = [cast(g, dict.fromkeys(g, gradients_dtype)) for g in gradients]
    expected, _ = alone(ROWS["muon"].make(matrices=STACKED), gradients, params)
    optimizer = ROWS["muon"].make(mesh=mesh_of())
    updates, state = run(jitted(optimizer), gradients, params)
    assert_close(updates, expected, GROWTH["muon"])
    with pytest.raises(ValueError, match="update needs params"):
        optimizer.update(gradients[0], state[-1])


def test_staggered_refreshes_come_once_a_period_for_every_matrix() -> None:
    """Which step of the period is a matrix's depends on the devices."""
    params, gradients = given(ONE_SHAPE, 5)
    optimizer = ROWS["asgo"].make(mesh=mesh_of(), refresh=curvax.every(2, stagger=True))
    updates, state = steps(optimizer, gradients, params, mesh_of())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
    portable = curvax.portable_state(optimizer, params, state)
    counts = leaves_in(portable, ["refreshes"])["refreshes"]
    assert {int(n) for x in counts for n in x} == {3}  # at the first step, and in both periods


@pytest.mark.parametrize(("name", "each", "stack"), [("racs", 2, True), ("soap", 1, False)])
def test_the_same_work_gives_the_same_bits(name: str, each: int, stack: bool) -> None:
    """RACS always; what multiplies matrices, if a device has one of a shape, as without stacks.

    XLA's products of a batch depend on its size, and there are no others in RACS.
    """
    params, gradients = given({f"{i}/kernel": (32, 48) for i in range(2 * each)}, 2)
    found = []
    for mesh in (None, mesh_of("auto", 2)):
        place = functools.partial(on, mesh) if mesh else lambda tree: tree
        rule = curvax.MatrixRule(stack=True if mesh else stack)
        optimizer = ROWS[name].make(mesh=mesh, matrices=rule)
        found.append(run(jitted(optimizer), map(place, gradients), place(params))[0])
    assert_close(found[1], found[0], factor=0)


# Meshes of every kind.


def other_meshes() -> dict[str, tuple[Mesh, Any]]:
    """Meshes, and the axes among whose devices matrices are divided."""
    reversed_ones = Mesh(np.array(jax.devices())[:3:-1], "x", axis_types=(AxisType.Auto,))
    return {
        "one Explicit axis of two": (mesh_of("explicit", 2, 4), "y"),
        "two axes of three, in another order": (mesh_of("auto", 2, 2, 2), ["z", "x"]),
        "some devices, in another order": (reversed_ones, None),
        "one device": (mesh_of("auto", 1), None),
    }


@pytest.mark.parametrize("name", other_meshes())
def test_any_axes_of_any_mesh(name: str) -> None:
    mesh, axes = other_meshes()[name]
    params, gradients = given(TWO_SHAPES)
    optimizer = ROWS["muon"].make(mesh=mesh, mesh_axis=axes)
    params = on(mesh, params)
    updates, state = steps(optimizer, [on(mesh, g) for g in gradients], params, mesh)
    assert_close(updates, on_no_mesh("muon")[0], GROWTH["muon"])
    if "order" in name:
        portable = curvax.portable_state(optimizer, params, state)
        assert_same_arrays(curvax.place_state(optimizer, params, portable), state)
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else axes
    number = math.prod(mesh.shape[name] for name in names)
    assert {
        len({str(i) for i in x.sharding.devices_indices_map(x.shape).values()})
        for x in divided_arrays(state)
        if x.ndim
    } == {number}


@both_axis_types
def test_inside_the_context_of_a_mesh(kind: str) -> None:
    params, gradients = given(TWO_SHAPES)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        updates, _ = steps(ROWS["muon"].make(mesh=mesh), gradients, params, mesh)
    assert_close(updates, on_no_mesh("muon")[0], GROWTH["muon"])


def test_inside_pmap() -> None:
    """Where a device's state is its own alone."""
    params, gradients = given(TWO_SHAPES)
    optimizer, devices = ROWS["muon"].make(mesh_axis="x"), jax.devices()[:4]
    each = lambda tree: jax.tree.map(lambda x: np.stack([x] * 4), tree)  # noqa: E731
    state = jax.pmap(optimizer.init, axis_name="x", devices=devices)(each(params))
    step = jax.pmap(optimizer.update, axis_name="x", devices=devices)
    for gradient, expected in zip(gradients, on_no_mesh("muon")[0], strict=True):
        updates, state = step(each(gradient), state, each(params))
        updates = jax.tree.map(np.asarray, updates)
        for device in range(4):
            own = jax.tree.map(lambda x: x[device], updates)  # noqa: B023
            assert_close(own, expected, GROWTH["muon"])
    divided = entries(state, "whole") + entries(state, "singles")
    moments = {x.shape for x in divided if x.ndim > 1 and x.dtype == jnp.float32}
    assert moments == {(4, 1, 4, 6), (4, 1, 24)}  # on each a wide matrix and one that was left


@explicit_by_default
def test_inside_shard_map(kind: str) -> None:
    """Over two axes, in an order of their own."""
    params, gradients = given(TWO_SHAPES)
    mesh = mesh_of(kind, 2, 2)
    optimizer = ROWS["muon"].make(mesh_axis=("y", "x"))

    def trajectory(params: Any, gradients: Any) -> Any:
        def step(state: Any, gradient: Any) -> Any:
            return optimizer.update(gradient, state, params)[::-1]

        return jax.lax.scan(step, optimizer.init(params), gradients)[1]

    mapped = jax.shard_map(trajectory, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    updates = jax.jit(mapped)(on(mesh, params), on(mesh, together(gradients)))
    assert_close(updates, together(on_no_mesh("muon")[0]), GROWTH["muon"])


# Who has which matrices.


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.tuples(st.integers(1, 40), st.integers(1, 64), st.integers(1, 64)),
        max_size=6,
    ),
    st.integers(1, 17),
)
def test_every_matrix_is_on_one_device_and_no_device_has_much_more_than_others(
    shapes: dict[str, tuple[int, int, int]], devices: int
) -> None:
    shares = _shares.share(shapes, devices)
    number, load = np.zeros(devices, int), np.zeros(devices)
    found: dict[str, list[int]] = {}
    for key, shape in shapes.items():
        assert shares.whole(key) == shares.each[key] * devices <= shape[0]
        found[key] = list(range(shares.whole(key)))
        number += shares.each[key]
        load += shares.each[key] * _shares.cost(*shape[1:])
    for r in shares.rounds:
        assert len(r.kind) == len(r.entry) == devices
        assert len(set(r.kinds)) == len(r.kinds) == len(set(r.kind) - {len(r.kinds)})
        for device, (kind, entry) in enumerate(zip(r.kind, r.entry, strict=True)):
            if kind < len(r.kinds):
                found[r.kinds[kind]].append(shares.whole(r.kinds[kind]) + entry)
                number[device] += 1
                load[device] += _shares.cost(*shapes[r.kinds[kind]][1:])
    for key, shape in shapes.items():
        assert sorted(found[key]) == list(range(shape[0]))
    dearest = max((_shares.cost(*shape[1:]) for shape in shapes.values()), default=0)
    assert max(number) - min(number) <= len(shares.rounds)
    assert max(number) < number.mean() + 1
    assert max(load) - min(load) <= dearest * (1 + 1e-9)
    # The least that the rounds need: as many as there are matrices left for a device.
    assert len(shares.rounds) == math.ceil(sum(n[0] % devices for n in shapes.values()) / devices)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)), max_size=4),
    st.integers(1, 5),
)
def test_stacks_are_taken_apart_and_put_together(
    shapes: list[tuple[int, int, int]], devices: int
) -> None:
    stacks: Any = {
        str(i): np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1000 * i
        for i, shape in enumerate(shapes)
    }
    shares = _shares.share({key: x.shape for key, x in stacks.items()}, devices)
    whole, left = shares.split(stacks)
    assert all(len(x) == shares.whole(key) for key, x in whole.items())
    rows = []
    for r in shares.rounds:
        length = max(left[key][0].size for key in r.kinds)
        row = np.full((devices, length), np.nan, np.float32)
        for device, (kind, entry) in enumerate(zip(r.kind, r.entry, strict=True)):
            if kind < len(r.kinds):
                own = left[r.kinds[kind]][entry].ravel()
                row[device, : own.size] = own
        rows.append(row)
    with mock.patch.object(_shares, "jnp", np):  # which compiles nothing
        joined = shares.joined(stacks, whole, rows, lambda x, like: x)
    assert joined.keys() == stacks.keys()
    assert all(np.array_equal(joined[key], x) for key, x in stacks.items())


def test_a_device_decomposes_the_factors_of_its_own_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve matrices on four devices, and a thirteenth: a quarter, and one more."""
    params, gradients = given({f"{i}/kernel": (4, 6) for i in range(13)}, 4)
    log: collections.Counter[int] = collections.Counter()
    plain = _inverse_root.eigh

    def logged(a: jax.Array) -> Any:
        device = jax.lax.axis_index("x")
        jax.debug.callback(lambda device, _: log.update([int(device)]), device, a[0, 0])
        return plain(a)

    for module in (_inverse_root, _factor):
        monkeypatch.setattr(module, "eigh", logged)
    mesh = mesh_of()
    optimizer = ROWS["shampoo"].make(mesh=mesh, side="left")
    step, state, executed = jax.jit(optimizer.update), begin(optimizer, params, mesh), []
    for gradient in gradients:
        _, state = step(gradient, state, params)
        jax.effects_barrier()
        executed.append([log.pop(device, 0) for device in range(4)])
    assert [sorted(counts) for counts in executed] == 2 * [[0] * 4, [3, 3, 3, 4]]
    portable = curvax.portable_state(optimizer, params, state)
    counts = leaves_in(portable, ["refreshes"])["refreshes"]
    assert {int(n) for x in counts for n in x} == {2}


# What a state takes, and what is exchanged at a step.

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


def abstract(shapes: Mapping[str, tuple[int, ...]], sharding: Any) -> dict[str, Any]:
    return {k: jax.ShapeDtypeStruct(s, "float32", sharding=sharding) for k, s in shapes.items()}


def abstract_state(optimizer: Any, params: Any, mesh: Mesh) -> Any:
    """The shapes of the state, and how it lies on a mesh."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        curvax.state_sharding(optimizer, params, mesh),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("shampoo", "auto"), ("soap", "explicit"), ("muon", "auto"), ("alice", "explicit")],
)
def test_a_device_has_its_share_of_the_state(name: str, kind: str) -> None:
    mesh = mesh_of(kind, DEVICES)
    shapes = layers(16, scanned=True) | {"head/kernel": (16, 4)}  # one that is left over
    make = functools.partial(ROWS[name].make, **scanned_axes(shapes))
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
TRAFFIC = [
    ("muon", "auto", "whole", False),
    ("muon", "auto", "by_column", True),
    ("muon", "explicit", "by_row", True),
    ("shampoo", "auto", "by_row", True),
]
if ALL_CELLS:
    TRAFFIC = list(itertools.product(("muon", "shampoo"), AXIS_TYPES, LAYOUTS, (True, False)))


@pytest.mark.parametrize(("name", "kind", "layout", "scanned"), TRAFFIC)
def test_a_step_exchanges_at_most_twice_the_matrices(
    name: str, kind: str, layout: str, scanned: bool
) -> None:
    """And nothing within a refresh or another loop, where devices would wait for each other."""
    mesh, shapes = mesh_of(kind, DEVICES), layers(8, scanned)
    make = functools.partial(ROWS[name].make, mesh=mesh, **scanned_axes(shapes))
    if name == "shampoo":
        make = functools.partial(make, side="left")
    specs = P(None, *LAYOUTS[layout]) if scanned else P(*LAYOUTS[layout])
    found = exchanged(make, shapes, specs, mesh)
    assert found and not any(x.inside for x in found)
    matrices = 4 * sum(map(math.prod, shapes.values()))
    received = sum(x.received(DEVICES) for x in found)
    # Every device needs the updates of others' matrices, at the least of its own part of each.
    assert matrices / DEVICES <= received <= 2 * matrices


def test_muon_gathers_far_less_often_than_optax_does() -> None:
    """Whose iterations multiply matrices that are cut. In one layer."""
    mesh = mesh_of("auto", DEVICES)
    shapes = {name: shape[1:] for name, shape in layers(8, scanned=True).items()}
    ours = exchanged(lambda: curvax.muon(0.1, mesh=mesh), shapes, P("x"), mesh)
    theirs = exchanged(lambda: optax.contrib.muon(0.1, ns_steps=5), shapes, P("x"), mesh)
    kinds = ("all-gather", "all-reduce")
    gathers = [sum(x.kind in kinds for x in found) for found in (ours, theirs)]
    assert 10 * gathers[0] <= gathers[1], gathers


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


# Checkpoints.


@functools.cache
def trained(name: str, kind: str = "auto", *shape: int) -> tuple[Any, Any, Any, Any]:
    """A method after two steps: itself, its jitted step, parameters and state."""
    if not shape:
        optimizer, state = ROWS[name].make(), jax.device_put(on_no_mesh(name)[1][1])
        return optimizer, jax.jit(optimizer.update), given(TWO_SHAPES)[0], state
    optimizer, params, gradients, state = begun(name, kind, *shape)
    step = jax.jit(optimizer.update)
    for gradient in gradients[:2]:
        _, state = step(gradient, state, params)
    return optimizer, step, params, state


@functools.cache
def portable_of(*place: Any) -> Any:
    """The portable form of the state of `trained`."""
    optimizer, _, params, state = trained(*place)
    return curvax.portable_state(optimizer, params, state)


def continued(place: tuple[Any, ...], state: Any) -> Any:
    """The third step from a state, where `trained(*place)` is."""
    _, step, params, _ = trained(*place)
    gradient = given(TWO_SHAPES)[1][2]
    return step(on(mesh_of(*place[1:]), gradient) if len(place) > 2 else gradient, state, params)[0]


def copied(state: Any) -> Any:
    """Arrays of their own, which may be given away."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)


def of_matrices(state: Any) -> Any:
    """The part of a full optimizer's state that is divided, or would be."""
    return state.inner_states["matrices"]


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize("place", [("eigen_adam", "auto", 4), ("muon", "explicit", 8)])
def test_the_portable_state_is_that_of_one_device(place: tuple[Any, ...]) -> None:
    one, expected = ROWS[place[0]].make(), on_no_mesh(place[0])[1][1]
    optimizer, _, params, state = trained(*place)
    portable = portable_of(*place)
    assert shapes_and_dtypes(portable) == shapes_and_dtypes(expected)
    for path in ("4/kernel", "tall/kernel"):
        ours = curvax.state_of(optimizer, params, state, path)
        theirs = curvax.state_of(one, params, expected, path)
        assert len(ours) >= 1
        assert_close(ours, theirs, GROWTH[place[0]])
    shapes = curvax.portable_state(optimizer, params, jax.eval_shape(optimizer.init, params))
    assert shapes_and_dtypes(shapes) == shapes_and_dtypes(portable)
    for x, y in zip(*map(jax.tree.leaves, map(of_matrices, (shapes, portable))), strict=True):
        assert x.sharding == y.sharding
    untouched = curvax.portable_state(one, params, expected)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (untouched, expected)), strict=True))


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize("place", [("muon", "auto", 8), ("muon", "explicit", 8)])
def test_a_state_put_back_goes_on_bit_for_bit(place: tuple[Any, ...]) -> None:
    optimizer, _, params, state = trained(*place)
    portable = portable_of(*place)
    again = curvax.place_state(optimizer, params, portable)
    assert_same_arrays(again, state)
    assert_close(continued(place, again), continued(place, state), factor=0)
    from_host = curvax.place_state(optimizer, params, jax.tree.map(np.asarray, portable))
    assert_same_arrays(of_matrices(from_host), of_matrices(state))


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize("there", [("auto", 4), ("auto", 2, 2), ("explicit", 4), ("auto", 1)])
def test_matrices_move_to_another_mesh_without_a_checkpoint(there: tuple[Any, ...]) -> None:
    portable = portable_of("muon", "auto", 8)
    target, target_params, _, _ = begun("muon", *there)
    moved = curvax.place_state(target, target_params, portable)
    back = curvax.portable_state(target, target_params, moved)
    assert_close(of_matrices(back), of_matrices(portable), factor=0)


@pytest.mark.xdist_group("checkpoints")
@both_axis_types
def test_a_state_of_one_device_can_be_divided(kind: str) -> None:
    """One that was put on its device, as a restored one is."""
    state = trained("muon")[3]
    target, params, _, _ = begun("muon", kind, 4)
    placed = curvax.place_state(target, params, jax.device_put(state, jax.devices()[0]))
    back = curvax.portable_state(target, params, placed)
    assert_close(of_matrices(back), of_matrices(state), factor=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def checkpoint(directory: Path, *place: Any) -> Path:
    path = directory / "-".join(map(str, place))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, portable_of(*place))
    return path


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize(
    ("name", "source", "there"),
    [
        ("muon", ("auto", 8), ("auto", 8)),
        ("eigen_adam", ("auto",), ("auto", 4)),
        ("muon", ("auto", 8), ("auto",)),
        ("muon", ("auto",), ("auto", 4)),
        ("muon", ("explicit", 8), ("auto", 4)),
        ("muon", ("auto", 8), ("explicit", 8)),
    ],
)
def test_a_checkpoint_can_be_restored_anywhere(
    directory: Path, name: str, source: tuple[Any, ...], there: tuple[Any, ...]
) -> None:
    optimizer, _, params, _ = trained(name, *there)
    target = curvax.portable_state(optimizer, params, jax.eval_shape(optimizer.init, params))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(checkpoint(directory, name, *source), target)
    state = curvax.place_state(optimizer, params, restored)
    updates = continued((name, *there), state)
    expected = continued((name, *source), trained(name, *source)[3])
    assert_close(updates, expected, 0 if source == there else GROWTH[name])


@pytest.mark.xdist_group("checkpoints")
def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    """The portable state is a copy: steps that give the state away cannot spoil it."""
    optimizer, _, params, state = trained("muon", "auto", 8)
    mine = copied(state)
    portable = curvax.portable_state(optimizer, params, mine)
    expected = jax.tree.map(np.array, portable)
    step = jax.jit(optimizer.update, donate_argnums=1)
    gradient = on(mesh_of("auto", 8), given(TWO_SHAPES)[1][2])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", of_matrices(portable))
        step(gradient, mine, params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", of_matrices(portable))
    assert_close(restored, of_matrices(expected), factor=0)


# With Optax around it.


def wrapped(name: str) -> Callable[..., Any]:
    """From `mesh=` to Muon or EigenAdam inside of something of Optax."""
    row = ROWS["eigen_adam" if "eigen" in name else "muon"]
    if "hyperparameters" in name:
        inject = optax.inject_hyperparams(row.optimizer, static_args=(*row.static, "mesh"))
        return functools.partial(inject, 0.1, **row.settings, **row.descent)
    assert name == "apply_if_finite, MultiSteps, chain, masked"
    mask = {key: key != "3/kernel" for key in TWO_SHAPES}

    def make(**mesh: Any) -> Any:
        chained = optax.chain(optax.scale(2.0), optax.masked(row.make(**mesh), mask))
        return optax.apply_if_finite(optax.MultiSteps(chained, 2).gradient_transformation(), 2)

    return make


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hyperparameters of eigen_adam", "auto"),
        ("apply_if_finite, MultiSteps, chain, masked", "explicit"),
    ],
)
def test_inside_of_optax(name: str, kind: str) -> None:
    params, gradients = given(ONE_SHAPE if "eigen" in name else TWO_SHAPES, 4)
    mesh, make = mesh_of(kind), wrapped(name)
    optimizer, placed = make(mesh=mesh), on(mesh, params)
    updates, state = steps(optimizer, [on(mesh, g) for g in gradients], placed, mesh)
    expected, states = alone(make(), gradients, params)
    assert_close(updates, expected, GROWTH["eigen_adam" if "eigen" in name else "muon"])
    portable = curvax.portable_state(optimizer, placed, state)
    assert shapes_and_dtypes(portable) == shapes_and_dtypes(states[-1])


def test_traced_numbers_on_explicit_axes_are_refused() -> None:
    params, gradients = given(TWO_SHAPES)
    mesh = mesh_of("explicit")
    optimizer = wrapped("hyperparameters")(mesh=mesh)
    with pytest.raises(ValueError, match="mesh: hyperparameters cannot be tracers"):
        steps(optimizer, [on(mesh, g) for g in gradients], on(mesh, params), mesh)


@both_axis_types
def test_a_donated_state_is_used_and_nothing_is_compiled_twice(kind: str) -> None:
    """A state that could not be used would be a warning, and so an error."""
    optimizer, params, gradients, state = begun("muon", kind, 4)
    traces, updates = [], []

    def update(*arguments: Any) -> Any:
        traces.append(None)
        return optimizer.update(*arguments)

    shardings = curvax.state_sharding(optimizer, params, mesh_of(kind))
    state = first = copied(state)
    step = jax.jit(update, donate_argnums=1, out_shardings=(None, shardings))
    for gradient in gradients:
        new, state = step(gradient, state, params)
        updates.append(new)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert len(traces) == 1 and step._cache_size() == 1
    assert_close(updates, on_no_mesh("muon")[0], GROWTH["muon"])


@functools.cache
def direction_on_no_mesh() -> list[Any]:
    """Muon's directions for `ONE_SHAPE`."""
    params, gradients = given(ONE_SHAPE)
    return alone(curvax.on_matrices(ROWS["muon"].make_direction()), gradients, params)[0]


@both_axis_types
def test_init_without_jit_and_parameters_that_are_nowhere(kind: str) -> None:
    """Arrays that were not put anywhere; the divided part is compiled once."""
    params, gradients = given(ONE_SHAPE)
    optimizer = curvax.on_matrices(ROWS["muon"].make_direction(), mesh=mesh_of(kind))
    step, state = jax.jit(optimizer.update), optimizer.init(params)
    for gradient in gradients:
        updates, state = step(gradient, state, params)
    assert step._cache_size() == 1
    assert_close(updates, direction_on_no_mesh()[-1], GROWTH["muon"])


@explicit_by_default
def test_steps_can_be_scanned(kind: str) -> None:
    optimizer, params, gradients, state = begun("muon", kind, 4)

    def step(state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return state, updates

    stacked = on(mesh_of(kind), together(gradients))
    _, updates = jax.jit(lambda *args: jax.lax.scan(step, *args))(state, stacked)
    assert_close(updates, together(on_no_mesh("muon")[0]), GROWTH["muon"])


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize(("name", "kind"), [("muon", "explicit"), ("eigen_adam", "auto")])
def test_map_params_maps_what_it_maps_on_one_device(name: str, kind: str) -> None:
    params, _ = given(TWO_SHAPES)
    divided, placed, _, first = begun(name, kind, 4)
    one, mapped = ROWS[name].make(), []
    for optimizer, state in ((one, jax.jit(one.init)(params)), (divided, first)):
        state = optax.tree.map_params(optimizer, lambda x: np.asarray(x) + 1, state)
        mapped.append(curvax.portable_state(optimizer, placed, state))
    assert_close(mapped[1], mapped[0], factor=0)


@pytest.mark.xdist_group("checkpoints")
def test_a_bad_gradient_touches_no_other_matrix() -> None:
    """Of a matrix that is one of many on its device, and of two that were dealt out."""
    clean = jax.tree.map(np.asarray, given(TWO_SHAPES)[1][2])
    optimizer, step, params, state = trained("eigen_adam", "auto", 4)
    victims = {"0/kernel": 2, "4/kernel": 3, "tall/kernel": 4}
    for victim, bad in ((v, (np.nan, np.inf)[i % 2]) for v, n in victims.items() for i in range(n)):
        hit, zero = ({**clean, victim: clean[victim].copy()} for _ in range(2))
        hit[victim][1, 2], zero[victim][:] = bad, 0
        (wanted, _), (updates, state), (_, there) = (
            step(on(mesh_of(), g), state, params) for g in (clean, hit, zero)
        )
        assert_close(updates, wanted | {victim: np.zeros((*clean[victim].shape,))}, factor=0)
        numbers = [[x for x in jax.tree.leaves(s) if x.dtype == np.float32] for s in (state, there)]
        assert_close(*numbers, factor=0)
    for name, own in states_by_parameter(optimizer, params, state).items():
        counts = [int(x.sum()) for place, x in own.items() if "skipped" in place.split("/")]
        assert counts == [victims.get(name, 0)]


# Looking into it.


def test_copies_of_the_parameters_lie_as_they_do() -> None:
    mesh = mesh_of("auto", 2, 2)
    shapes = {"wide/kernel": (4, 6), "embed/embedding": (8, 4), "wide/bias": (6,)}
    specs = {"wide/kernel": P("x", "y"), "embed/embedding": P("y"), "wide/bias": P("x")}
    params = on(mesh, given(shapes)[0], specs)
    optimizer = ROWS["shampoo"].make(mesh=mesh, base=ADAMW)
    shardings = curvax.state_sharding(optimizer, params, mesh)
    state = begin(optimizer, params, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    placed = {
        jax.tree_util.keystr(path, simple=True, separator="/"): s.spec
        for path, s in jax.tree_util.tree_leaves_with_path(shardings)
    }
    for field in ("mu", "nu"):
        for name, spec in specs.items():
            (found,) = {s for place, s in placed.items() if place.endswith(f"/{field}/{name}")}
            assert found == spec
    assert {s for place, s in placed.items() if place.endswith("count")} == {P()}
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    assert curvax.state_sharding(optimizer, abstract, mesh) == shardings


def test_the_summary_says_on_how_many_devices_matrices_are() -> None:
    params, _ = given(TWO_SHAPES)
    summary = curvax.summarize(ROWS["muon"].make(mesh=mesh_of("auto", 8)), params)
    lines = {line.split(" | ")[0].strip("| "): line for line in summary.splitlines()}
    for name in TWO_SHAPES:
        if "bias" not in name:
            number = 5 if name[0].isdigit() else 2
            assert f"on {number} of 8 devices" in lines[name]
    assert "devices" not in lines["a/bias"]
    assert "devices" not in curvax.summarize(ROWS["muon"].make(), params)


# What is refused.


def bad_inputs() -> dict[str, tuple[Callable[[], Any], str]]:
    """What is done, and what the error has to name."""
    params, gradients = given(TWO_SHAPES)
    muon, shampoo, alice = (ROWS[name].make for name in ("muon", "shampoo", "alice"))
    mesh, other = mesh_of(), mesh_of("auto", 8)
    upper = Mesh(np.array(jax.devices()[4:]), "x", axis_types=(AxisType.Auto,))

    def placed(source: Any, target: Any) -> Any:
        state = jax.eval_shape(source.init, params)
        return curvax.place_state(target, params, curvax.portable_state(source, params, state))

    return {
        "unknown axis": (lambda: muon(mesh=mesh, mesh_axis="model"), r"mesh_axis.*'x'.*'model'"),
        "one unknown": (lambda: muon(mesh=mesh, mesh_axis=("x", "y")), r"mesh_axis.*'x'.*'y'"),
        "no name": (lambda: muon(mesh=mesh, mesh_axis=0), r"axis.*0"),
        "both kinds of axes": (
            lambda: muon(mesh=jax.make_mesh((2, 2), ("x", "y"), axis_types=MIXED)),
            "all Auto or all Explicit",
        ),
        "a rule by the size of a stack": (
            lambda: curvax.assemble(
                curvax.quantize_state(curvax.scale_by_muon(), block=4, min_elements=80),
                0.1,
                mesh=mesh,
            ).init({f"{i}/kernel": jnp.ones((4, 6)) for i in range(5)}),
            "depends on the number of matrices",
        ),
        "no axes": (lambda: muon(mesh=mesh, mesh_axis=()), "axis"),
        "an axis twice": (lambda: muon(mesh=mesh, mesh_axis=("x", "x")), "axis.*'x'"),
        "no mesh": (lambda: muon(mesh="x"), "mesh.*'x'"),
        "an abstract mesh": (lambda: muon(mesh=mesh.abstract_mesh), "mesh must be"),
        "two places": (
            lambda: curvax.distribute(curvax.orthogonalize(), mesh, axis_name="x"),
            "axis_name='x'",
        ),
        "an axis without a mesh": (
            lambda: curvax.distribute(curvax.orthogonalize(), axis="x"),
            r"\baxis='x'",
        ),
        "nothing": (lambda: curvax.distribute(curvax.orthogonalize()), "mesh|axis_name"),
        "outside of a map": (lambda: muon(mesh_axis="x").init(params), "'x' is not an axis"),
        "parameters elsewhere": (
            lambda: muon(mesh=mesh).init(on(upper, params)),
            "'0/kernel' is on the mesh",
        ),
        "gradients elsewhere": (
            lambda: jax.jit(muon(mesh=mesh).update)(
                on(other, gradients[0]), muon(mesh=mesh).init(params)
            ),
            "'0/kernel' is on the mesh",
        ),
        "codes around it": (
            lambda: curvax.quantize_state(muon(mesh=mesh)).init(params),
            "quantize_state.*mesh=",
        ),
        "another rank": (
            lambda: placed(alice(mesh=mesh), alice(mesh=mesh, rank=2)),
            r"portable.*basis.*\b2\b",
        ),
        "other blocks": (
            lambda: placed(shampoo(mesh=mesh), shampoo(mesh=mesh, matrices=BLOCKS)),
            "portable.*blocks",
        ),
        "another optimizer": (lambda: placed(muon(mesh=mesh), shampoo(mesh=mesh)), "portable"),
        "a divided state": (
            lambda: curvax.place_state(
                muon(mesh=mesh), params, jax.eval_shape(muon(mesh=mesh).init, params)
            ),
            "portable",
        ),
        "a state of other devices": (
            lambda: curvax.portable_state(
                muon(mesh=mesh), params, jax.eval_shape(muon(mesh=other).init, params)
            ),
            "state has",
        ),
        "a state of one device": (
            lambda: curvax.state_of(muon(mesh=mesh), params, muon().init(params), "0/kernel"),
            "state has",
        ),
        "sharding on another mesh": (
            lambda: curvax.state_sharding(muon(mesh=mesh), params, other),
            "Mesh.*'x': 4.*'x': 8",
        ),
        "sharding of parameters elsewhere": (
            lambda: curvax.state_sharding(muon(), on(other, params), mesh),
            "'0/kernel' is on",
        ),
        "sharding without a mesh": (
            lambda: curvax.state_sharding(muon(), params, "x"),
            "mesh must be",
        ),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_named(name: str) -> None:
    action, message = bad_inputs()[name]
    with pytest.raises(ValueError, match=message):
        action()
