"""Which parameters are matrices, along which axes: by default, by specification, selected."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms.matrices._form import matrix_forms
from tests.helpers import computations, run

# The default rule


@pytest.mark.parametrize(
    ("output_layer", "found"),
    [
        ("auto", "head/kernel"),
        ("a/*", "a/kernel"),
        (["a"], "a/kernel"),
        (lambda path, x: x.shape[1] == 8, "a/kernel"),
        (None, None),
    ],
    ids=["by name", "by pattern", "by node", "by predicate", "not asked for"],
)
def test_the_output_layer_goes_to_adam(output_layer: Any, found: str | None) -> None:
    params = {"a/kernel": jnp.ones((8, 8)), "head/kernel": jnp.ones((8, 32))}
    optimizer = curvax.racs(0.1, matrices=MatrixRule(output_layer=output_layer))
    state = optimizer.init(params)
    for name in params:
        places = curvax.state_of(optimizer, params, state, name)
        assert any("nu" in place.split("/") for place in places) == (name == found)


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
    "pattern of a vector": {"layers/*": LAYERS, "dense/bias": None},
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
