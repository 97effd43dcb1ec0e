"""What decides without a question: siblings, factors of LoRA, biases, routers, state spaces."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from tests.shared.rules import Shapes, abstract, offered, treated

D, H, K, R, E, L, F, C = 32, 4, 8, 2, 5, 3, 16, 64
IN_OUT = MatrixAxes(0, 1)
HWIO = MatrixAxes((0, 1, 2), 3)
HEADS, OUT, STACK = MatrixAxes(0, (1, 2)), MatrixAxes((0, 1), 2), MatrixAxes(1, 2)
QUERIES = {f"{name}/kernel": (D, H, K) for name in ("query", "key", "value")}


def test_a_pattern_covers_kernels_of_one_shape() -> None:
    """Else the reading of a 1×1 kernel makes nine matrices of each 3×3 one."""
    shapes = {f"blocks/{i}/layers/2/kernel": (1, 1, 64, 128) for i in range(2)}
    shapes |= {f"blocks/{i}/layers/5/kernel": (3, 3, 128, 32) for i in range(2)}
    found = offered(shapes)
    assert set(found) == set(shapes)
    assert all(readings[0] == HWIO for readings in found.values())
    assert set(offered({"a_0/kernel": (1, 1, 4, 8), "a_1/kernel": (1, 1, 4, 8)})) == {"a_*/kernel"}


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        ({"mamba/conv1d/kernel": (4, 1, C), "mamba/A_log": (H,)}, "mamba/conv1d/kernel"),
        ({"delta/conv1d/weight": (C, 1, 4), "delta/dt_bias": (H,)}, "delta/conv1d/weight"),
        ({"stack/conv1d/kernel": (L, 4, 1, C), "stack/A_log": (L, H)}, "stack/conv1d/kernel"),
        ({"block1a_dwconv/kernel": (3, 3, C, 1)}, "block1a_dwconv/kernel"),
    ],
)
@pytest.mark.parametrize("rule", ["nnx", "linen", "keras", "equinox"])
def test_depthwise_convolutions_are_known_by_what_is_beside_them(
    shapes: Shapes, name: str, rule: str
) -> None:
    assert treated(shapes)[name] == "depthwise convolution"
    if rule != "keras":
        assert treated(shapes, getattr(curvax.rules, rule))[name] == "depthwise convolution"


def test_depthwise_layers_of_keras_applications() -> None:
    names = "block1a_dwconv block2b_dwconv2 conv_dw_1 expanded_conv_depthwise block_1_depthwise"
    shapes: Shapes = {f"{name}/kernel": (3, 3, C, 1) for name in names.split()}
    shapes["stage_0_block_0_depthwise_conv/kernel"] = (7, 7, 1, C)
    shapes["block2_sepconv1/depthwise_kernel"] = (3, 3, C, 1)
    assert set(treated(shapes, curvax.rules.keras).values()) == {"depthwise convolution (keras)"}
    others: Shapes = {"conv_pw_1/kernel": (1, 1, C, 8), "block1a_project_conv/kernel": (1, 1, C, 8)}
    assert all(isinstance(x, MatrixAxes) for x in treated(others, curvax.rules.keras).values())


GUESSES: dict[str, Shapes] = {
    "two axes": {"mixing": (H, K)},
    "a depthwise convolution has the same shape": {"conv1d/kernel": (4, 1, C)},
    "a guess: a depthwise convolution": {"conv_1d/w": (4, C)},
    "the same shape": {"layers/0/kernel": (3, 3, 1, C), "layers/0/bias": (C,)},
    "a shared table has the same name": {"shared/pytree/0/weight": (100, K)},
}


@pytest.mark.parametrize("why", GUESSES)
@pytest.mark.parametrize("family", [None, "nnx"])
def test_guesses_say_so_and_are_errors_on_demand(why: str, family: str | None) -> None:
    shapes = GUESSES[why]
    rule = curvax.rules.nnx if family else MatrixRule()
    text = curvax.summarize(curvax.muon(0.1, matrices=rule), abstract(shapes))
    assert "a guess" in text and why in text
    strict = MatrixRule(family=rule.family, guess=False)
    name = next(iter(shapes))
    (readings,) = offered(shapes, strict).values()
    assert readings[0] == treated(shapes)[name]
    said = MatrixRule(guess=False, weight_dimension_numbers={name: readings[0]})
    assert treated(shapes, said)[name] == readings[0]
    assert treated({"up/kernel": (H, K)}, strict) == {"up/kernel": IN_OUT}


@pytest.mark.parametrize("rule", ["maxtext", "equinox"])
def test_a_catch_all_asks_for_three_axes_without_evidence(rule: str) -> None:
    name = "block/up/weight" if rule == "equinox" else "block/up/kernel"
    offered({name: (F, K, 3)}, getattr(curvax.rules, rule))
    evidence = {"block/norm/scale": (F, K)} if rule == "maxtext" else {"block/up/bias": (F, 1)}
    found = treated({name: (F, K, 3), **evidence}, getattr(curvax.rules, rule))
    assert isinstance(found[name], MatrixAxes)


def test_vectors_of_stacked_layers_are_not_matrices() -> None:
    """A norm beside them says that one of their axes is of layers."""
    own: Shapes = {"block/D": (L, H), "block/skip": (L, 7)}
    for shapes in (own, {name: x[::-1] for name, x in own.items()}):
        norm = (L, D) if shapes is own else (D, L)
        found = treated({**shapes, "block/norm/scale": norm}, curvax.rules.linen)
        assert {found[name] for name in own} == {"a vector per layer"}
    for scanned in ((L, H), (H, L)):  # Mamba 2 and 1, of which A_log has a state per channel
        for a_log in (scanned, (*scanned, K)):
            mixer: Shapes = {"mixer/D": scanned, "mixer/A_log": a_log}
            for rule in (MatrixRule(), curvax.rules.linen, curvax.rules.maxtext):
                assert treated(mixer, rule)["mixer/D"] == "a vector per layer"
    found = treated({**own, "block/norm/scale": (D,)})
    assert all(found[name].is_guess for name in own)
    named = treated({"sinks": (L, H), "layer_scalar": (L, 2), "resid_lambdas": (L, 2)})
    assert all(isinstance(x, str) for x in named.values())


@pytest.mark.parametrize("shape", [(1, 8, 4), (1, 4, 1), (1, 1, 8), (4, 8)])
def test_a_direction_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    wrong = optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.ones(shape), u))
    params = {"up": {"kernel": jnp.ones((4, 8))}}
    view = curvax.on_matrices(wrong, guard=False)
    with pytest.raises(ValueError, match=r"'up/kernel'.*\(1, 4, 8\); got") as error:
        view.update(params, view.init(params), params)
    assert str(shape) in str(error.value)


def test_a_path_with_brackets_matches_itself() -> None:
    shapes: Shapes = {"layers[0].w": (4, 8), "layers[1].w": (4, 8)}
    said = MatrixRule(weight_dimension_numbers={"layers[0].w": None})
    assert treated(shapes, said)["layers[0].w"] == "weight_dimension_numbers is None"
    with pytest.raises(
        ValueError, match=r"matches no parameter.*\[\.\.\.\] is a set of characters"
    ):
        treated({"layers/0/w": (4, 8)}, said)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MatrixRule(curvax.rules), "curvax.rules; give a rule of it"),  # pyright: ignore
        (lambda: MatrixRule(curvax.rules.linen.family), "matrices is a rule or its family"),
        (lambda: MatrixRule("linen"), "'linen'; give the rule, matrices=curvax.rules.linen"),
        (lambda: MatrixRule(output_layer=curvax.rules.linen), "output_layer is a rule or its f"),  # pyright: ignore
        (
            lambda: curvax.muon(0.1, weight_dimension_numbers=curvax.rules.linen),
            "weight_dimension_numbers is a rule or its family; give a rule as matrices=",
        ),
        (lambda: MatrixRule(weight_dimension_numbers=curvax.rules), "numbers is the module curvax"),
        *(
            (functools.partial(f, {"up/kernel": jnp.ones((2, 3)), "act": leaf}), f"'act' is .*{x}")
            for f in (
                MatrixRule(),
                curvax.find_output_layer,
                curvax.muon(0.1).init,
                functools.partial(curvax.summarize, curvax.muon(0.1)),
                functools.partial(curvax.describe_state, curvax.soap(0.1)),
            )
            for leaf, x in (("relu", "relu"), (jnp.tanh, "tanh"), ("float32", "must be arrays"))
        ),
        (lambda: MatrixRule(family="maxtext"), "None or that of a rule in curvax.rules"),  # pyright: ignore
        (lambda: curvax.route(3, optax.sgd(1.0), MatrixRule()), "matrices must be an Optax"),
        (lambda: curvax.route(optax.sgd(1.0), 3, MatrixRule()), "others must be an Optax"),
        (lambda: curvax.route(optax.sgd(1.0), optax.sgd(1.0), "all"), "rule must be a curvax.M"),
        (lambda: curvax.on_matrices(curvax.momentum), "the function momentum; call it"),
    ],
)
def test_arguments_of_another_kind_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
