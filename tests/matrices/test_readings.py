"""Along which axes a parameter is a matrix: layouts, attention, convolutions, stacks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms.matrices._form import matrix_forms
from tests.helpers import assert_close
from tests.shared.rules import Shapes, offered, treated

IN_OUT, OUT_IN = MatrixAxes(rows=0, columns=1), MatrixAxes(rows=1, columns=0)
HEADS, OUT = MatrixAxes(rows=0, columns=(1, 2)), MatrixAxes(rows=(0, 1), columns=2)
LAYERS, HEADS_FIRST = MatrixAxes(rows=1, columns=2), MatrixAxes(rows=1, columns=(0, 2))
MERGED = [OUT, HEADS, MatrixAxes(2, (0, 1)), MatrixAxes((1, 2), 0)]
BEHIND_LAYERS = [MatrixAxes((1, 2, 3), 4), MatrixAxes((2, 3), 4)]
DHWIO = MatrixAxes((0, 1, 2, 3), 4)
ONE_OF_LAYERS = [MatrixAxes(1, (2, 3)), MatrixAxes((1, 2), 3)]
ONE_OF_LAYERS += [MatrixAxes(0, (2, 3)), MatrixAxes((0, 2), 3)]
HWIO, OIHW = MatrixAxes((0, 1, 2), 3), MatrixAxes((1, 2, 3), 0)


@pytest.mark.parametrize(("inputs", "outputs", "factor"), [(8, 32, 2.0), (32, 8, 1.0)])
def test_muon_scales_by_inputs_and_outputs_in_both_layouts(
    inputs: int, outputs: int, factor: float
) -> None:
    gradient = jax.random.normal(jax.random.key(0), (inputs, outputs))
    optimizer = curvax.muon(1.0, method="svd")
    for name, leaf in (("kernel", gradient), ("weight", gradient.T)):
        tree = {"linear": {name: leaf}}
        updates: Any = optimizer.update(tree, optimizer.init(tree), tree)[0]
        update = np.asarray(updates["linear"][name])
        values = np.linalg.svd(update, compute_uv=False)
        assert_close(values, np.full_like(values, factor), 64)


def test_a_bias_tells_inside_of_the_routing_too() -> None:
    """There it is a hole, for it goes to AdamW; every other method then swaps its sides."""
    tree = {"c_fc": {"weight": jnp.eye(8, 32), "bias": jnp.ones(32)}}
    query = {"query": {"kernel": jnp.ones((12, 4, 4)), "bias": jnp.ones((4, 4))}}
    for params, matrix in ((tree, "8×32"), (query, "12×16")):
        optimizer = curvax.muon(0.1)
        assert f"1 matrix {matrix} in" in curvax.summarize(optimizer, params)
        updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def attention(query: Any, out: Any, key: Any = None) -> Shapes:
    shapes = {"query/kernel": query, "key/kernel": key or query, "value/kernel": key or query}
    return shapes | {"out/kernel": out}


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        # By the siblings, without a bias.
        (attention((12, 4, 8), (4, 8, 12)), [HEADS, HEADS, HEADS, OUT]),
        (attention((12, 4, 8), (4, 8, 12), key=(12, 2, 8)), [HEADS, HEADS, HEADS, OUT]),
        (attention((12, 4, 8), (4, 8, 20), key=(7, 4, 8)), [HEADS, HEADS, HEADS, OUT]),
        (attention((12, 4, 8), (32, 12)), [HEADS, HEADS, HEADS, IN_OUT]),
        ({"wq": (12, 4, 8), "wk": (12, 1, 8), "wo": (4, 8, 12)}, [HEADS, HEADS, OUT]),
        ({"b/q_proj/kernel": (12, 4, 8), "b/o_proj/kernel": (4, 8, 12)}, [HEADS, OUT]),
        # By the bias.
        ({"query/kernel": (12, 4, 8), "query/bias": (4, 8)}, [HEADS, "bias of query"]),
        ({"out/kernel": (4, 8, 12), "out/bias": (12,)}, [OUT, "vector"]),
        # By the size: features are heads × head dimension.
        ({"query/kernel": (32, 4, 8)}, [HEADS]),
        ({"query/kernel": (32, 4, 8), "key/kernel": (32, 2, 8)}, [HEADS, HEADS]),
        ({"out/kernel": (4, 8, 32)}, [OUT]),
    ],
)
def test_attention_is_recognized(shapes: Shapes, axes: list[Any]) -> None:
    assert treated(shapes) == dict(zip(shapes, axes, strict=True))


@pytest.mark.parametrize(
    ("shapes", "readings"),
    [
        (
            {"query/kernel": (12, 64, 64)},
            {"query/kernel": [HEADS, LAYERS, MatrixAxes(0, 2), OUT, *MERGED[2:]]},
        ),
        (
            {"out/kernel": (12, 64, 64)},
            {"out/kernel": [OUT, LAYERS, MatrixAxes(0, 2), *MERGED[1:]]},
        ),
        # Siblings say that these are layers, or that heads come first.
        (
            attention((12, 64, 64), (12, 64, 64)),
            {f"{name}/kernel": [LAYERS, HEADS_FIRST] for name in ("query", "key", "value")}
            | {"out/kernel": [OUT, LAYERS]},
        ),
        *(
            ({f"{name}/kernel": (3, 8, 8), f"{name}/bias": (3, 8)}, {f"{name}/kernel": [LAYERS]})
            for name in ("query", "key", "value", "out")
        ),
        # They fit both.
        (
            {"query/kernel": (8, 8, 2), "out/kernel": (8, 2, 8)},
            {"query/kernel": [HEADS, LAYERS, HEADS_FIRST], "out/kernel": [OUT, LAYERS]},
        ),
        ({"query/kernel": (8, 8, 4), "query/bias": (8, 4)}, {"query/kernel": [HEADS, LAYERS]}),
        (
            {"query/kernel": (3, 12, 4, 8)},
            {"query/kernel": [MatrixAxes(1, (2, 3)), MatrixAxes(0, (2, 3))]},
        ),
    ],
)
def test_what_may_be_a_stack_is_refused_with_all_readings(
    shapes: Shapes, readings: dict[str, list[MatrixAxes]]
) -> None:
    assert offered(shapes) == readings


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        # A bias fits one end.
        ({"linear/weight": (32, 8), "linear/bias": (32,)}, OUT_IN),
        ({"c_fc/weight": (8, 32), "c_fc/bias": (32,)}, IN_OUT),
        ({"c_fc/kernel": (32, 8), "c_fc/bias": (32,)}, OUT_IN),
        ({"linear/w": (32, 8), "linear/b": (32,)}, OUT_IN),
        ({"w1": (32, 8), "b1": (32,)}, OUT_IN),
        ({"in_proj_weight": (8, 24), "in_proj_bias": (24,)}, IN_OUT),
        # It fits both or none: the name decides.
        ({"linear/weight": (8, 8), "linear/bias": (8,)}, OUT_IN),
        ({"linear/kernel": (8, 8), "linear/bias": (8,)}, IN_OUT),
        ({"linear/weight": (32, 8), "linear/bias": (5,)}, OUT_IN),
        ({"linear/weight": (32, 8), "linear/bias": (3, 32)}, OUT_IN),
        # Convolutions
        ({"conv1/weight": (64, 3, 7, 7)}, OIHW),
        ({"conv1/weight": (64, 3, 1, 7), "conv1/bias": (64, 1, 1)}, OIHW),
        ({"conv1/weight": (3, 3, 4, 8), "conv1/bias": (8,)}, HWIO),
        ({"conv1/weight": (8, 8, 3, 3), "conv1/bias": (8,)}, OIHW),
        ({"layers/0/weight": (8, 3, 7, 7), "layers/0/bias": (8, 1, 1)}, OIHW),
        ({"conv1/weight": (8, 4, 3)}, MatrixAxes((1, 2), 0)),
        ({"conv1/weight": (8, 4, 3, 3, 3), "conv1/bias": (8,)}, MatrixAxes((1, 2, 3, 4), 0)),
        ({"Conv_0/kernel": (3, 3, 4, 8)}, HWIO),
        ({"conv2_d/w": (3, 3, 4, 8)}, HWIO),
        ({"conv/kernel": (1, 7, 4, 8), "conv/bias": (8,)}, HWIO),
        ({"conv/kernel": (8, 4, 3, 3), "conv/bias": (8,)}, OIHW),
        ({"conv/kernel": (3, 3, 3, 4, 8), "conv/bias": (8,)}, DHWIO),
        ({"embedding/kernel": (16, 16, 3, 8), "embedding/bias": (8,)}, HWIO),
        ({"patch_embed/kernel": (16, 16, 3, 8)}, HWIO),
        ({"gray/Conv_0/kernel": (3, 3, 1, 8)}, HWIO),  # of images with one channel
        ({"dw/pointwise_conv/kernel": (1, 1, 8, 8)}, HWIO),
        ({"depthwise/kernel": (3, 3, 1, 8)}, "depthwise convolution"),
        ({"patch_embed/proj/kernel": (16, 16, 3, 8)}, HWIO),
        ({"embeddings/patch_embeddings/projection/kernel": (16, 16, 3, 8)}, HWIO),
    ],
)
def test_two_axes_and_convolutions(shapes: Shapes, axes: Any) -> None:
    assert treated(shapes)[next(iter(shapes))] == axes


@pytest.mark.parametrize(
    ("shapes", "readings"),
    [
        ({"conv/kernel": (12, 3, 3, 8, 8)}, [DHWIO, *BEHIND_LAYERS]),
        ({"conv/kernel": (3, 3, 3, 4, 8)}, [DHWIO, *BEHIND_LAYERS]),
        (
            {"conv/weight": (8, 4, 3, 3, 3)},
            [MatrixAxes((1, 2, 3, 4), 0), MatrixAxes((2, 3, 4), 1), MatrixAxes((3, 4), 2)],
        ),
        ({"conv/kernel": (12, 3, 4, 8)}, [HWIO, MatrixAxes((1, 2), 3)]),
        ({"conv/kernel": (64, 3, 7, 7)}, [HWIO, OIHW, MatrixAxes((1, 2), 3)]),
        ({"conv/weight": (3, 3, 4, 8)}, [OIHW, HWIO, MatrixAxes((2, 3), 1)]),
        ({"conv/kernel": (12, 3, 3, 4, 8), "conv/bias": (12, 8)}, [MatrixAxes((1, 2, 3), 4)]),
        # Stacks of layers
        ({"mlp/kernel": (12, 4, 8)}, [LAYERS, MatrixAxes(0, 2), *MERGED]),
        ({"mlp/kernel": (12, 4, 8), "mlp/bias": (12, 8)}, [LAYERS]),
        ({"mlp/kernel": (12, 4, 8), "mlp/bias": (4, 8)}, [HEADS, MatrixAxes(0, 2)]),
        ({"mlp/kernel": (8, 8, 4), "mlp/bias": (8, 4)}, [LAYERS, HEADS]),
        ({"mlp/kernel": (12, 4, 8), "mlp/bias": (8,)}, [OUT]),
        (
            {"mlp/weight": (12, 4, 8)},
            [MatrixAxes(2, 1), MatrixAxes(2, 0), *(MatrixAxes(x.columns, x.rows) for x in MERGED)],
        ),
        ({"mlp/kernel": (2, 12, 4, 8)}, [MatrixAxes(2, 3), HWIO, *ONE_OF_LAYERS]),
        ({"layers/0/weight": (8, 3, 7, 7)}, [OIHW, MatrixAxes(3, 2)]),  # as high as wide
        ({"mlp/kernel": (2, 2, 12, 4, 8)}, [MatrixAxes(3, 4)]),
        ({"mlp/kernel": (3, 8, 1), "mlp/bias": (3, 1)}, [LAYERS]),
        (
            {"mlp/weight": (3, 1, 8), "mlp/bias": (3, 1)},
            [MatrixAxes(2, 1), MatrixAxes(2, 0), MatrixAxes(2, (0, 1))],
        ),
        ({"conv/kernel": (3, 5, 4, 1), "conv/bias": (3, 1)}, [MatrixAxes((1, 2), 3)]),
        ({"foo": (12, 4, 8)}, [LAYERS, MatrixAxes(0, 2), *MERGED]),
    ],
)
def test_convolutions_and_stacks_of_two_readings_are_refused(
    shapes: Shapes, readings: list[MatrixAxes]
) -> None:
    assert offered(shapes) == {next(iter(shapes)): readings}


def test_one_error_lists_all_parameters_and_can_be_pasted() -> None:
    layers = {f"block_{i}/{name}": (12, 64, 64) for i in range(11) for name in ("wq", "mlp/kernel")}
    shapes = {**layers, "head_0/kernel": (2, 4, 8), "head_1/kernel": (2, 4, 8), "x/w": (3, 5, 7)}
    del shapes["block_7/mlp/kernel"]
    shapes["block_7/mlp/kernel"] = (64, 64)  # so that a pattern would match too much
    found = offered(shapes)
    expected = {f"block_{i}/mlp/kernel" for i in range(11) if i != 7}
    assert set(found) == {"block_*/wq", "head_*/kernel", "x/w"} | expected
    spec = {name: readings[0] for name, readings in found.items()}
    pasted = treated(shapes, weight_dimension_numbers=spec)
    assert pasted["block_10/wq"] == HEADS and pasted["block_7/mlp/kernel"] == IN_OUT


SHAPES_OF_ALL_RANKS = [(), (3,), (3, 4), (4, 4), (2, 3, 4), (3, 3, 3), (1, 1, 5), (2, 3, 1, 4)]
SHAPES_OF_ALL_RANKS += [(2, 2, 2, 2), (2, 3, 4, 5, 6), (2, 2, 2, 2, 2, 2)]
LAYER_NAMES = ("mlp", "conv", "query", "key", "out", "embed", "norm", "lm_head")


@pytest.mark.parametrize("kernel", ["kernel", "weight", "w", "foo"])
@pytest.mark.parametrize("matrices", [None, "all"])
def test_every_shape_is_treated_or_refused(kernel: str, matrices: str | None) -> None:
    """All axes that the rule takes or offers exist, and what it offers can be taken."""
    for layer, shape in itertools.product(LAYER_NAMES, SHAPES_OF_ALL_RANKS):
        name = f"{layer}/{kernel}"
        ends = {shape[i:] for i in range(len(shape))} | {(*shape[:1], 1, 1), shape[:1], (7,)}
        for bias in (None, *ends):
            shapes = {name: shape} | ({} if bias is None else {f"{layer}/bias": bias})
            try:
                taken = [treated(shapes, matrices=matrices)[name]]
            except ValueError:
                taken = offered(shapes, MatrixRule(matrices))[name]
                for axes in taken:
                    said = {"matrices": matrices, "weight_dimension_numbers": {name: axes}}
                    assert treated(shapes, **said)[name] == axes
            for axes in taken:
                if isinstance(axes, MatrixAxes):
                    assert matrix_forms(name, shape, axes)[0].shape == shape


# Specifications


def test_a_pattern_leaves_alone_what_lacks_its_axes() -> None:
    shapes = {"linear/weight": (4, 8), "norm/weight": (8,), "blocks/norm/weight": (3, 8)}
    shapes |= {"blocks/linear/weight": (3, 4, 8), "blocks/linear/bias": (3, 4)}
    spec = {"blocks/*": MatrixAxes(2, 1), "*/weight": MatrixAxes(0, 1)}
    assert treated(shapes, weight_dimension_numbers=spec) == {
        "linear/weight": IN_OUT,
        "norm/weight": "vector",
        "blocks/norm/weight": "weight of norm",
        "blocks/linear/weight": MatrixAxes(2, 1),
        "blocks/linear/bias": "bias of linear",
    }


def test_dimension_numbers_of_galore_name_the_same_axes() -> None:
    spec = {"layers": optax.contrib.GaLoreDimensionNumbers(reduction_axis=1, output_axis=(2, 3))}
    shapes = {"layers/query/kernel": (3, 12, 4, 8)}
    expected = {"layers/query/kernel": MatrixAxes(rows=1, columns=(2, 3))}
    assert treated(shapes, weight_dimension_numbers=spec) == expected
