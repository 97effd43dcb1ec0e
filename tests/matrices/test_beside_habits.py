"""What lies beside a parameter goes before the habits of its family and of its name."""

from typing import Any

import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from tests.shared.rules import Shapes, offered, treated

IN_OUT, OUT_IN = MatrixAxes(0, 1), MatrixAxes(1, 0)
HWIO, HWOI, IOHW = MatrixAxes((0, 1, 2), 3), MatrixAxes((0, 1, 3), 2), MatrixAxes((0, 2, 3), 1)
OIHW, FIRST = MatrixAxes((1, 2, 3), 0), MatrixAxes(1, (0, 2))
LAYERS_2 = MatrixAxes((2, 3), 4)
AXIS_0, AXIS_1 = MatrixAxes(1, 2), MatrixAxes(0, 2)
ALL = "MatrixRule linen nnx haiku keras hf_flax equinox torch_layout maxtext"
FLAX = "linen nnx hf_flax"


def rule(name: str) -> MatrixRule:
    return MatrixRule() if name == "MatrixRule" else getattr(curvax.rules, name)


def with_bias(name: str, shape: tuple[int, ...], bias: tuple[int, ...]) -> Shapes:
    return {name: shape, f"{name.rpartition('/')[0]}/bias": bias}


MLP_1: Shapes = {"l/up/kernel": (8, 3, 16), "l/down/kernel": (16, 3, 8), "l/norm/scale": (8, 3)}
MLP_0: Shapes = {"l/up/kernel": (3, 8, 16), "l/down/kernel": (3, 16, 8), "l/norm/scale": (3, 8)}
MLP_LAST: Shapes = {"l/up/kernel": (8, 16, 3), "l/down/kernel": (16, 8, 3), "l/norm/scale": (8, 3)}
ATTENTION_1: Shapes = {
    "l/self_attention/query/kernel": (8, 3, 2, 4),
    "l/self_attention/out/kernel": (2, 3, 4, 8),
    "l/norm/scale": (8, 3),
}
GEMMA: Shapes = {
    "attention/query/kernel": (8, 20, 4),
    "attention/key/kernel": (2, 20, 4),
    "attention/value/kernel": (2, 20, 4),
    "attention/attention_output/kernel": (8, 4, 20),
}
ALL_HEADS: Shapes = {name: (8, *x[1:]) for name, x in GEMMA.items()}
# As many features as heads
SQUARE: Shapes = {name: (8, 4, 8) if "out" in name else (8, 8, 4) for name in GEMMA}
GROUPED: Shapes = {
    name: (2, *x[1:]) if "key" in name or "value" in name else x for name, x in SQUARE.items()
}
HAIKU_T: Shapes = {"conv2_d_transpose/w": (3, 3, 64, 128), "conv2_d_transpose/b": (64,)}
W_Q: Shapes = {"attn/W_Q": (4, 20, 8), "attn/W_K": (2, 20, 8), "attn/W_O": (4, 8, 20)}
EXPERTS: Shapes = {"mlp/experts/gate_up_proj": (4, 8, 32), "mlp/experts/down_proj": (4, 16, 8)}
TURNED: Shapes = {name: (x[0], x[2], x[1]) for name, x in EXPERTS.items()}
OF_EXPERTS: Shapes = {
    "mlp/experts/gate_up_proj_bias": (4, 32),
    "mlp/experts/down_proj_bias": (4, 8),
}
QUERIES_3, QUERIES_3_T = (MatrixAxes(*ends, column_heads=3) for ends in ((0, 1), (1, 0)))
SCANNED_CONV: Shapes = {"l/Conv_0/kernel": (2, 5, 6, 7), "l/norm/scale": (2, 6)}
STACKED_HAIKU: Shapes = {"layer_stack/conv1_d/w": (2, 5, 6, 7)}

DECIDED: list[tuple[str, Shapes, dict[str, MatrixAxes]]] = [
    # Transposed convolutions: an axis that alone fits the bias has the outputs.
    ("MatrixRule haiku", HAIKU_T, {"conv2_d_transpose/w": HWOI}),
    ("haiku", {"conv2_d_transpose/w": (3, 3, 64, 128)}, {"conv2_d_transpose/w": HWOI}),
    (
        ALL,
        with_bias("ConvTranspose_0/kernel", (3, 3, 12, 36), (12,)),
        {"ConvTranspose_0/kernel": HWOI},
    ),
    (
        ALL,
        with_bias("ConvTranspose_0/kernel", (3, 3, 36, 12), (12,)),
        {"ConvTranspose_0/kernel": HWIO},
    ),
    (ALL, with_bias("up/kernel", (3, 3, 12, 36), (12,)), {"up/kernel": HWOI}),
    (ALL, with_bias("Conv_0/kernel", (12, 36, 5, 5), (12,)), {"Conv_0/kernel": OIHW}),
    (
        "MatrixRule torch_layout equinox",
        with_bias("up/weight", (64, 32, 2, 2), (32,)),
        {"up/weight": IOHW},
    ),
    ("torch_layout", {"conv_transpose/weight": (64, 32, 2, 2)}, {"conv_transpose/weight": IOHW}),
    ("equinox", with_bias("up/weight", (32, 64, 2, 2), (32, 1, 1)), {"up/weight": OIHW}),
    (
        "MatrixRule linen",
        with_bias("up_conv/kernel", (3, 12, 36), (12,)),
        {"up_conv/kernel": MatrixAxes((0, 2), 1)},
    ),
    # GPT-Neo has the names of GPT-2, but not its layout.
    (
        "hf_flax",
        with_bias("h/0/mlp/c_fc/kernel", (32, 128), (128,)),
        {"h/0/mlp/c_fc/kernel": IN_OUT},
    ),
    ("torch_layout", with_bias("up/weight", (32, 128), (128,)), {"up/weight": IN_OUT}),
    *(
        ("hf_flax", with_bias("h/0/attn/c_attn/kernel", x, (96,)), {"h/0/attn/c_attn/kernel": axes})
        for x, axes in (((32, 96), QUERIES_3), ((96, 32), QUERIES_3_T))
    ),
    (
        "hf_flax",
        with_bias("h/0/crossattention/c_attn/kernel", (32, 64), (64,)),
        {"h/0/crossattention/c_attn/kernel": MatrixAxes(0, 1, column_heads=2)},
    ),
    (
        "hf_flax",
        with_bias("h/attn/c_attn/kernel", (3, 32, 96), (3, 96)),
        {"h/attn/c_attn/kernel": MatrixAxes(1, 2, column_heads=3)},
    ),
    # Experts of torch are stored either way round; a bias tells, or the features of a router.
    *(
        ("torch_layout", tree | beside, dict.fromkeys(EXPERTS, axes))
        for tree, axes in ((EXPERTS, AXIS_0), (TURNED, MatrixAxes(2, 1)))
        for beside in (OF_EXPERTS, {"mlp/router/weight": (4, 8)}, {"mlp/gate/kernel": (8, 4)})
    ),
    (
        "torch_layout",
        {"experts/w2": (3, 4, 16, 8), "experts/b2": (3, 4, 8)},
        {"experts/w2": MatrixAxes(2, 3)},
    ),
    ("torch_layout", with_bias("up/weight", (3, 8, 16), (3, 16)), {"up/weight": AXIS_0}),
    # Layers on axis 1, or on axis 0
    (f"{FLAX} maxtext", MLP_1, {"l/up/kernel": AXIS_1, "l/down/kernel": AXIS_1}),
    (f"{FLAX} maxtext", MLP_0, {"l/up/kernel": AXIS_0, "l/down/kernel": AXIS_0}),
    (
        "equinox",
        {name.replace("kernel", "weight"): x for name, x in MLP_1.items()},
        {"l/up/weight": MatrixAxes(2, 0)},
    ),
    (
        f"{FLAX} maxtext",
        ATTENTION_1,
        {
            "l/self_attention/query/kernel": MatrixAxes(0, (2, 3)),
            "l/self_attention/out/kernel": MatrixAxes((0, 2), 3),
        },
    ),
    (FLAX, with_bias("l/up/kernel", (8, 3, 16), (16, 3)), {"l/up/kernel": AXIS_1}),
    # Layers on the last axis
    (FLAX, MLP_LAST, {"l/up/kernel": IN_OUT, "l/down/kernel": IN_OUT}),
    (
        "equinox",
        {name.replace("kernel", "weight"): x for name, x in MLP_LAST.items()},
        {"l/up/weight": OUT_IN, "l/down/weight": OUT_IN},
    ),
    (FLAX, SCANNED_CONV, {"l/Conv_0/kernel": MatrixAxes((1, 2), 3)}),
    ("haiku", STACKED_HAIKU, {"layer_stack/conv1_d/w": MatrixAxes((1, 2), 3)}),
    (
        "haiku",
        {"layer_stack/conv1_d_transpose/w": (6, 3, 12, 36)},
        {"layer_stack/conv1_d_transpose/w": MatrixAxes((1, 3), 2)},
    ),
    # A norm of each head
    (
        FLAX,
        {"attn/query/kernel": (32, 4, 8), "attn/q_norm/scale": (4, 8)},
        {"attn/query/kernel": MatrixAxes(0, (1, 2))},
    ),
    # KerasHub's Gemma has heads first; grouped keys tell, also with as many features as heads.
    *(
        (
            rules,
            shapes,
            dict.fromkeys(list(GEMMA)[:3], FIRST) | {list(GEMMA)[3]: MatrixAxes((0, 1), 2)},
        )
        for rules, shapes in (
            ("MatrixRule keras", GEMMA),
            ("MatrixRule keras", GROUPED),
            ("keras", ALL_HEADS),
        )
    ),
    ("linen", GEMMA, dict.fromkeys(list(GEMMA)[:3], FIRST)),
    # TransformerLens has heads first, as a bias of one layer or `D = H·K` tells.
    (f"MatrixRule {FLAX}", W_Q | {"attn/b_Q": (4, 8), "attn/b_O": (20,)}, {"attn/W_Q": FIRST}),
    (
        "MatrixRule",
        {"attn/W_Q": (4, 32, 8), "attn/W_O": (4, 8, 32)},
        {"attn/W_Q": FIRST, "attn/W_O": MatrixAxes((0, 1), 2)},
    ),
    # A bias is that of Keras' own attention.
    (
        "keras",
        SQUARE | {name.replace("kernel", "bias"): (8, 4) for name in list(GEMMA)[:3]},
        dict.fromkeys(list(GEMMA)[:3], MatrixAxes(0, (1, 2))),
    ),
    # No table has a bias.
    (ALL, with_bias("embedding/weight", (64, 9), (64,)), {"embedding/weight": OUT_IN}),
    (
        "MatrixRule haiku",
        {"time_embed/w": (9, 64), "time_embed/b": (64,)},
        {"time_embed/w": IN_OUT},
    ),
    (
        "MatrixRule",
        with_bias("position_activations/weights", (9, 64), (64,)),
        {"position_activations/weights": IN_OUT},
    ),
    # A kernel for each place
    (
        FLAX,
        with_bias("ConvLocal_0/kernel", (8, 8, 36, 12), (8, 8, 12)),
        {"ConvLocal_0/kernel": MatrixAxes(2, 3)},
    ),
    (
        FLAX,
        with_bias("patches/kernel", (8, 8, 36, 12), (8, 8, 12)),
        {"patches/kernel": MatrixAxes(2, 3)},
    ),
    (FLAX, {"ConvLocal_0/kernel": (8, 8, 36, 12)}, {"ConvLocal_0/kernel": MatrixAxes(2, 3)}),
    (
        FLAX,
        with_bias("ConvLocal_0/kernel", (8, 8, 36, 12), (12,)),
        {"ConvLocal_0/kernel": MatrixAxes(2, 3)},
    ),
    (FLAX, with_bias("ConvLocal_0/kernel", (8, 36, 12), (12,)), {"ConvLocal_0/kernel": AXIS_0}),
    # A `b` beside a `w` is a bias, one beside an `a` a factor.
    ("MatrixRule", {"wq_a": (9, 4), "wq_b": (4, 6)}, {"wq_b": IN_OUT}),
    (
        "MatrixRule",
        {"query_w": (9, 4, 8), "output_w": (4, 8, 9)},
        {"query_w": MatrixAxes(0, (1, 2))},
    ),
    (
        "MatrixRule",
        {"time_maa_w1": (9, 4), "time_decay_w2": (4, 6)},
        {"time_maa_w1": IN_OUT, "time_decay_w2": IN_OUT},
    ),
]


@pytest.mark.parametrize(("rules", "shapes", "axes"), DECIDED)
def test_what_lies_beside_decides(rules: str, shapes: Shapes, axes: dict[str, Any]) -> None:
    for name in rules.split():
        found = treated(shapes, rule(name))
        assert {path: found[path] for path in axes} == axes, name
        assert not any(found[path].is_guess for path in axes), name


ASKED: list[tuple[str, Shapes, dict[str, list[MatrixAxes]]]] = [
    # The name of a transposed convolution without a bias, or with one that fits two axes
    (
        f"MatrixRule {FLAX}",
        {"ConvTranspose_0/kernel": (3, 3, 12, 36)},
        {"ConvTranspose_0/kernel": [HWIO, HWOI]},
    ),
    (
        f"MatrixRule {FLAX}",
        with_bias("ConvTranspose_0/kernel", (3, 3, 12, 12), (12,)),
        {"ConvTranspose_0/kernel": [HWIO, HWOI]},
    ),
    (
        "MatrixRule",
        {"conv_transpose/weight": (64, 32, 2, 2)},
        {"conv_transpose/weight": [OIHW, IOHW]},
    ),
    # Norms that fit both axes
    (
        FLAX,
        {f"l/{n}/kernel": (8, 3, 16) for n in ("up", "gate_proj")} | {"l/norm/scale": (8, 3)},
        {f"l/{n}/kernel": [AXIS_0, AXIS_1] for n in ("up", "gate_proj")},
    ),
    (
        "equinox",
        with_bias("l/up/weight", (3, 16, 8), (3, 16)),
        {"l/up/weight": [MatrixAxes(2, 1), MatrixAxes(2, 0)]},
    ),
    (
        "equinox",
        {"l/conv/weight": (3, 32, 16, 5), "l/conv/bias": (3, 32, 1)},
        {"l/conv/weight": [MatrixAxes((2, 3), 1), MatrixAxes((2, 3), 0)]},
    ),
    # Heads first
    ("MatrixRule linen", ALL_HEADS, {"attention/query/kernel": [FIRST, AXIS_0]}),
    (
        "MatrixRule keras",
        SQUARE,
        {
            f"attention/{n}/kernel": [FIRST, MatrixAxes(0, (1, 2))]
            for n in ("query", "key", "value")
        },
    ),
    (
        "MatrixRule linen",
        with_bias("a/q/kernel", (4, 20, 8), (4, 8)) | {"a/o/kernel": (4, 8, 20)},
        {"a/q/kernel": [FIRST, AXIS_0]},
    ),
    (
        "MatrixRule",
        {"attn/W_Q": (4, 20, 8), "attn/W_O": (4, 8, 20)},
        {"attn/W_Q": [FIRST, AXIS_0], "attn/W_O": [MatrixAxes((0, 1), 2)]},
    ),
    # Experts either way round
    *(
        ("torch_layout", tree, {name: [AXIS_0, MatrixAxes(2, 1)] for name in tree})
        for tree in (EXPERTS, TURNED)
    ),
    *(
        ("MatrixRule", x | {"mlp/router/weight": (4, 8)}, {name: [axes] for name in x})
        for x, axes in ((EXPERTS, AXIS_0), (TURNED, MatrixAxes(2, 1)))
    ),
    # A bias for each place of the output
    *(
        (rules, with_bias(f"conv/{name}", x, bias), {f"conv/{name}": [axes]})
        for rules, name, x, bias, axes in (
            ("MatrixRule haiku equinox", "kernel", (3, 3, 4, 12), (8, 8, 12), HWIO),
            ("MatrixRule haiku linen", "weight", (12, 4, 3, 3), (12, 8, 8), OIHW),
        )
    ),
    ("MatrixRule", MLP_LAST, {"l/up/kernel": [IN_OUT], "l/down/kernel": [IN_OUT]}),
    ("MatrixRule linen", {"Conv_0/kernel": (2, 4, 5, 6, 7)}, {"Conv_0/kernel": [LAYERS_2]}),
    (
        "MatrixRule",
        {"q_einsum/w": (8, 20, 4), "attn_vec_einsum/w": (8, 4, 20)},
        {"q_einsum/w": [FIRST], "attn_vec_einsum/w": [MatrixAxes((0, 1), 2)]},
    ),
    # The right one is offered.
    *(
        (
            "MatrixRule haiku keras",
            with_bias("ConvLocal_0/kernel", (8, 8, 36, 12), bias),
            {"ConvLocal_0/kernel": [MatrixAxes(2, 3)]},
        )
        for bias in ((8, 8, 12), (12,))
    ),
    (
        f"MatrixRule {FLAX}",
        with_bias("m/up/kernel", (20, 5, 16), (5, 16)) | {"m/router/kernel": (20, 5)},
        {"m/up/kernel": [AXIS_1]},
    ),
    ("MatrixRule", {"B": (12, 20, 2), "C": (20, 12, 2)}, {"B": [OUT_IN], "C": [OUT_IN]}),
    (
        "MatrixRule linen",
        {"mlp/gating_einsum": (2, 16, 8), "mlp/linear": (16, 8)},
        {"mlp/gating_einsum": [MatrixAxes(2, 1)]},
    ),
    (
        "MatrixRule linen",
        {"mlp/gating_einsum": (2, 8, 16), "mlp/linear": (16, 8)},
        {"mlp/gating_einsum": [AXIS_0]},
    ),
    # Gates beside the layer that they open, in one kernel, and experts in the middle
    (
        f"MatrixRule {FLAX}",
        with_bias("mlp/wi/kernel", (32, 2, 64), (2, 64)) | {"mlp/wo/kernel": (64, 32)},
        {"mlp/wi/kernel": [AXIS_1]},
    ),
    (
        f"MatrixRule {FLAX}",
        {"moe/router/kernel": (32, 8), "moe/w2": (64, 8, 32), "moe/b2": (8, 32)},
        {"moe/w2": [AXIS_1]},
    ),
    # A bias that layers on axis 1 fit by chance
    (
        f"MatrixRule {FLAX}",
        with_bias("DenseGeneral_0/kernel", (16, 4, 4, 32), (4, 4, 32)),
        {"DenseGeneral_0/kernel": [MatrixAxes(0, (1, 2, 3))]},
    ),
    # Layers of what is asked without layers
    (
        "MatrixRule",
        {"B": (6, 12, 20, 2), "C": (6, 20, 12, 2)},
        {"B": [MatrixAxes(2, 1)], "C": [MatrixAxes(2, 1)]},
    ),
    (
        "MatrixRule",
        {"l/kv_einsum/w": (5, 2, 1, 64, 16), "l/attn_vec_einsum/w": (5, 8, 16, 64)},
        {"l/kv_einsum/w": [MatrixAxes(3, (2, 4))]},
    ),
    (
        f"MatrixRule {FLAX}",
        {"Conv_0/kernel": (2, 4, 3, 3, 8, 16)},
        {"Conv_0/kernel": [MatrixAxes((2, 3, 4), 5)]},
    ),
    (
        ALL,
        with_bias("Conv_0/kernel", (2, 4, 3, 3, 8, 16), (2, 4, 16)),
        {"Conv_0/kernel": [MatrixAxes((2, 3, 4), 5)]},
    ),
]


@pytest.mark.parametrize(("rules", "shapes", "readings"), ASKED)
def test_what_nothing_decides_is_asked(
    rules: str, shapes: Shapes, readings: dict[str, Any]
) -> None:
    for name in rules.split():
        found = offered(shapes, rule(name))
        for path, some in readings.items():
            assert all(axes in found[path] for axes in some), (name, path)


def test_a_first_reading_is_that_of_the_siblings() -> None:
    for shape, axes in (((2, 16, 8), MatrixAxes(2, 1)), ((2, 8, 16), AXIS_0)):
        found = offered({"mlp/gating_einsum": shape, "mlp/linear": (16, 8)})
        assert found["mlp/gating_einsum"][0] == axes


def test_the_height_of_a_kernel_is_no_number_of_layers_elsewhere() -> None:
    shapes = {**MLP_0, "stem/Conv_0/kernel": (3, 5, 8, 4)}
    assert treated(shapes, curvax.rules.linen)["stem/Conv_0/kernel"] == HWIO


def test_what_is_not_a_matrix() -> None:
    shapes = {"gating_w": (9, 32), "gating_b": (4, 8), "att/time_faaaa": (4, 8)}
    found = treated(shapes)
    assert found["gating_b"] == "gating_b" and found["att/time_faaaa"] == "time_faaaa of att"
    assert found["gating_w"] == IN_OUT and not found["gating_w"].is_guess
    assert treated({"embed/weight": (64, 9)}) == {"embed/weight": "embedding"}
    norm = treated({"norm/w": (4, 32), "norm/b": (4, 32)})
    assert norm == {"norm/w": "w of norm", "norm/b": "b of norm"}


# Levels below the name of an array are none of its name.
FIELDS: list[tuple[Shapes, list[Any]]] = [
    ({"embedding/q": (100, 8), "embedding/scale": (100, 1)}, ["embedding", "vector"]),
    ({"up/weight/q": (16, 8), "up/weight/scale": (16, 1)}, [OUT_IN, "vector"]),
    ({"up/kernel/qvalue": (16, 8), "query/bias/value": (4, 8)}, [IN_OUT, "bias of query"]),
    (
        {"wte.embedding.value": (9, 8), "up.kernel.raw_value": (8, 4), "up.bias.value": (8,)},
        ["embedding", OUT_IN, "vector"],
    ),
    (
        {f"wte.embedding{part}": (9, 8) for part in (".value", ".raw_value")} | {"up.w": (8, 4)},
        ["embedding", "embedding", IN_OUT],
    ),
    ({f"a.bias.{part}": (9, 8) for part in ("real", "imaginary")}, ["bias of a", "bias of a"]),
    (
        {"a/weight_v": (12, 4, 3, 3, 3), "a/weight_g": (12, 1, 1, 1, 1), "a/bias": (12,)},
        [MatrixAxes((1, 2, 3, 4), 0), "vector", "vector"],
    ),
    (
        {f"up.parametrizations.weight.original{i}": x for i, x in ((1, (12, 4)), (0, (12, 1)))},
        [OUT_IN, "vector"],
    ),
    ({"pos/q": (8, 8), "pos/k": (8, 8)}, [IN_OUT, IN_OUT]),  # of attention
]


@pytest.mark.parametrize(("shapes", "treatments"), FIELDS)
def test_fields_of_an_array_have_its_treatment(shapes: Shapes, treatments: list[Any]) -> None:
    found = treated(shapes)
    assert found == dict(zip(shapes, treatments, strict=True))
    assert not any(isinstance(x, MatrixAxes) and x.is_guess for x in found.values())


def test_a_last_level_value_of_all_parameters_is_no_name() -> None:
    shapes = {"dense.kernel": (32, 64), "dense.bias": (2, 64), "embed.embedding": (100, 32)}
    expected = {f"{name}.value": treatment for name, treatment in treated(shapes).items()}
    assert treated({f"{name}.value": x for name, x in shapes.items()}) == expected
    assert treated({"attention/value": (32, 64), "dense/kernel": (32, 64)}) == {
        "attention/value": IN_OUT,
        "dense/kernel": IN_OUT,
    }
