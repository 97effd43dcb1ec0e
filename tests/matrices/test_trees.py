"""Trees of every kind: Flax's, dataclasses, callable modules, and tied parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

import curvax
from curvax import MatrixAxes, MatrixRule
from tests.cells import cells
from tests.helpers import assert_close, computations, gradients_like, run


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """Like an Equinox module: a pytree of its parameters that is also the function.

    JAX 0.10 compares treedefs of dataclasses by their static fields and numbers of children, not by
    their types: without a static field `jax.jit` may return another class in its place.
    """

    kernel: Any
    bias: Any = None
    activation: str = dataclasses.field(default="relu", metadata={"static": True})

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    dense: Layer
    head: Layer
    kind: str = dataclasses.field(default="callable", metadata={"static": True})

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dense(x))


class NnxNetwork(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(6, 4, use_bias=False, rngs=nnx.Rngs(0))


def as_dict(kernel: Any, bias: Any, head: Any) -> Any:
    return {"dense": {"kernel": kernel, "bias": bias}, "head": {"kernel": head}}


def as_nnx_state(*leaves: Any) -> Any:
    structure = jax.tree.structure(nnx.state(NnxNetwork(), nnx.Param))
    return structure.unflatten(jax.tree.leaves(as_dict(*leaves)))


def as_partitioned(*leaves: Any) -> Any:
    names = ("in", "out"), ("out",), (None, "out")
    return as_dict(*map(nn.Partitioned, leaves, names))


LIKE_FLAX: dict[str, Callable[..., Any]] = {
    "Linen dict": as_dict,
    "frozen dict": lambda *leaves: FrozenDict(as_dict(*leaves)),
    "Partitioned boxes": as_partitioned,
    "nnx.State": as_nnx_state,
    "callable dataclass": lambda kernel, bias, head: Network(Layer(kernel, bias), Layer(head)),
}
TREES = LIKE_FLAX | {
    "flat dict": lambda kernel, bias, head: {"kernel": kernel, "b": bias, "head": head},
    "tuple": lambda kernel, bias, head: (kernel, bias, head),
    "list": lambda kernel, bias, head: [kernel, (bias,), [head]],
}
TWO_STEPS = curvax.polar.newton_schulz(2)
METHODS: dict[str, Callable[..., Any]] = {
    "muon": functools.partial(curvax.muon, method=TWO_STEPS),
    "racs": functools.partial(curvax.racs, matrices=MatrixRule(output_layer=None), iterations=2),
    "asgo": curvax.asgo,
}


@functools.cache
def tree_gradient() -> tuple[jax.Array, ...]:
    return gradients_like(tuple(np.zeros(shape) for shape in ((4, 6), (6,), (6, 4))), 1)[0]


def first_step(method: str, tree: str) -> Callable[..., Any]:
    """From a gradient, as leaves in the order of `TREES`: updates and what matrices have."""
    build, optimizer = TREES[tree], METHODS[method](0.1, weight_decay=0.1)

    def step(*gradient: Any) -> tuple[list[Any], Any]:
        params = build(*gradient)
        before = optimizer.init(params)
        updates, state = optimizer.update(params, before, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, before)
        leaves = dict(zip(jax.tree.leaves(build(0, 1, 2)), jax.tree.leaves(updates), strict=True))
        return [leaves[i] for i in range(3)], state.inner_states["matrices"]

    return step


@functools.cache
def step_of_dict(method: str) -> Any:
    """What it computes for a dict, which is something."""
    step = first_step(method, "Linen dict")
    updates, matrices = jax.jit(step)(*tree_gradient())
    assert all(np.any(x) for x in jax.tree.leaves(updates))
    assert any(x.ndim >= 2 and np.any(x) for x in jax.tree.leaves(matrices))
    return computations(step, *tree_gradient())


@pytest.mark.parametrize(("method", "tree"), cells(METHODS, list(TREES)[1:], of=10))
def test_every_kind_of_tree(method: str, tree: str) -> None:
    """The same is computed, in whatever order."""
    assert computations(first_step(method, tree), *tree_gradient()) == step_of_dict(method)


@pytest.mark.parametrize("tree", LIKE_FLAX)
def test_parameters_have_the_same_names_in_every_tree_of_flax(tree: str) -> None:
    params = TREES[tree](*tree_gradient())
    optimizer = curvax.muon(0.1, matrices=MatrixRule(stack=False))
    state = optimizer.init(params)
    for name, arrays in (("dense/kernel", {"mu"}), ("dense/bias", {"mu", "nu"})):
        places = curvax.state_of(optimizer, params, state, name)
        assert arrays == {"mu", "nu"} & {part for place in places for part in place.split("/")}
        shared = [place for place in places if f"/{name}" not in place]
        # The counters of vectors are in one array.
        assert [x.rpartition("/")[2] for x in shared] == ["skipped"] * (name == "dense/bias")


def test_a_callable_tree_is_no_function_of_parameters() -> None:
    """Of axes, it is a tree of axes; of booleans, a mask."""
    params = LIKE_FLAX["callable dataclass"](*tree_gradient())
    spec = jax.tree.map(lambda x: MatrixAxes(1, 0) if x.ndim == 2 else None, params)
    assert MatrixRule(weight_dimension_numbers=spec)(params) == {
        "dense/kernel": MatrixAxes(1, 0),
        "dense/bias": "weight_dimension_numbers is None",
        "head/kernel": MatrixAxes(1, 0),
    }
    mask = jax.tree.map(lambda x: x.ndim == 2, params)
    optimizer = curvax.muon(0.1, method=TWO_STEPS, weight_decay=0.1, weight_decay_mask=mask)
    plain = curvax.muon(0.1, method=TWO_STEPS)
    decayed, undecayed = (run(o, [params], params)[0][0] for o in (optimizer, plain))
    assert_close(decayed.dense.bias, undecayed.dense.bias, factor=0)
    assert_close(decayed.head.kernel, undecayed.head.kernel - 0.01 * params.head.kernel, 4)


@pytest.mark.parametrize("method", cells([curvax.muon, curvax.osgdm], of=2))
def test_a_mask_fits_by_path_whatever_boxes_hold_it(method: Any) -> None:
    """An `nnx.Optimizer` passes on parameters without the boxes that `nnx.state` has."""
    model = nnx.Linear(4, 6, use_bias=False, rngs=nnx.Rngs(0))
    boxed = nnx.state(model, nnx.Param)
    mask = jax.tree.map(lambda x: x.ndim < 2, boxed)  # no kernel decays
    plain = nnx.to_pure_dict(boxed)
    undecayed, _ = method(0.1).update(plain, method(0.1).init(plain), plain)
    for given in (mask, nnx.to_pure_dict(mask), {"kernel": np.bool_(False)}):
        optimizer = method(0.1, weight_decay=0.5, weight_decay_mask=given)
        for params in (boxed, nnx.as_pure(boxed), plain):
            updates, _ = optimizer.update(params, optimizer.init(params), params)
            assert_close(jax.tree.leaves(updates), jax.tree.leaves(undecayed), factor=0)
    nnx.Optimizer(model, optimizer, wrt=nnx.Param).update(model, boxed)
    tree = as_dict(*tree_gradient())
    prefix = {"dense": True, "head": False}  # Optax's masks may end above the parameters
    optimizer = method(0.1, weight_decay=0.5, weight_decay_mask=prefix)
    optimizer.update(tree, optimizer.init(tree), tree)
    with pytest.raises(ValueError, match="weight_decay_mask.*no entry for 'head/kernel'.*top"):
        method(0.1, weight_decay=0.1, weight_decay_mask={"dense": True, "top": True}).init(tree)


def test_tied_parameters_are_one_parameter() -> None:
    first, second = (nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2))
    second.kernel = first.kernel
    model, before = nnx.Dict(first=first, second=second), first.kernel[...]

    def loss(model: Any) -> jax.Array:
        return jnp.sum(jnp.sin(model.second(model.first(jnp.eye(4)))))

    optimizer = nnx.Optimizer(model, curvax.muon(0.1, method="svd"), wrt=nnx.Param)
    nnx.jit(lambda optimizer, model: optimizer.update(model, nnx.grad(loss)(model)))(
        optimizer, model
    )
    gradient = jax.grad(lambda w: jnp.sum(jnp.sin(w @ w)))(before)
    assert model.first.kernel is model.second.kernel
    # The two gradients agree up to rounding, of which small singular values make more.
    step = model.first.kernel[...] - before
    assert_close(step, -0.1 * curvax.polar_svd(gradient), condition=64)


@pytest.mark.parametrize("method", cells([curvax.muon, curvax.soap, curvax.asgo], of=2))
def test_what_is_no_array_and_has_no_gradient_is_no_parameter(method: Any) -> None:
    """As `eqx.filter_grad` gives gradients of a whole module."""
    kernel, bias, _ = tree_gradient()
    whole = {"kernel": kernel, "bias": bias, "activation": jnp.tanh, "rate": 0.5}
    whole["seed"] = jnp.arange(3)
    gradient = {name: x if name in ("kernel", "bias") else None for name, x in whole.items()}
    optimizer = method(0.1)
    state = optimizer.init(gradient)
    expected, _ = optimizer.update(gradient, state, gradient)
    updates, state = optimizer.update(gradient, state, whole)
    assert jax.tree.structure(updates) == jax.tree.structure(gradient)
    assert_close(jax.tree.leaves(updates), jax.tree.leaves(expected), factor=0)
    optimizer.update(gradient, state, whole)
