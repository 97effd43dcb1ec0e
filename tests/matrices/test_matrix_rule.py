"""Which parameters are matrices, along which axes: by specification, selected, guessed."""

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
from tests.shared.rules import Shapes, abstract, offered, treated
from tests.shared.wrong_calls import assert_refused, wrong_calls

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
    "Optax' Muon": {"layers": OPTAX_LAYERS},
    "Optax' GaLore": {
        "layers": optax.contrib.GaLoreDimensionNumbers(reduction_axis=1, output_axis=2)
    },
    "Optax' in a tree": {
        "dense": SPEC_TREE["dense"],
        "layers": dict.fromkeys(SPEC_TREE["layers"], OPTAX_LAYERS),
    },
    "negative axes": {"layers/*": MatrixAxes(rows=-2, columns=-1)},
}


@functools.cache
def step_with(name: str) -> tuple[Any, Any]:
    """What a first step computes with these axes, and the shapes of what matrices have."""
    # Both look at the tree, once whole and once with holes where other parameters were.
    rule = MatrixRule(weight_dimension_numbers=SPECS[name], stack=False)
    optimizer = curvax.muon(0.1, method="svd", matrices=rule)

    def step(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)

    return computations(step, SPEC_PARAMS), jax.eval_shape(step, SPEC_PARAMS)[1]


@pytest.mark.parametrize("name", SPECS)
def test_all_ways_to_specify_axes_are_the_same(name: str) -> None:
    computed, state = step_with(name)
    assert computed == step_with("tree")[0]
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


def test_a_pattern_leaves_alone_what_lacks_its_axes() -> None:
    shapes = {"linear/weight": (4, 8), "norm/weight": (8,), "blocks/norm/weight": (3, 8)}
    shapes |= {"blocks/linear/weight": (3, 4, 8), "blocks/linear/bias": (3, 4)}
    spec = {"blocks/*": MatrixAxes(2, 1), "*/weight": MatrixAxes(0, 1)}
    assert treated(shapes, weight_dimension_numbers=spec) == {
        "linear/weight": MatrixAxes(0, 1),
        "norm/weight": "vector",
        "blocks/norm/weight": "weight of norm",
        "blocks/linear/weight": MatrixAxes(2, 1),
        "blocks/linear/bias": "bias of linear",
    }


def test_a_path_with_brackets_matches_itself() -> None:
    shapes: Shapes = {"layers[0].w": (4, 8), "layers[1].w": (4, 8)}
    said = MatrixRule(weight_dimension_numbers={"layers[0].w": None})
    assert treated(shapes, said)["layers[0].w"] == "weight_dimension_numbers is None"
    with pytest.raises(
        ValueError, match=r"matches no parameter.*\[\.\.\.\] is a set of characters"
    ):
        treated({"layers/0/w": (4, 8)}, said)


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
    excluded = MatrixRule(output_layer=selection)(params)
    assert excluded == {"a/kernel": "output layer", "b/kernel": MatrixAxes(0, 1)}


def test_all_takes_every_parameter_as_a_matrix() -> None:
    shapes = {"embed/embedding": (9, 4), "query/bias": (2, 4), "norm/scale": (4,), "t": ()}
    shapes |= {"mask": (1, 1, 5)}
    found = {
        name: matrix_forms(name, shapes[name], axes)[0]
        for name, axes in treated(shapes, matrices="all").items()
    }
    assert {name: (form.count, *form.tile) for name, form in found.items()} == {
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
    ],
    ids=["specified as none", "output layer found", "output layer named"],
)
def test_a_pattern_may_match_only_parameters_that_are_excluded_otherwise(
    rule: dict[str, Any],
) -> None:
    """These go to Adam."""
    params = {name: {"kernel": jnp.ones((4, 4))} for name in ("a", "b", "head")}
    optimizer = curvax.racs(0.1, matrices=MatrixRule(**{"output_layer": None, **rule}))
    updates, states = run(optimizer, [params], params, jit=False)
    assert all(np.any(x) for x in jax.tree.leaves(updates))
    for name in params:
        places = curvax.state_of(optimizer, params, states[0], f"{name}/kernel")
        fields = {part for place in places for part in place.split("/")}
        assert ("rows" in fields, "nu" in fields) == (name == "a", name != "a")


GUESSES: dict[str, Shapes] = {
    "two axes": {"mixing": (4, 8)},
    "a depthwise convolution has the same shape": {"conv1d/kernel": (4, 1, 64)},
    "a guess: a depthwise convolution": {"conv_1d/w": (4, 64)},
    "the same shape": {"layers/0/kernel": (3, 3, 1, 64), "layers/0/bias": (64,)},
    "a shared table has the same name": {"shared/pytree/0/weight": (100, 8)},
}


@pytest.mark.parametrize("why", GUESSES)
@pytest.mark.parametrize("rule", [MatrixRule(), curvax.rules.nnx], ids=["default", "nnx"])
def test_guesses_say_so_and_are_errors_on_demand(why: str, rule: MatrixRule) -> None:
    shapes = GUESSES[why]
    text = curvax.summarize(curvax.muon(0.1, matrices=rule), abstract(shapes))
    assert "a guess" in text and why in text
    strict = MatrixRule(family=rule.family, guess=False)
    name = next(iter(shapes))
    (readings,) = offered(shapes, strict).values()
    assert readings[0] == treated(shapes)[name]
    said = MatrixRule(guess=False, weight_dimension_numbers={name: readings[0]})
    assert treated(shapes, said)[name] == readings[0]
    assert treated({"up/kernel": (4, 8)}, strict) == {"up/kernel": MatrixAxes(0, 1)}


UP, SGD = {"up": {"kernel": jnp.ones((4, 8))}}, optax.sgd(1.0)
ACTS = ("relu", jnp.tanh, "float32")
WORD, FUNCTION, DTYPE = ({"up/kernel": jnp.ones((2, 3)), "act": x} for x in ACTS)


def step_of_shape(*shape: int) -> None:
    """By a direction of another shape than `UP`'s."""
    wrong = optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.ones(shape), u))
    view = curvax.on_matrices(wrong, guard=False)
    view.update(UP, view.init(UP), UP)


@wrong_calls("""
MatrixRule(rules) -> curvax.rules; give a rule of it
MatrixRule(rules.linen.family) -> matrices is a rule or its family
MatrixRule("linen") -> 'linen'; give the rule, matrices=curvax.rules.linen
MatrixRule(output_layer=rules.linen) -> output_layer is a rule or its f
MatrixRule(weight_dimension_numbers=rules) -> numbers is the module curvax
MatrixRule(family="maxtext") -> None or that of a rule in curvax.rules
muon(0.1, weight_dimension_numbers=rules.linen) ->
    weight_dimension_numbers is a rule or its family; give a rule as matrices=
MatrixRule()(WORD) -> 'act' is | relu
MatrixRule()(FUNCTION) -> 'act' is | tanh
MatrixRule()(DTYPE) -> 'act' is | must be arrays
find_output_layer(WORD) -> 'act' is | relu
muon(0.1).init(FUNCTION) -> 'act' is | tanh
summarize(muon(0.1), WORD) -> 'act' is | relu
describe_state(soap(0.1), FUNCTION) -> 'act' is | tanh
route(3, SGD, MatrixRule()) -> matrices must be an Optax
route(SGD, 3, MatrixRule()) -> others must be an Optax
route(SGD, SGD, "all") -> rule must be a curvax.M
on_matrices(momentum) -> the function momentum; call it
summarize(muon(0.1), {}) -> params must have arrays
summarize(muon(0.1), {"a": None}) -> params must have arrays
step_of_shape(1, 8, 4) -> 'up/kernel' | (1, 4, 8); got | (1, 8, 4)
step_of_shape(1, 4, 1) -> 'up/kernel' | (1, 4, 8); got | (1, 4, 1)
step_of_shape(1, 1, 8) -> 'up/kernel' | (1, 4, 8); got | (1, 1, 8)
step_of_shape(4, 8) -> 'up/kernel' | (1, 4, 8); got | (4, 8)
""")
def test_arguments_of_another_kind_are_named(call: str, fragments: str) -> None:
    assert_refused(call, fragments, {**vars(curvax), **globals()})
