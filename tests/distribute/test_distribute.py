"""Matrices divided among devices: the numbers of one device, a share of its state and its work.

Every method is compared with itself on one device, on meshes with Auto and Explicit axes, for
parameters that are whole on every device or cut by rows, by columns and by both. By default a few
of these cells run. All of them:

    CURVAX_ALL_CELLS=1 pytest tests/distribute/test_distribute.py
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import curvax
from tests.algebra import leaves_in
from tests.cells import cells
from tests.helpers import assert_close, run, run_scanned
from tests.registry import NAMED, REGISTRY, Row
from tests.shared.meshes import (
    ADAMW,
    AXIS_TYPES,
    ONE_SHAPE,
    TWO_SHAPES,
    as_on_one_device,
    assert_same_arrays,
    cast,
    divided_arrays,
    given,
    jitted,
    mesh_of,
    on,
    steps,
)


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
# In one shape, query and out are not of one layer, so that their axes have to be said.
AXES = {
    "layers/kernel": curvax.MatrixAxes(rows=1, columns=2),
    "query/kernel": curvax.MatrixAxes(rows=0, columns=(1, 2)),
    "out/kernel": curvax.MatrixAxes(rows=(0, 1), columns=2),
}
CUTS = ("whole", "by_row", "by_column", "by_both")


@pytest.mark.parametrize(("row", "kind", "cut"), cells(REGISTRY, AXIS_TYPES, CUTS, of=136))
def test_a_method_on_a_mesh_is_the_method_on_one_device(row: Row, kind: str, cut: str) -> None:
    mesh = mesh_of(kind, *((2, 2) if cut == "by_both" else (4,)))
    specs = {name: getattr(leaf, cut, P()) for name, leaf in LEAVES.items()}
    make = functools.partial(row.make, weight_dimension_numbers=AXES)
    optimizer, params, updates, state = as_on_one_device(
        make, *given(SHAPES), mesh, row.growth, specs
    )
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


class Variant(NamedTuple):
    """An optimizer from `mesh=`, and its parameters."""

    make: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]] = TWO_SHAPES
    factor: float = 512.0
    dtypes: Mapping[str, str] = {}
    mesh: tuple[int, ...] = (4,)


EVENLY = {f"{i}/kernel": (4, 6) for i in range(4)}  # one on each of four devices
LEFT = {f"{i}/kernel": (4, 6) for i in range(3)}  # all of them left over
TILES = {"block": 4, "min_elements": 1}

STACKED = curvax.MatrixRule(stack=True)


def coded_muon(**settings: Any) -> Any:
    """Coded by a rule that does not look at how many matrices a stack has."""
    moments = curvax.quantize_state(
        curvax.scale_by_muon(method=curvax.polar.newton_schulz(3)),
        block=4,
        where=lambda _, leaf: leaf.ndim > 1,
    )
    return curvax.assemble(moments, 0.1, matrices=STACKED, **settings)


def blocked_muon(**settings: Any) -> Any:
    """All in blocks of three rows and at most three columns."""
    return curvax.assemble(
        curvax.scale_by_muon(method=curvax.polar.newton_schulz(3)),
        0.1,
        matrices=curvax.MatrixRule(block_size=3),
        **settings,
    )


def whitened_roots(**settings: Any) -> Any:
    """KL-Shampoo from roots."""
    direction = curvax.precondition(
        refresh=curvax.every(2),
        side="left",
        root=2,
        eps=1e-2,
        statistics="kl",
        storage=curvax.quantized(bits=8, **TILES),
    )
    return curvax.assemble(direction, 0.1, **settings)


VARIANTS = {
    "blocks": Variant(blocked_muon, {"a/kernel": (4, 6), "b/kernel": (6, 4), "c/kernel": (3, 3)}),
    "a base, decay": Variant(
        functools.partial(NAMED["shampoo"].make, base=ADAMW, side="left"), ONE_SHAPE
    ),
    "quantized": Variant(
        functools.partial(NAMED["eigen_adam"].make, storage=curvax.quantized(**TILES)), LEFT
    ),
    "randomized basis": Variant(
        functools.partial(NAMED["galore"].make, basis=curvax.subspaces.randomized()), LEFT
    ),
    "heads": Variant(
        functools.partial(
            NAMED["muon"].make, matrices=curvax.MatrixRule(head_wise=True), weight_decay=0.1
        ),
        {
            "query/kernel": (8, 6, 2),
            "key/kernel": (8, 3, 2),
            "out/kernel": (6, 2, 8),
            "wide/kernel": (8, 6),
        },
    ),
    "one entry each, named as stacks and fields are": Variant(
        functools.partial(NAMED["muon"].make, matrices=curvax.MatrixRule(stack=False)),
        {"4x6": (4, 6), "mu": (4, 6), "whole": (4, 6), "tall/kernel": (6, 4)},
    ),
    "two dtypes in a stack": Variant(
        functools.partial(NAMED["muon"].make, matrices=STACKED),
        ONE_SHAPE,
        dtypes={"0/kernel": "bfloat16", "3/kernel": "bfloat16"},
    ),
    "coded moments": Variant(coded_muon, ONE_SHAPE, factor=1e5),
    "more devices than matrices": Variant(NAMED["soap"].make, {"wide/kernel": (4, 6)}, mesh=(8,)),
    "no matrices left over": Variant(NAMED["muon"].make, EVENLY),
    "packed": Variant(
        functools.partial(NAMED["eigen_adam"].make, storage=curvax.packed(**TILES)), LEFT
    ),
    "error feedback": Variant(
        functools.partial(
            NAMED["asgo"].make, storage=curvax.cholesky(error_feedback=0.95, **TILES)
        ),
        ONE_SHAPE,
    ),
    "roots of whitened statistics in 8 bits": Variant(whitened_roots, factor=1024.0),
}
"""Coded moments: an entry may be rounded to the next code, a part in 255 of a tile's largest."""


@pytest.mark.parametrize("name", cells(VARIANTS, of=14))
def test_an_optimizer_on_a_mesh_is_the_optimizer_on_one_device(name: str) -> None:
    variant = VARIANTS[name]
    kind = ("auto", "explicit")[list(VARIANTS).index(name) % 2]
    params, gradients = given(variant.shapes)
    params, *gradients = (cast(tree, variant.dtypes) for tree in (params, *gradients))
    mesh = mesh_of(kind, *variant.mesh)
    optimizer, placed, _, state = as_on_one_device(
        variant.make, params, gradients, mesh, variant.factor
    )
    portable = curvax.portable_state(optimizer, placed, state)
    assert_same_arrays(curvax.place_state(optimizer, placed, portable), state)


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
    expected, _ = run_scanned(NAMED["muon"].make(matrices=STACKED), gradients, params)
    optimizer = NAMED["muon"].make(mesh=mesh_of())
    updates, state = run(jitted(optimizer), gradients, params)
    assert_close(updates, expected, NAMED["muon"].growth)
    with pytest.raises(ValueError, match="update needs params"):
        optimizer.update(gradients[0], state[-1])


def test_a_staggered_state_keeps_its_schedule_on_other_devices() -> None:
    """Phases are part of a state: nothing is forgotten or refreshed twice after a restart."""
    params, gradients = given(ONE_SHAPE, 4)
    make = functools.partial(NAMED["asgo"].make, refresh=curvax.every(3, stagger=2))
    there, here = make(mesh=mesh_of()), make()
    _, state = steps(there, gradients[:2], params, mesh_of())
    portable = curvax.portable_state(there, params, state)
    state = curvax.place_state(here, params, portable)
    update = jax.jit(here.update)
    for gradient in gradients[2:]:
        _, state = update(gradient, state, params)
    after = leaves_in(curvax.portable_state(here, params, state), ["refreshes", "phase"])
    before = leaves_in(portable, ["refreshes", "phase"])
    for old, new in zip(before["phase"], after["phase"], strict=True):
        np.testing.assert_array_equal(old, new)
    for n, phase in zip(after["refreshes"], after["phase"], strict=True):
        due = [sum(t % 3 == p or t == 1 for t in range(1, 5)) for p in np.ravel(phase)]
        np.testing.assert_array_equal(np.ravel(n), due)


@pytest.mark.parametrize(
    ("name", "each", "stack"),
    cells([("racs", 2, True), ("soap", 1, False), ("muon", 1, False)], of=3),
)
def test_the_same_work_gives_the_same_bits(name: str, each: int, stack: bool) -> None:
    """RACS always; what multiplies matrices, if a device has one of a shape, as without stacks.

    XLA's products of a batch depend on its size, and so do norms; RACS has no others without a
    limit.
    """
    unlimited = {"limit": float("inf")} if name == "racs" else {}
    params, gradients = given({f"{i}/kernel": (32, 48) for i in range(2 * each)}, 2)
    found = []
    for mesh in (None, mesh_of("auto", 2)):
        place = functools.partial(on, mesh) if mesh else lambda tree: tree
        rule = curvax.MatrixRule(stack=True if mesh else stack)
        optimizer = NAMED[name].make(mesh=mesh, matrices=rule, **unlimited)
        found.append(run(jitted(optimizer), map(place, gradients), place(params))[0])
    assert_close(found[1], found[0], factor=0)


def test_the_tools_read_a_state_without_a_view() -> None:
    mesh, stacks = mesh_of(), {"2x3": np.ones((6, 2, 3), np.float32)}
    optimizer = curvax.distribute(curvax.momentum(), mesh)
    shardings = curvax.state_sharding(optimizer, stacks, mesh)
    state = jax.jit(optimizer.init, out_shardings=shardings)(stacks)
    portable = curvax.portable_state(optimizer, stacks, state)
    assert portable["2x3"].mu.shape == (6, 2, 3)
    back = curvax.place_state(optimizer, stacks, portable)
    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_a_mesh_without_matrices_distributes_nothing() -> None:
    mesh, params = mesh_of(), {"bias": np.ones(3, np.float32)}
    with pytest.warns(UserWarning, match="no parameter is a matrix"):
        optimizer = curvax.muon(0.1, mesh=mesh)
        state = optimizer.init(params)
        curvax.state_sharding(optimizer, params, mesh)
        portable = curvax.portable_state(optimizer, params, state)
    updates, after = jax.jit(optimizer.update)(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert len(jax.tree.leaves(portable)) == len(jax.tree.leaves(state))
    assert updates["bias"].shape == (3,)
