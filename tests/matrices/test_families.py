"""Rules for families: the parameters of real models, by their paths and shapes."""

import dataclasses

import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from tests.shared.rules import Shapes, abstract, treated

L, D, H, K, F, E, R = 3, 8, 2, 4, 16, 5, 6  # layers, features, heads, head_dim, mlp, experts, rank


def sides(rule: MatrixRule, shapes: Shapes) -> dict[str, tuple | str]:
    """The axes of the rows and of the columns, counted from 0; or why it is not a matrix."""
    found = {}
    for name, treatment in treated(shapes, rule).items():
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
    f"{ATTENTION}/o_a_proj/kernel": ((2, F, K), (-2,), (-1,)),
    f"{ATTENTION}/csa_compressor/position_bias": ((4, F), (0,), (-1,)),
    "decoder/layers/mhc_mlp/pre_alpha": ((D, H), (0,), (-1,)),
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
    f"{ATTENTION}/sinks": (H,),
    "decoder/layers/layer_scalar": (2,),
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
    "layers/mlp/wo/kernel": ((12, 256, 64), ((1,), (2,))),  # only axis 0 has layers here too
    "Conv_0/kernel": ((1, 7, 3, 8), ((0, 1, 2), (3,))),
    "experts/up/kernel": ((E, D, F), ((1,), (2,))),
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
    "layers/0/mlp/router/weight": ((E, D), ((1,), (0,))),
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
    if rule == "hf_flax":  # query, key and value of GPT-2
        assert treated(shapes, curvax.rules.hf_flax)["h/0/attn/c_attn/kernel"].column_heads == 3


def test_stacked_layers_need_evidence() -> None:
    """A norm of other layers, or none, leaves the question open."""
    for norm in ({"block/norm/scale": (7, D)}, {"block/norm/scale": (D,)}, {}):
        with pytest.raises(ValueError, match="block/up/kernel"):
            treated({"block/up/kernel": (L, D, F), **norm}, curvax.rules.linen)


def test_what_the_user_says_goes_before_the_family() -> None:
    params = abstract({"attention/query/kernel": (D, H, K)})
    said = MatrixAxes(rows=1, columns=2)
    numbers = {"weight_dimension_numbers": {"attention/*": said}}
    assert dataclasses.replace(curvax.rules.linen, **numbers)(params) == {
        "attention/query/kernel": said
    }
    text = curvax.summarize(curvax.muon(0.1, matrices=curvax.rules.linen, **numbers), params)
    assert "of the family" not in text


@pytest.mark.parametrize("rule", [MatrixRule(), curvax.rules.linen, curvax.rules.maxtext])
def test_heads_of_queries_and_keys_may_be_matrices_of_their_own(rule: MatrixRule) -> None:
    shapes = {f"self_attention/{name}/kernel": (D, H, K) for name in ("query", "key", "value")}
    query, key, value = sides(dataclasses.replace(rule, head_wise=True), shapes).values()
    assert query == key == ((0,), (2,)) and value == ((0,), (1, 2))
    of_maxtext = dataclasses.replace(curvax.rules.maxtext, head_wise=True)
    assert sides(of_maxtext, {"self_attention/q_proj/kernel": (D, H, K)}).popitem()[1] == query


def test_summaries_say_which_family_decided() -> None:
    shapes = {"wi_0/kernel": (D, L, F), "norm/scale": (D, L), "MoeBlock_0/wo": (E, F, D)}
    params = abstract({**shapes, "up/kernel": (D, F)})
    lines = curvax.summarize(curvax.muon(0.1, matrices=curvax.rules.maxtext), params).splitlines()
    by_name = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert "axes of the family maxtext" in by_name["wi_0/kernel"]
    assert "axes of the family maxtext" in by_name["MoeBlock_0/wo"]
    assert "family" not in by_name["up/kernel"]


def test_asgo_takes_everything_and_the_axes_of_the_family() -> None:
    params = abstract({"wi_0/kernel": (D, L, F), "wi_0/bias": (F, L)})
    text = curvax.summarize(curvax.asgo(0.1, matrices=curvax.rules.maxtext), params)
    assert "not a matrix" not in text and f"{L} matrices {D}×{F}" in text
