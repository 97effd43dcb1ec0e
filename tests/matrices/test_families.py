"""Rules for families: the parameters of real models, by their paths and shapes."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from tests.helpers import assert_close

L, D, H, K, F, E, R = 3, 8, 2, 4, 16, 5, 6  # layers, features, heads, head_dim, mlp, experts, rank


def tree(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Nested dicts of shapes."""
    root: dict = {}
    for path, shape in shapes.items():
        *parents, last = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(shape, "float32")
    return root


def sides(rule: MatrixRule, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple | str]:
    """The axes of the rows and of the columns, counted from 0; or why it is not a matrix."""
    found = {}
    for name, treatment in rule(tree(shapes)).items():
        if isinstance(treatment, str):
            found[name] = treatment
            continue
        ndim = len(shapes[name])
        rows, columns = (
            tuple(axis % ndim for axis in ([axes] if isinstance(axes, int) else axes))
            for axes in (treatment.rows, treatment.columns)
        )
        found[name] = (rows, columns)
    return found


# The axes that MaxText itself gives Optax's Muon (`muon_utils.py`), for Llama and DeepSeek.
ATTENTION = "decoder/layers/self_attention"
MAXTEXT = {
    f"{ATTENTION}/query/kernel": ((D, H, K), (0,), (-2, -1)),
    f"{ATTENTION}/key/kernel": ((D, 1, K), (0,), (-2, -1)),
    f"{ATTENTION}/value/kernel": ((D, 1, K), (0,), (-2, -1)),
    f"{ATTENTION}/out/kernel": ((H, K, D), (0, -2), (-1,)),
    f"{ATTENTION}/wq_a/kernel": ((D, R), (0,), (-1,)),
    f"{ATTENTION}/wq_b/kernel": ((R, H, K), (0,), (-2, -1)),
    f"{ATTENTION}/wkv_a/kernel": ((D, R), (0,), (-1,)),
    f"{ATTENTION}/wkv_b/kernel": ((R, H, K), (0,), (-2, -1)),
    "decoder/layers/mlp/wi_0/kernel": ((D, F), (0,), (-1,)),
    "decoder/layers/mlp/wo/kernel": ((F, D), (0,), (-1,)),
    "decoder/layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel": ((D, E), (0,), (-1,)),
    "decoder/layers/DeepSeekMoeBlock_0/MoeBlock_0/wi_0": ((E, D, F), (-2,), (-1,)),
    "decoder/layers/DeepSeekMoeBlock_0/MoeBlock_0/wo": ((E, F, D), (-2,), (-1,)),
    "decoder/layers/DeepSeekMoeBlock_0/shared_experts/wi_0/kernel": ((D, F), (0,), (-1,)),
}
OTHERS = {
    f"{ATTENTION}/kv_norm/scale": (R,),
    "decoder/layers/pre_self_attention_layer_norm/scale": (D,),
    "decoder/decoder_norm/scale": (D,),
    "token_embedder/embedding": (50, D),
}


@pytest.mark.parametrize("scanned", [False, True])
def test_maxtext_is_treated_as_maxtext_treats_it(scanned: bool) -> None:
    """A scanned layer has its axis in the second place."""

    def stored(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:1], L, *shape[1:]) if scanned and "/layers/" in name else shape

    matrices = {name: stored(name, shape) for name, (shape, *_) in MAXTEXT.items()}
    others = {name: stored(name, shape) for name, shape in OTHERS.items()}
    found = sides(curvax.rules.maxtext, matrices | others)
    for name, (_, rows, columns) in MAXTEXT.items():
        ndim = len(matrices[name])
        assert found[name] == tuple(tuple(x % ndim for x in axes) for axes in (rows, columns)), name
    assert all(isinstance(found[name], str) for name in others)


EQUINOX = {  # as `eqx.filter` gives them
    "embed/weight": ((50, D), "embedding"),
    "conv/weight": ((8, 3, 3, 3), ((1, 2, 3), (0,))),
    "conv/bias": ((8, 1, 1), "vector"),
    "bare/weight": ((F, D, 3, 3), ((1, 2, 3), (0,))),
    "sequence/weight": ((4, D, 3), ((1, 2), (0,))),
    "sequence/bias": ((4, 1), "vector"),
    "dwconv/weight": ((8, 1, 3, 3), "depthwise convolution"),
    "gru/weight_hh": ((3 * D, D), ((1,), (0,))),
    "blocks/up/weight": ((L, F, D), ((2,), (1,))),
    "blocks/up/bias": ((L, F), "bias of up"),
    "blocks/norm/weight": ((L, D), "weight of norm"),
    "blocks/down/weight": ((L, D, F), ((2,), (1,))),
}
HAIKU = {
    "layer_stack/mlp/linear_0/w": ((L, D, F), ((1,), (2,))),
    "layer_stack/mlp/linear_0/b": ((L, F), "b of linear_0"),
    "layer_stack/layer_norm/scale": ((L, D), "scale of layer_norm"),
    "conv2_d/w": ((3, 5, 8, 4), ((0, 1, 2), (3,))),
    "depthwise_conv2_d/w": ((3, 3, 1, 8), "depthwise convolution"),
    "embed/embeddings": ((50, D), "embedding"),
}
LINEN = {
    "ScanBlock_0/norm/scale": ((L, D), "scale of norm"),
    "ScanBlock_0/Dense_0/kernel": ((L, D, F), ((1,), (2,))),
    "ScanBlock_0/attention/query/kernel": ((L, D, H, K), ((1,), (2, 3))),
    "ScanBlock_0/attention/query/bias": ((L, H, K), "bias of query"),
    "ScanBlock_0/attention/out/kernel": ((L, H, K, D), ((1, 2), (3,))),
    "attention/query/kernel": ((12, 64, 64), ((0,), (1, 2))),  # by default a question
    "attention/query/bias": ((64, 64), "bias of query"),
    "attention/out/kernel": ((64, 64, 12), ((0, 1), (2,))),
    "layers/norm/scale": ((12, 64), "scale of norm"),
    "layers/attention/query/kernel": ((12, 64, 64), ((1,), (2,))),
    "Conv_0/kernel": ((1, 7, 3, 8), ((0, 1, 2), (3,))),
    "experts/up/kernel": ((E, D, F), ((1,), (2,))),
    # Gemma: heads first; keys and values, or all three, on an axis before them
    "layers/0/attn/q_einsum/kernel": ((H, D, K), ((1,), (0, 2))),
    "layers/0/attn/kv_einsum/kernel": ((2, 1, D, K), ((2,), (1, 3))),
    "layers/0/attn/attn_vec_einsum/kernel": ((H, K, D), ((0, 1), (2,))),
    "layer_1/attn/qkv_einsum/w": ((3, H, D, K), ((2,), (1, 3))),
}
HF_FLAX = {
    "h/0/attn/c_attn/kernel": ((3 * D, D), ((1,), (0,))),
    "h/0/attn/c_proj/kernel": ((D, D), ((1,), (0,))),
    "h/0/mlp/c_fc/kernel": ((4 * D, D), ((1,), (0,))),
    "h/0/ln_1/scale": ((D,), "vector"),
    "wte/embedding": ((50, D), "embedding"),
}
KERAS = {
    "multi_head_attention/query/kernel": ((D, H, K), ((0,), (1, 2))),
    "multi_head_attention/query/bias": ((H, K), "bias of query"),
    "multi_head_attention/attention_output/kernel": ((H, K, D), ((0, 1), (2,))),
    "dense/kernel": ((D, F), ((0,), (1,))),
    "lstm/lstm_cell/recurrent_kernel": ((D, 4 * D), ((0,), (1,))),
    "conv1d/kernel": ((3, 4, 8), ((0, 1), (2,))),
    "conv2d_transpose/kernel": ((3, 3, 8, 4), ((0, 1, 3), (2,))),
    "depthwise_conv2d/kernel": ((3, 3, 8, 1), "depthwise convolution (keras)"),
    "separable_conv2d/depthwise_kernel": ((3, 3, 8, 1), "depthwise convolution (keras)"),
    "separable_conv2d/pointwise_kernel": ((1, 1, 8, 4), ((0, 1, 2), (3,))),
    "layer_normalization/gamma": ((D,), "vector"),
    "embedding/embeddings": ((50, D), "embedding"),
}
TORCH = {
    "layers/0/mlp/up_proj": ((F, D), ((1,), (0,))),
    "layers/0/mlp/experts/down_proj": ((E, D, F), ((2,), (1,))),
    "stem/conv/kernel": ((8, 3, 3, 3), ((1, 2, 3), (0,))),
    "embed_tokens/weight": ((50, D), "embedding"),
}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("equinox", EQUINOX),
        ("haiku", HAIKU),
        ("linen", LINEN),
        ("nnx", LINEN),
        ("hf_flax", HF_FLAX),
        ("keras", KERAS),
        ("torch_layout", TORCH),
    ],
)
def test_families(rule: str, expected: dict) -> None:
    shapes = {name: shape for name, (shape, _) in expected.items()}
    found = sides(getattr(curvax.rules, rule), shapes)
    assert found == {name: treatment for name, (_, treatment) in expected.items()}


def test_queries_keys_and_values_of_gpt2_are_three_matrices() -> None:
    shapes = {"h/0/attn/c_attn/kernel": (3 * D, D)}
    treated = curvax.rules.hf_flax(tree(shapes))
    assert treated["h/0/attn/c_attn/kernel"].column_heads == 3


def test_without_a_family_the_same_parameters_are_questions() -> None:
    """The negative control."""
    for expected in (EQUINOX, HAIKU, LINEN, KERAS):
        with pytest.raises(ValueError, match="cannot tell the matrix axes"):
            MatrixRule()(tree({name: shape for name, (shape, _) in expected.items()}))


def test_stacked_layers_need_evidence() -> None:
    """A norm of other layers, or none, leaves the question open."""
    for norm in ({"block/norm/scale": (7, D)}, {"block/norm/scale": (D,)}, {}):
        with pytest.raises(ValueError, match="block/up/kernel"):
            curvax.rules.linen(tree({"block/up/kernel": (L, D, F), **norm}))


def test_what_the_user_says_goes_before_the_family() -> None:
    params = tree({"attention/query/kernel": (D, H, K)})
    said = MatrixAxes(rows=1, columns=2)
    numbers = {"weight_dimension_numbers": {"attention/*": said}}
    assert dataclasses.replace(curvax.rules.linen, **numbers)(params) == {
        "attention/query/kernel": said
    }
    text = curvax.summarize(curvax.muon(0.1, matrices=curvax.rules.linen, **numbers), params)
    assert "of the family" not in text


def test_heads_may_be_matrices_of_their_own() -> None:
    for name in ("linen", "maxtext"):
        rule = dataclasses.replace(getattr(curvax.rules, name), head_wise=True)
        shapes = {
            "self_attention/query/kernel": (D, H, K),
            "self_attention/value/kernel": (D, H, K),
        }
        found = sides(rule, shapes)
        assert found["self_attention/query/kernel"] == ((0,), (2,))
        assert found["self_attention/value/kernel"] == ((0,), (1, 2))


def test_summaries_say_which_family_decided() -> None:
    params = {"wi_0/kernel": (D, L, F), "norm/scale": (D, L), "MoeBlock_0/wo": (E, F, D)}
    params = tree({**params, "up/kernel": (D, F)})
    lines = curvax.summarize(curvax.muon(0.1, matrices=curvax.rules.maxtext), params).splitlines()
    by_name = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert "axes of the family maxtext" in by_name["wi_0/kernel"]
    assert "axes of the family maxtext" in by_name["MoeBlock_0/wo"]
    assert "family" not in by_name["up/kernel"]


def test_the_update_of_a_family_is_that_of_its_axes() -> None:
    params = {"query": {"kernel": jax.random.normal(jax.random.key(0), (4, 3, 2, 5))}}
    params = {"self_attention": params}

    def first(**arguments):
        optimizer = curvax.muon(0.1, **arguments)
        return jax.jit(lambda p: optimizer.update(p, optimizer.init(p), p)[0])(params)

    axes = {"*": MatrixAxes(rows=0, columns=(2, 3))}
    of_family = first(matrices=curvax.rules.maxtext)
    assert_close(of_family, first(weight_dimension_numbers=axes), factor=0)


def test_asgo_takes_everything_and_the_axes_of_the_family() -> None:
    params = tree({"wi_0/kernel": (D, L, F), "wi_0/bias": (F, L)})
    text = curvax.summarize(curvax.asgo(0.1, matrices=curvax.rules.maxtext), params)
    assert "not a matrix" not in text and f"{L} matrices {D}×{F}" in text


def test_a_family_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="family must be None or that of a rule in curvax.rules"):
        MatrixRule(family="maxtext")  # pyright: ignore[reportArgumentType]


def test_a_depthwise_convolution_is_known_by_name_and_shape() -> None:
    shapes = {
        "depthwise/kernel": (3, 3, 1, 8),
        "gray/Conv_0/kernel": (3, 3, 1, 8),  # of images with one channel
        "dw/pointwise_conv/kernel": (1, 1, 8, 8),
    }
    found = sides(MatrixRule(), shapes)
    assert found["depthwise/kernel"] == "depthwise convolution"
    assert found["gray/Conv_0/kernel"] == ((0, 1, 2), (3,))
    assert found["dw/pointwise_conv/kernel"] == ((0, 1, 2), (3,))
