"""The contract that every optimizer keeps: on every kind of leaf, with all of Optax, with Flax.

The first part is a product of methods, leaves, dtypes and ways of running. One tree holds all kinds
of leaves, so that a way of running costs one compilation. Every row asserts that the leaves which
should be matrices were: a path for vectors alone would pass most of the rest. What Optax and Flax
do with every optimizer alike, and narrow dtypes, meshes and replicas, take one of them each, in
turns; all of them:

    CURVAX_ALL_CELLS=1 pytest tests/optimizers
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from curvax.transforms.matrices._view import MatrixViewState
from tests.cases import every_optimizer
from tests.cells import cells
from tests.contract import (
    PLAIN,
    compiled,
    plain_step,
    shapes_and_dtypes,
    small_run,
    small_tree,
)
from tests.helpers import (
    assert_close,
    gradients_like,
    normal_like,
    program,
    resolution,
    run,
    states_by_parameter,
    tolerance,
    traced,
    zeros_like,
)
from tests.registry import REGISTRY, Row


class Leaf(NamedTuple):
    """A kind of leaf: its shape, its matrices, and how a mesh axis "x" cuts rows or columns."""

    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None  # number, rows, columns; None if it is not a matrix
    by_row: P
    by_column: P


LEAVES = {
    "wide/kernel": Leaf((8, 16), (1, 8, 16), P("x"), P(None, "x")),
    "tall/kernel": Leaf((16, 8), (1, 16, 8), P("x"), P(None, "x")),
    "square/kernel": Leaf((8, 8), (1, 8, 8), P("x"), P(None, "x")),
    "row/kernel": Leaf((1, 16), (1, 1, 16), P(), P(None, "x")),
    "layers/kernel": Leaf((4, 8, 16), (4, 8, 16), P(None, "x"), P("x", None, None)),
    "Conv_0/kernel": Leaf((2, 2, 4, 8), (1, 16, 8), P(None, None, "x"), P(None, None, None, "x")),
    "query/kernel": Leaf((8, 4, 4), (1, 8, 16), P("x"), P(None, "x")),
    "out/kernel": Leaf((4, 4, 8), (1, 16, 8), P("x"), P(None, None, "x")),
    "wide/bias": Leaf((16,), None, P("x"), P("x")),
    "temperature": Leaf((), None, P(), P()),
}
SPEC = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
# Enough for a mesh: one shape cut both ways, batch axes, merged axes that are cut, a vector.
ON_MESH = ("wide/kernel", "layers/kernel", "query/kernel", "out/kernel", "wide/bias")


def contract_tree(dtype: str, kinds: Iterable[str] = LEAVES) -> dict[str, jax.Array]:
    zeros = {name: np.zeros(LEAVES[name].shape, jnp.dtype(dtype)) for name in kinds}
    return normal_like(jax.random.key(1), zeros)


def make(row: Row, kinds: Iterable[str] = LEAVES) -> Any:
    """The optimizer for leaves of these kinds."""
    axes = {name: axes for name, axes in SPEC.items() if name in kinds}
    return row.make(weight_dimension_numbers=axes)


def assert_matrix_branch(row: Row, params: Any, state: Any) -> None:
    """Every matrix has the method's own entries in the state, everything else AdamW's."""
    optimizer = make(row, params)
    lines = curvax.summarize(optimizer, params).splitlines()
    summary = {name: next(x for x in lines if x.startswith(f"| {name} |")) for name in params}
    for name, entries in states_by_parameter(optimizer, params, state).items():
        leaf = LEAVES[name]
        fields = {part for place in entries for part in place.split("/")}
        matrices = leaf.matrices
        if matrices is None and row.everything:
            matrices = (1, 1, int(np.prod(leaf.shape, dtype=int)))
        if matrices is None:
            assert {"mu", "nu", "skipped", "others"} <= fields, f"{name}: {fields}"
            assert "not a matrix" in summary[name]
        else:
            adamws = {"nu", "others"} - row.state_fields  # a grafted Adam has its own nu
            assert row.state_fields | {"skipped"} <= fields, f"{name}: {fields}"
            assert not adamws & fields, f"{name}: {fields}"
            behind = row.fields if row.after_the_matrices else frozenset()
            own = {p: x for p, x in entries.items() if behind.isdisjoint(p.split("/"))}
            assert {entry.shape[0] for entry in own.values()} == {matrices[0]}, name
            momenta = [x.shape for place, x in own.items() if "mu" in place.split("/")]
            if row.keeps == "subspaces":
                rank = min(row.settings["rank"], *matrices[1:])
                sides = [(rank, matrices[2]), (matrices[1], rank)]
                assert momenta in [[(matrices[0], *side)] for side in sides], name
            else:
                assert momenta in ([], [matrices]), name
            assert f"{matrices[1]}×{matrices[2]} in stack" in summary[name]


def assert_updated(updates: Any, params: Any) -> None:
    for name, update in jax.device_get(updates).items():
        assert update.shape == LEAVES[name].shape
        assert update.dtype == params[name].dtype
        assert np.isfinite(update).all() and np.any(update != 0), name


@pytest.mark.parametrize("row", cells(REGISTRY, of=6))
def test_every_kind_of_leaf(row: Row) -> None:
    """In the context of an Explicit mesh. Types suffice: what JAX refuses, it refuses in them."""
    shardings = shardings_for("explicit", first_by="row")
    params = jax.device_put(contract_tree("float32"), shardings)
    optimizer = make(row)

    def step(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)

    with jax.set_mesh(shardings["wide/kernel"].mesh):
        updates, state = jax.eval_shape(step, params)
        for name, update in updates.items():
            assert update.shape == LEAVES[name].shape
            assert update.dtype == params[name].dtype
            assert update.sharding == jax.typeof(params[name]).sharding, name
    assert_matrix_branch(row, params, zeros_like(state))


@pytest.mark.parametrize("row", cells(REGISTRY, of=6))
def test_no_batch_is_decomposed(row: Row) -> None:
    """On CPUs several may wait for each other forever; see docs/xla.md, "LAPACK"."""
    params = {
        f"{i}/{m}x{n}/kernel": jnp.ones((m, n)) for i in range(3) for m, n in [(4, 6), (6, 4)]
    }
    optimizer = row.make()
    state = jax.eval_shape(optimizer.init, params)
    text = jax.jit(optimizer.update).lower(params, state, params).as_text()
    found = re.findall(r"custom_call @lapack_(\w+)\(.* : \(tensor<((?:\d+x)*)f32>", text)
    assert bool(found) == bool(row.decomposes or row.svd)
    for kind, shape in found:
        batch = [int(n) for n in shape.split("x")[:-1]][:-2]
        assert np.prod(batch, initial=1) == 1, f"{kind}: {shape}"


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_a_mesh_gives_the_same_updates(row: Row) -> None:
    """The kinds of axes in turns; with all work divided, see `test_distribute.py`."""
    mesh = ("auto", "explicit")[REGISTRY.index(row) % 2]

    def on_mesh(tree: Any) -> Any:
        return {name: jax.device_put(tree[name], shardings[name]) for name in ON_MESH}

    shardings = shardings_for(mesh)
    whole = contract_tree("float32")
    expected, _ = run(make(row), gradients_like(whole, 2), whole)
    assert_updated(expected[-1], whole)
    gradients = [on_mesh(g) for g in gradients_like(whole, 2)]
    params = on_mesh(whole)
    optimizer = make(row)
    placement = curvax.state_sharding(optimizer, params, shardings["wide/bias"].mesh)
    state = jax.device_put(optimizer.init(params), placement)
    step = jax.jit(optimizer.update, out_shardings=(None, placement))
    for gradient, on_one in zip(gradients, expected, strict=True):
        updates, state = step(gradient, state, params)
        for name, update in updates.items():
            assert update.dtype == params[name].dtype
            if mesh == "explicit":
                same = update.sharding.is_equivalent_to(params[name].sharding, update.ndim)
                assert same, f"{name}: {update.sharding}"
        assert_close(updates, {name: on_one[name] for name in ON_MESH}, row.growth)
    assert step._cache_size() == 1  # pyright: ignore
    assert_matrix_branch(row, params, state)


def shardings_for(kind: str, first_by: str = "column") -> dict[str, NamedSharding]:
    """Every leaf divided over two devices, by row and by column in turns."""
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=types)
    by_row = {name: i % 2 == (first_by == "column") for i, name in enumerate(LEAVES)}
    return {
        name: NamedSharding(mesh, leaf.by_row if by_row[name] else leaf.by_column)
        for name, leaf in LEAVES.items()
    }


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_what_changes_nothing_of_a_step(row: Row) -> None:
    """Extra arguments, no params without weight decay, and leaves that are absent."""
    params = small_tree()
    optimizer = row.make()
    plain, state, _ = plain_step(row)

    def otherwise(gradient: Any, state: Any, params: Any) -> Any:
        return optimizer.update(gradient, state, row.needed(params), value=1.0, other="x")

    assert program(otherwise, params, state, params) == plain
    holes = params | {"frozen": {"kernel": None}}
    state = jax.eval_shape(optimizer.init, holes)
    text, (updates, _) = traced(optimizer.update, holes, state, holes)
    assert updates["frozen"] == {"kernel": None} and text == plain


@every_optimizer
def test_second_call_compiles_nothing(row: Row) -> None:
    """The state keeps its types, by which JAX finds a program; programs are counted for one."""
    _, state, after = plain_step(row)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)
    if row.name == "muon":
        small_run(row)
        assert compiled(row).update._cache_size() == 1  # pyright: ignore


@pytest.mark.parametrize("row", cells(PLAIN, of=5))
def test_replicas_can_be_mapped(row: Row) -> None:
    params = small_tree()
    optimizer = row.make()
    gradients = gradients_like(params, 3)
    replicas = jax.tree.map(lambda *x: np.stack(x), *gradients)
    several = jax.tree.map(lambda x: np.stack([x] * 3), params)
    state = jax.jit(jax.vmap(optimizer.init))(several)
    updates, _ = jax.jit(jax.vmap(optimizer.update))(replicas, state, several)
    for i, gradient in enumerate(gradients):
        alone, _ = compiled(row).update(gradient, optimizer.init(params), params)
        own = jax.tree.map(lambda x: np.asarray(x)[i], updates)  # noqa: B023
        assert_close(own, alone, row.growth)


@pytest.mark.parametrize("row", cells(REGISTRY, of=9))
def test_init_can_be_evaluated_abstractly(row: Row) -> None:
    params = small_tree()
    optimizer = row.make()
    abstract = jax.eval_shape(optimizer.init, jax.eval_shape(lambda: params))
    state = optimizer.init(params)
    assert shapes_and_dtypes(abstract) == shapes_and_dtypes(state)
    leaves = jax.tree.leaves((params, state))
    places = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(places) == len(leaves), "the state has an array twice: it cannot be donated"


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_init_does_not_grow_with_the_leaves_of_a_shape(row: Row) -> None:
    """But for the zeros of a momentum behind the matrix view."""
    few, many = ({f"{i}/kernel": jnp.ones((4, 6)) for i in range(n)} for n in (2, 8))
    lines = [len(program(row.make().init, params).splitlines()) for params in (few, many)]
    assert lines[1] <= lines[0] + (len(many) - len(few) if row.after_the_matrices else 0)


@pytest.mark.parametrize("row", cells(PLAIN, of=2))
def test_map_params_maps_the_matrices_entries_and_leaves_other_counters(row: Row) -> None:
    """The arrays of all stacks, with their step counts; those of other steps stay."""
    params = small_tree()
    optimizer = row.make()
    state = small_run(row)[1][-1]
    mapped = optax.tree.map_params(optimizer, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    found = [states_by_parameter(optimizer, params, each) for each in (state, mapped)]
    for name in ("dense/kernel", "dense/bias"):
        before, after = (entries[name] for entries in found)
        if (
            not row.everything and name == "dense/bias"
        ):  # AdamW's leaves share one array of counters
            own = [{p: x for p, x in e.items() if "skipped" not in p} for e in (before, after)]
            before, after = own
        assert_close(after, {place: x + 1 for place, x in before.items()}, factor=0)
    is_view = lambda node: isinstance(node, MatrixViewState)  # noqa: E731
    nodes = jax.tree.leaves(mapped, is_leaf=is_view)
    steps = [
        {int(x) for x in jax.tree.leaves([n for n in nodes if is_view(n) == inside]) if x.ndim == 0}
        for inside in (True, False)
    ]
    assert steps[0] <= {4} and steps[1] == {3}


@pytest.mark.parametrize("row", cells(PLAIN, of=2))
def test_weight_decay_is_decoupled_and_masked_and_others_have_their_learning_rate(row: Row) -> None:
    params = small_tree()
    mask = {"dense": {"kernel": True, "bias": True}, "head": {"kernel": row.on_weights}}
    given = {} if row.on_weights else {"weight_decay_mask": mask}
    optimizer = row.make(0.1, adam_learning_rate=0.2, weight_decay=0.5, **given)
    (updates,), _ = run(optimizer, gradients_like(params, 1), params)
    plain = small_run(row)[0][0]
    factor = 2 if row.spares_output_layer else 1
    kept = row.decayed(-plain["head"]["kernel"], params["head"]["kernel"]) if row.on_weights else 0
    head = jax.tree.map(lambda x: factor * (x - 0.05 * kept), plain["head"])
    assert_close(updates["head"], head, row.growth)
    faster = {"kernel": 1, "bias": 1 if row.everything else 2}
    own = {k: row.decayed(-plain["dense"][k], x) for k, x in params["dense"].items()}
    if not row.everything:
        own["bias"] = params["dense"]["bias"]
    decayed = {k: f * (plain["dense"][k] - 0.05 * own[k]) for k, f in faster.items()}
    assert_close(updates["dense"], decayed, row.growth)


@every_optimizer
def test_a_tree_without_leaves(row: Row) -> None:
    for params in ({}, None, (), {"frozen": {}}):
        optimizer = row.make()
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert updates == params


def test_the_tolerance_rejects_what_is_outside_its_bound() -> None:
    """The negative control: assert_close is as strict as it says."""
    desired = jnp.asarray([4.0, 0.0])
    bound = 16 * 4 * float(jnp.finfo(jnp.float32).eps)
    assert tolerance(desired, desired, 16) == bound
    assert resolution(desired, np.ones(1), jnp.ones(1, jnp.bfloat16)) == 2.0**-7
    assert_close(desired + jnp.asarray([0.0, 0.99 * bound]), desired)
    for wrong in ([0.0, 1.01 * bound], [0.0, jnp.nan], [jnp.inf, 0.0]):
        with pytest.raises(AssertionError):
            assert_close(desired + jnp.asarray(wrong), desired)
    for other in (desired[:1], [desired, desired], (desired,)):
        with pytest.raises(AssertionError):
            assert_close(other, desired)
