"""Which parameters are matrices, along which axes: by default, by specification, selected."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms.matrices._form import matrix_forms
from tests.helpers import computations, run

# The default rule


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 8, name="embed")(tokens)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
        x = nn.Dense(8, name="mlp")(nn.Dense(16, name="wide")(x))
        return nn.Dense(32, name="decoder")(nn.RMSNorm(name="ln_f")(x))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm, self.ln_f = nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.wide, self.mlp = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.decoder = nnx.Linear(8, 32, rngs=rngs)


def transformer(kind: str) -> Any:
    """The abstract parameters of the transformer above."""
    if kind == "linen":
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        return jax.eval_shape(LinenTransformer().init, jax.random.key(0), tokens)["params"]
    state = nnx.state(nnx.eval_shape(lambda: NnxTransformer(nnx.Rngs(0))), nnx.Param)
    return nnx.to_pure_dict(state) if kind == "nnx pure dict" else state


@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx pure dict"])
@pytest.mark.parametrize("output_layer", [None, "auto"])
def test_the_default_rule_on_a_transformer(kind: str, output_layer: str | None) -> None:
    attention_in, plain = MatrixAxes(rows=0, columns=(1, 2)), MatrixAxes(rows=0, columns=1)
    expected = {
        "attention/key/bias": "bias of key",
        "attention/key/kernel": attention_in,
        "attention/out/bias": "vector",
        "attention/out/kernel": MatrixAxes(rows=(0, 1), columns=2),
        "attention/query/bias": "bias of query",
        "attention/query/kernel": attention_in,
        "attention/value/bias": "bias of value",
        "attention/value/kernel": attention_in,
        "decoder/bias": "vector",
        "decoder/kernel": "output layer" if output_layer else plain,
        "embed/embedding": "embedding",
        "ln_f/scale": "vector",
        "mlp/bias": "vector",
        "mlp/kernel": plain,
        "norm/bias": "vector",
        "norm/scale": "vector",
        "wide/bias": "vector",
        "wide/kernel": plain,
    }
    assert MatrixRule(output_layer=output_layer)(transformer(kind)) == expected


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("Conv_0/kernel", (3, 3, 4, 8), MatrixAxes((0, 1, 2), 3)),
        ("conv/kernel", (3, 4, 8), MatrixAxes((0, 1), 2)),
        ("GroupNorm_0/scale", (2, 4), "scale of GroupNorm_0"),
        ("ln_1/weight", (2, 4), "weight of ln_1"),
        ("position_embedding", (1, 16, 8), "embedding"),
        ("wte/weight", (32, 8), "embedding"),
        ("unembed/kernel", (8, 32), MatrixAxes(0, 1)),
        ("patch_embed/kernel", (12, 8), MatrixAxes(0, 1)),
        ("0", (4, 8), MatrixAxes(0, 1)),
        ("cls_token", (1, 1, 8), "vector"),
    ],
)
def test_the_default_rule_on_single_parameters(
    path: str, shape: tuple[int, ...], expected: Any
) -> None:
    assert MatrixRule()({path: jax.ShapeDtypeStruct(shape, jnp.float32)}) == {path: expected}


@pytest.mark.parametrize("layer", ["Dense_0", "query", "value", "out"])
def test_a_scanned_dense_layer_is_never_merged(layer: str) -> None:
    """Its kernel `(layers, in, out)` has as many axes as an attention kernel; its bias tells."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return nn.Dense(8, name=layer)(x), None

    blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    x = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    params = jax.eval_shape(blocks().init, jax.random.key(0), x, None)["params"]
    assert params[layer]["kernel"].shape == (3, 8, 8)
    with pytest.raises(ValueError, match=f"{layer}/kernel.*weight_dimension_numbers"):
        MatrixRule()(params)


@pytest.mark.parametrize(
    ("shapes", "output_layer", "found"),
    [
        ({"embed/embedding": (32, 8), "dec/kernel": (8, 32), "mlp/kernel": (8, 8)}, "auto", "dec"),
        ({"lm_head/kernel": (8, 32), "mlp/kernel": (8, 8)}, "auto", "lm_head"),
        ({"readout_0/weight": (8, 32), "mlp/weight": (8, 8)}, "auto", "readout_0"),
        # Both by shape, one of them by name too: the hidden layer stays a matrix.
        ({"wte/embedding": (32, 8), "up/kernel": (8, 32), "head/kernel": (8, 32)}, "auto", "head"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, "a/*", "a"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, ["a"], "a"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, lambda path, x: x.shape[1] == 32, "a"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, "auto", None),
        ({"head/kernel": (8, 32), "b/kernel": (8, 8)}, None, None),
    ],
    ids=[
        *("by shape", "by name", "by numbered name", "by both", "by pattern", "by node"),
        *("by predicate", "none to find", "not asked for"),
    ],
)
def test_the_output_layer_goes_to_adam(
    shapes: Mapping[str, tuple[int, ...]], output_layer: Any, found: str | None
) -> None:
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    optimizer = curvax.racs(0.1, matrices=MatrixRule(output_layer=output_layer))
    state = jax.jit(optimizer.init)(params)
    for name in params:
        places = curvax.state_of(optimizer, params, state, name)
        in_adam = any("nu" in place.split("/") for place in places)
        assert in_adam == (name.split("/")[0] == found or "embed" in name), name


def test_a_second_head_beside_the_output_layer_is_a_matrix() -> None:
    # A value head beside the language model's: by name both are output layers, by shape one is.
    shapes = {"embed/embedding": (32, 8), "lm_head/kernel": (8, 32), "head/kernel": (8, 2)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    optimizer = curvax.racs(0.1)
    updates, _ = run(optimizer, [params], params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_head_wise_splits_queries_and_keys_alone() -> None:
    kernels = {f"{name}/kernel": jnp.ones((8, 2, 4)) for name in ("query", "key", "value")}
    head_wise = MatrixRule(head_wise=True)(kernels)
    assert head_wise == {
        "query/kernel": MatrixAxes(rows=0, columns=2),
        "key/kernel": MatrixAxes(rows=0, columns=2),
        "value/kernel": MatrixAxes(rows=0, columns=(1, 2)),
    }


# Specifications


SPEC_PARAMS = {
    "dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)},
    "layers": {"kernel": jnp.ones((2, 4, 6)), "gate": jnp.ones((2, 4, 6))},
}
LAYERS = MatrixAxes(rows=1, columns=2)
OPTAX_LAYERS = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
SPEC_TREE = {
    "dense": {"kernel": MatrixAxes(0, 1), "bias": None},
    "layers": {"kernel": LAYERS, "gate": LAYERS},
}
SPECS = {
    "tree": SPEC_TREE,
    "callable": lambda params: jax.tree.map(
        lambda x: {1: None, 2: MatrixAxes(0, 1), 3: LAYERS}[x.ndim], params
    ),
    "prefix": {"dense": SPEC_TREE["dense"], "layers": LAYERS},
    "pattern": {"layers/*": LAYERS},
    "pattern of a node": {"layers": LAYERS},
    "first pattern wins": {"layers/kernel": LAYERS, "*/gate": LAYERS, "layers/*": None},
    "optax": {"layers": OPTAX_LAYERS},
    "optax in a tree": {
        "dense": SPEC_TREE["dense"],
        "layers": dict.fromkeys(SPEC_TREE["layers"], OPTAX_LAYERS),
    },
    "negative axes": {"layers/*": MatrixAxes(rows=-2, columns=-1)},
}


def step_with(spec: Any) -> tuple[Any, Any]:
    """What a first step computes with these axes, and the shapes of what matrices have."""
    # Both look at the tree, once whole and once with holes where other parameters were.
    rule = MatrixRule(weight_dimension_numbers=spec, stack=False)
    optimizer = curvax.muon(0.1, method="svd", matrices=rule)

    def step(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)

    return computations(step, SPEC_PARAMS), jax.eval_shape(step, SPEC_PARAMS)[1]


@functools.cache
def step_with_tree() -> Any:
    return step_with(SPEC_TREE)[0]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_all_ways_to_specify_axes_are_the_same(spec: Any) -> None:
    computed, state = step_with(spec)
    assert computed == step_with_tree()
    stacks = state.inner_states["matrices"].inner_state[0].inner
    assert {name: own.inner[0][0].mu.shape for name, own in stacks.items()} == {
        "dense/kernel": (1, 4, 6),
        "layers/gate": (2, 4, 6),
        "layers/kernel": (2, 4, 6),
    }


@pytest.mark.parametrize("last", ["out", "wo"])
def test_a_prefix_may_end_at_a_node_called_value(last: str) -> None:
    params = {"attention": {n: {"kernel": jnp.ones((4, 4))} for n in ("key", "value", last)}}
    spec = {"attention": {"key": MatrixAxes(0, 1), "value": None, last: MatrixAxes(1, 0)}}
    assert MatrixRule(weight_dimension_numbers=spec)(params) == {
        "attention/key/kernel": MatrixAxes(0, 1),
        "attention/value/kernel": "weight_dimension_numbers is None",
        f"attention/{last}/kernel": MatrixAxes(1, 0),
    }


@pytest.mark.parametrize(
    "selection",
    [
        "a/*",
        ["a/kernel"],
        ("a",),
        ["a/kernel", "a/none"],
        lambda path, leaf: path == "a/kernel" and leaf.ndim == 2,
    ],
    ids=["pattern", "list", "node", "absent leaf", "predicate"],
)
def test_matrices_can_be_selected(selection: Any) -> None:
    params = {"a": {"kernel": jnp.ones((4, 4)), "none": None}, "b": {"kernel": jnp.ones((4, 4))}}
    treatments = MatrixRule(matrices=selection)(params)
    assert treatments == {"a/kernel": MatrixAxes(0, 1), "b/kernel": "not selected by matrices"}


def test_all_takes_every_parameter_as_a_matrix() -> None:
    params = {
        "embed/embedding": jnp.ones((9, 4)),
        "query/bias": jnp.ones((2, 4)),
        "norm/scale": jnp.ones(4),
        "t": jnp.ones(()),
        "mask": jnp.ones((1, 1, 5)),
    }
    forms = {
        name: matrix_forms(name, params[name].shape, axes)[0]
        for name, axes in MatrixRule(matrices="all")(params).items()
        if isinstance(axes, MatrixAxes)
    }
    assert {name: (form.count, *form.tile) for name, form in forms.items()} == {
        "embed/embedding": (1, 9, 4),
        "query/bias": (1, 1, 8),
        "norm/scale": (1, 1, 4),
        "t": (1, 1, 1),
        "mask": (1, 1, 5),
    }


@pytest.mark.parametrize(
    "rule",
    [
        {"matrices": ["a/*", "b/*"], "weight_dimension_numbers": {"b/*": None}},
        {"matrices": ["a/*", "head/*"], "output_layer": "auto"},
        {"matrices": ["a/*", "head/*"], "output_layer": "head/*"},
        {"matrices": ["a/*", "head/*"], "output_layer": lambda path, leaf: path.startswith("head")},
    ],
    ids=["specified as none", "output layer found", "output layer named", "output layer predicate"],
)
def test_a_pattern_may_match_only_parameters_that_are_excluded_otherwise(
    rule: dict[str, Any],
) -> None:
    params = {name: {"kernel": jnp.ones((4, 4))} for name in ("a", "b", "head")}
    optimizer = curvax.racs(0.1, matrices=MatrixRule(**{"output_layer": None, **rule}))
    updates, states = run(optimizer, [params], params)
    assert all(np.any(x) for x in jax.tree.leaves(updates))
    places = curvax.state_of(optimizer, params, states[0], "a/kernel")
    assert any("rows" in place.split("/") for place in places)
