"""How a state is sharded: copies of the parameters like the parameters."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import curvax
from tests.helpers import assert_close
from tests.registry import NAMED
from tests.shared.meshes import ADAMW, begin, explicit_by_default, given, mesh_of, on


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


def test_a_step_leaves_the_state_where_its_sharding_is_said_to_be() -> None:
    """Also that of a scanned leaf that is sharded along its layers, on an Explicit mesh."""
    mesh = mesh_of("explicit", 2)
    shapes = {"layers/kernel": (2, 160, 160), "layers/scale": (2, 4)}
    params = on(mesh, given(shapes)[0], dict.fromkeys(shapes, P("x")))
    axes = {"layers/kernel": curvax.MatrixAxes(1, 2)}
    optimizer = curvax.muon(
        0.1, weight_dimension_numbers=axes, method=curvax.polar.newton_schulz(1)
    )
    state = begin(optimizer, params, mesh)
    step = jax.jit(optimizer.update).lower(params, state, params).compile()
    _, state = step(params, state, params)
    step(params, state, params)
    shardings = curvax.state_sharding(optimizer, params, mesh)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings


class Network(nn.Module):
    """Kernels in boxes that say how they are sharded."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.initializers.lecun_normal()
        for i in range(2):
            init = nn.with_partitioning(kernel, (("x",), None) if i else (None, "x"))
            x = nn.Dense(x.shape[-1], kernel_init=init)(x)
        return x


def of_matrices(state: TrainState) -> Any:
    return state.opt_state.inner_states["matrices"]


@explicit_by_default
def test_boxes_of_flax_say_the_sharding(kind: str) -> None:
    """`nn.get_sharding` asks the state of matrices, which is in a box too."""
    mesh, inputs = mesh_of(kind, 8), jnp.ones((2, 8))
    optimizer, network = curvax.muon(0.1, mesh=mesh), Network()

    def create() -> TrainState:
        params = network.init(jax.random.key(0), inputs)["params"]
        return TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)

    abstract = jax.eval_shape(create)
    shardings = nn.get_sharding(abstract, mesh)
    ours = curvax.state_sharding(optimizer, abstract.params, mesh)
    logical = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, [("x", "x")])  # pyright: ignore
    found, own, same = map(of_matrices, (shardings, abstract.replace(opt_state=ours), logical))
    for x, *three in zip(
        *map(jax.tree.leaves, (of_matrices(abstract), found, own, same)), strict=True
    ):
        assert all(s.is_equivalent_to(three[0], x.ndim) for s in three)
    state = jax.jit(create, out_shardings=shardings)()
    matrices = jax.tree.leaves(of_matrices(state))
    on_one = sum(x.addressable_shards[0].data.nbytes for x in matrices)
    assert on_one < sum(x.nbytes for x in matrices) / 4
    step = jax.jit(
        lambda s: s.apply_gradients(grads=s.params),
        in_shardings=(shardings,),
        out_shardings=shardings,
    )
    state = step(step(state))
    assert state.step == 2 and step._cache_size() == 1
    assert "| Dense_0/kernel | 0 |" in curvax.report(optimizer, state.params, state.opt_state)
    portable = curvax.portable_state(optimizer, state.params, state.opt_state)
    placed = curvax.place_state(optimizer, state.params, portable)
    assert_close(of_matrices(step(state.replace(opt_state=placed))), of_matrices(step(state)), 0)
    opened = nn.unbox(state)
    updates, new = jax.jit(opened.tx.update)(opened.params, opened.opt_state, opened.params)
    assert jax.tree.structure(new) == jax.tree.structure(opened.opt_state)
    assert all(np.any(x) for x in jax.tree.leaves(updates["Dense_0"]["kernel"]))


def test_copies_of_boxed_parameters_are_sharded_like_their_boxes() -> None:
    mesh = mesh_of("auto", 2)
    params = jax.eval_shape(lambda: Network().init(jax.random.key(0), jnp.ones((2, 8)))["params"])
    moments = curvax.state_sharding(optax.adam(0.1), params, mesh)[0].mu
    sharded = [not s.is_fully_replicated for s in jax.tree.leaves(moments["Dense_0"])]
    assert sharded == [False, True]  # the bias has no box


def test_boxes_with_logical_axes_are_sharded_by_rules() -> None:
    mesh, shape = mesh_of("auto", 2), jax.ShapeDtypeStruct((4, 6), jnp.float32)
    logical = {"kernel": nn.LogicallyPartitioned(shape, ("embed", None))}
    rules = [("embed", "x")]
    specs = nn.get_partition_spec(logical)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)  # pyright: ignore
    shapes = jax.tree.map(
        lambda box, s: box.replace_boxed(jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=s)),
        logical,
        shardings,
        is_leaf=lambda x: isinstance(x, nn.Partitioned),
    )
    found = curvax.state_sharding(optax.adam(0.1), shapes, mesh)[0].mu["kernel"]
    assert found.value.spec == P("x", None)
