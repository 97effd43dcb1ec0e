"""How a state is sharded: copies of the parameters like the parameters."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P
from shared.meshes import ADAMW, ROWS, begin, given, mesh_of, on

import curvax


def test_copies_of_parameters_are_sharded_like_the_parameters() -> None:
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
