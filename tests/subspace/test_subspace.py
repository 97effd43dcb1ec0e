"""Subspaces: their state, zero and bad gradients, random keys, summaries, narrow dtypes."""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import subspaces
from curvax.transforms.subspace._subspace import SubspaceState
from tests.cells import cells
from tests.helpers import assert_close, scanned
from tests.shared.low_rank import GRADIENTS, RANK, trajectories

DIRECTIONS = {
    "galore": curvax.scale_by_galore,
    "fira": curvax.scale_by_fira,
    "alice": curvax.scale_by_alice,
    "apollo": curvax.scale_by_apollo,
    "sumo": curvax.scale_by_sumo,
}


@functools.cache
def _by_period(method):
    offset = 1 if method == "sumo" else 0
    return lambda period: DIRECTIONS[method](rank=RANK, refresh=curvax.every(period, offset=offset))


def _subspace_of(state):
    """The subspace of the matrices "x", in a state of any of the directions."""
    is_state = lambda node: isinstance(node, SubspaceState)  # noqa: E731
    (found,) = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    return found.subspace


@pytest.mark.parametrize("method", cells(["alice", "sumo", "apollo"], of=3))
def test_zero_gradients_leave_a_subspace_alone_until_there_is_one(method):
    gradients = {"x": [np.zeros((6, 9))] * 2 + GRADIENTS["wide"][2:]}
    directions, states = trajectories(_by_period(method), gradients, "float32", 7)
    subspace = _subspace_of(states)
    assert np.isfinite(directions["x"]).all() and not directions["x"][:2].any()
    assert subspace.refreshes[:3].tolist() == [0, 0, 1]
    assert subspace.rejected[:3].tolist() == [1, 2, 2]
    assert directions["x"][2].any()


class CountingFinder(subspaces.BasisFinder):
    """The exact basis, found by a program that says when it runs."""

    def __init__(self):
        self.found = 0

    def find(self, check, rank):
        def count(_):
            self.found += 1

        jax.debug.callback(count, check.gradient[0, 0])
        return subspaces.svd().find(check, rank)


def test_what_follows_a_product_is_scaling_alone():
    """GPUs and TPUs compute it with the product; a choice by matrix would be one more pass."""
    direction = curvax.in_subspace(
        optax.scale_by_adam(), RANK, basis=subspaces.svd(), refresh=curvax.every(4)
    )
    g = {"x": jnp.ones((3, 6, 9))}
    jaxpr = jax.make_jaxpr(lambda g, s: direction.update(g, s)[0])(g, direction.init(g)).jaxpr
    made = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
    (result,), seen = jaxpr.outvars, []
    while not seen or seen[-1] != "dot_general":
        equation = made[result]
        seen.append(equation.primitive.name)
        result = equation.invars[0]
    assert set(seen) <= {"dot_general", "convert_element_type", "transpose"}, seen


def test_a_parameter_without_gradients_costs_no_decomposition():
    finder = CountingFinder()
    direction = curvax.in_subspace(optax.identity(), 2, basis=finder, refresh=curvax.every(3))
    step = jax.jit(direction.update)
    gradient = np.float32(GRADIENTS["wide"][0])
    state = jax.jit(direction.init)(gradient)
    for g, found in ((0 * gradient, 0), (0 * gradient, 0), (gradient, 1), (gradient, 1)):
        _, state = jax.block_until_ready(step(g, state))
        jax.effects_barrier()
        assert finder.found == found


def test_keys_are_those_of_paths_and_do_not_depend_on_the_stack():
    """Written down, so that keys stay the same in later versions."""
    shapes = {"a": (3, 6, 8), "b": (6, 8)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    axes, inner = (
        {"*": curvax.MatrixAxes(rows=-2, columns=-1)},
        curvax.scale_by_apollo(rank=2, seed=3),
    )
    for stack in (True, False):
        view = curvax.on_matrices(inner, weight_dimension_numbers=axes, stack=stack)
        state = jax.jit(view.init)(params)
        for name, shape in shapes.items():
            entries = curvax.state_of(view, params, state, name)
            (found,) = (x for place, x in entries.items() if "key" in place)
            own = jax.random.key(3, impl="threefry2x32")
            own = jax.random.fold_in(own, zlib.crc32(name.encode()))
            keys = [jax.random.fold_in(own, i) for i in range(math.prod(shape[:-2]))]
            expected = np.stack([jax.random.key_data(key) for key in keys])
            assert_close(np.reshape(found, expected.shape), expected, factor=0)


def test_summaries_show_the_rank_and_errors_name_the_parameter():
    params = {"small": {"kernel": jnp.ones((3, 9))}, "large": {"kernel": jnp.ones((12, 10))}}
    text = curvax.summarize(curvax.galore(0.1, rank=5), params)
    assert "3×9 in stack 3x9; rank 3 instead of 5 on the left" in text
    assert "12×10 in stack 12x10; rank 5 on the right" in text
    with pytest.raises(
        ValueError, match=r"rank must be at most 3 for the parameter 'small/kernel'"
    ):
        _unclamped(5, subspaces.svd()).init(params)
    switched = subspaces.complement(2)
    text = curvax.summarize(curvax.alice(0.1, rank=3, switching=switched), params)
    assert "rank 3 on the left, leading 3 instead of 2" in text  # no complement of 3 in 3
    assert "rank 3 on the right, leading 2" in text and "leading 2 instead" not in text
    with pytest.raises(ValueError, match=r"leading must be 3 for the parameter 'small/kernel'"):
        _unclamped(3, switched).init(params)


def _unclamped(rank, basis):
    direction = curvax.in_subspace(
        optax.scale_by_adam(), rank, basis=basis, refresh=curvax.every(2), clamp_rank=False
    )
    return curvax.assemble(direction, 0.1, guard=False)


IN_SUBSPACE: dict[str, Any] = {"basis": subspaces.svd(), "refresh": curvax.every(2)}


@pytest.mark.parametrize("change", ["transposed", "one row"])
@pytest.mark.parametrize(
    "around",
    [
        lambda inner: curvax.in_subspace(inner, 2, **IN_SUBSPACE),
        lambda inner: curvax.in_eigenbasis(inner, refresh=curvax.every(2)),
        lambda inner: curvax.graft(optax.identity(), inner),
        lambda inner: curvax.graft(inner),
        lambda inner: curvax.blend(inner, optax.identity(), (1, 1)),
        lambda inner: curvax.precondition(refresh=curvax.every(2), momentum=inner),
        lambda inner: curvax.precondition_diagonal(momentum=inner),
    ],
)
def test_a_direction_of_another_shape_inside_is_refused(around: Any, change: Any) -> None:
    changed, shape = lambda g: g.mT, (4, 6)
    if change == "one row":
        changed, shape = lambda g: g[..., :1, :], (4, 4)
    inner = optax.stateless(lambda updates, params: jax.tree.map(changed, updates))
    optimizer = curvax.assemble(around(inner), 0.1)
    with pytest.raises(ValueError, match=r"shape of its gradient, \(1, \d, \d\) for 'kernel'; got"):
        optimizer.init({"kernel": jnp.ones(shape)})


@pytest.mark.parametrize("shape", [(64, 17, 53), (2, 4, 4096)])
@pytest.mark.parametrize("basis", ["svd", "gaussian"])
def test_no_entry_of_a_projection_that_is_above_its_own_rounding_counts_as_noise(shape, basis):
    """Without averages, ratios of moments are signs. An entry rounds with its own column."""
    g = np.random.default_rng(0).standard_normal(shape) * np.geomspace(1, 1e-6, shape[-1])
    g = g.astype(np.float32)
    own = {"basis": getattr(subspaces, basis)(), "refresh": curvax.every(2), "side": "left"}
    transform = curvax.in_subspace(curvax.moment_ratio(0.0, 0.0), 3, **own)
    direction, state = jax.jit(transform.update)(g, transform.init(jnp.asarray(g)))
    sigma, u = np.abs(state.inner.mu), np.asarray(state.subspace.basis, np.float64)
    small = 1e-4 * sigma.max(axis=(1, 2), keepdims=True)
    assert (sigma < small).any()
    inside = np.linalg.pinv(u) @ np.asarray(direction, np.float64)
    eps = np.finfo(np.float32).eps
    assert_close(np.abs(inside), np.ones_like(inside), 256.0, eps=eps)


def test_rounding_beside_a_gradient_of_rank_one_counts_as_noise() -> None:
    rng = np.random.default_rng(0)
    g = jnp.asarray(np.outer(rng.normal(size=4), rng.normal(size=4096)), jnp.float32)
    transform = curvax.in_subspace(curvax.moment_ratio(0.0, 0.0), 3, side="left", **IN_SUBSPACE)
    _, state = jax.jit(transform.update)(g, transform.init(g))
    assert state.inner.mu[0].all() and not state.inner.mu[1:].any()


UNIT = float(jnp.finfo(jnp.bfloat16).eps)


def _wide_arrays(method: str, **options: Any) -> dict[str, tuple[str, int]]:
    """The dtype and the size of the state's floating-point arrays, by field."""
    direction = getattr(curvax, f"scale_by_{method}")(rank=4, **options)
    state = jax.eval_shape(direction.init, jnp.zeros((3, 16, 24)))
    return {
        jax.tree_util.keystr(path[-1:], simple=True): (leaf.dtype.name, leaf.size)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


@pytest.mark.parametrize("method", ["galore", "fira", "alice", "apollo", "sumo"])
def test_bases_and_moments_take_two_bytes_and_all_else_four(method: str) -> None:
    found = _wide_arrays(method, dtype="bfloat16")
    assert {name: size for name, (_, size) in found.items()} == {
        name: size for name, (_, size) in _wide_arrays(method).items()
    }
    narrow = {name for name, (dtype, _) in found.items() if dtype == "bfloat16"}
    assert narrow == {"basis", "mu", "nu"} & {*found}


def test_an_average_in_bfloat16_follows() -> None:
    """Rounded to the nearest, a second moment with b2 = 0.999 would not decay at all."""
    b2, steps = 0.999, 400
    gradients = np.zeros((steps, 8, 64), np.float32)
    gradients[0] = np.random.default_rng(0).standard_normal((8, 64))
    direction = curvax.scale_by_galore(rank=4, b2=b2, dtype="bfloat16")
    second = np.asarray(scanned(direction)(gradients)[1][0].inner.nu, np.float64)
    decayed = second[-1].sum() / second[0].sum()
    assert decayed == pytest.approx(b2 ** (steps - 1), rel=0.02)
    nearest = jnp.asarray(second[0], jnp.bfloat16)
    assert (jnp.bfloat16(b2) * nearest == nearest).all()


@pytest.mark.parametrize("method", cells(["galore", "alice"], of=2))
def test_the_rounding_of_a_basis_is_not_taken_for_a_gradient(method: str) -> None:
    """Of gradients of rank one the other directions of the basis hold nothing."""
    left, right = np.random.default_rng(0).standard_normal((2, 16))
    gradients = np.stack([np.outer(left, right) * s for s in (1.0, 2.0, 0.5)]).astype(np.float32)
    options = {"alice": {"switching": curvax.subspaces.complement(1)}}.get(method, {})
    make = getattr(curvax, f"scale_by_{method}")
    wide, narrow = (
        scanned(make(rank=3, dtype=dtype, **options))(gradients)[0] for dtype in (None, "bfloat16")
    )
    assert np.linalg.norm(narrow - wide) < 2 * UNIT * np.linalg.norm(wide)
