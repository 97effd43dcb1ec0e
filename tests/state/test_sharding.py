"""How a state is sharded: copies of the parameters like the parameters."""

from __future__ import annotations

import jax
import optax
from jax.sharding import PartitionSpec as P

import curvax
from tests.registry import NAMED
from tests.shared.meshes import ADAMW, begin, given, mesh_of, on


def test_copies_of_parameters_are_sharded_like_the_parameters() -> None:
    mesh = mesh_of("auto", 2, 2)
    shapes = {"wide/kernel": (4, 6), "embed/embedding": (8, 4), "wide/bias": (6,)}
    specs = {"wide/kernel": P("x", "y"), "embed/embedding": P("y"), "wide/bias": P("x")}
    params = on(mesh, given(shapes)[0], specs)
    optimizer = NAMED["shampoo"].make(mesh=mesh, base=ADAMW)
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


def test_moments_of_other_optimizers_are_sharded_whatever_the_labels_stand_for() -> None:
    mesh = mesh_of("auto", 4)
    shapes = {"in/kernel": (8, 4), "in/bias": (4,), "out/kernel": (4, 8)}
    flat = on(mesh, given(shapes)[0], dict.fromkeys(shapes, P("x")))
    params = {"in": {"kernel": flat["in/kernel"], "bias": flat["in/bias"]}}
    params["out"] = {"kernel": flat["out/kernel"]}
    parts = {"matrices": curvax.muon(0.1), "others": optax.adamw(0.1)}
    optimizer = optax.partition(parts, {"in": "others", "out": "matrices"})
    adam = curvax.state_sharding(optimizer, params, mesh).inner_states["others"].inner_state[0]
    assert {s.spec for s in jax.tree.leaves((adam.mu, adam.nu))} == {P("x")}
