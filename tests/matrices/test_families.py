"""Rules for families: the parameters of real models, by their paths and shapes."""

import dataclasses

import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from tests.matrices.test_readings import assert_decided
from tests.shared.rules import Row, abstract, offered, rows, treated

L, D, H, K, F, E = 3, 8, 2, 4, 16, 5  # layers, features, heads, head_dim, mlp, experts

DECIDED = """
# MaxText gives Optax's Muon these axes (`muon_utils.py`), for Llama and DeepSeek.
maxtext: decoder/layers/self_attention/(query/kernel 8 2 4, {key,value}/kernel 8 1 4,
    out/kernel 2 4 8, {wq_a,wkv_a}/kernel 8 6, {wq_b,wkv_b}/kernel 6 2 4, o_a_proj/kernel 2 16 4,
    csa_compressor/position_bias 4 16, kv_norm/scale 6, sinks 2),
    decoder/layers/(mhc_mlp/pre_alpha 8 2, mlp/wi_0/kernel 8 16, mlp/wo/kernel 16 8,
    DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 8 5, DeepSeekMoeBlock_0/MoeBlock_0/wi_0 5 8 16,
    DeepSeekMoeBlock_0/MoeBlock_0/wo 5 16 8, DeepSeekMoeBlock_0/shared_experts/wi_0/kernel 8 16,
    pre_self_attention_layer_norm/scale 8, layer_scalar 2), decoder/decoder_norm/scale 8,
    token_embedder/embedding 50 8 ->
    decoder/layers/self_attention/({query,key,value}/kernel 0.12, out/kernel 01.2,
    {wq_a,wkv_a}/kernel 0.1, {wq_b,wkv_b}/kernel 0.12, o_a_proj/kernel 1.2,
    csa_compressor/position_bias 0.1, {kv_norm/scale,sinks} vector),
    decoder/layers/(mhc_mlp/pre_alpha 0.1, mlp/{wi_0,wo}/kernel 0.1,
    DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 0.1, DeepSeekMoeBlock_0/MoeBlock_0/{wi_0,wo} 1.2,
    DeepSeekMoeBlock_0/shared_experts/wi_0/kernel 0.1,
    {pre_self_attention_layer_norm/scale,layer_scalar} vector), decoder/decoder_norm/scale vector,
    token_embedder/embedding embedding
# The same, scanned: layers are on axis 1.
maxtext: decoder/layers/self_attention/(query/kernel 8 3 2 4, {key,value}/kernel 8 3 1 4,
    out/kernel 2 3 4 8, {wq_a,wkv_a}/kernel 8 3 6, {wq_b,wkv_b}/kernel 6 3 2 4,
    o_a_proj/kernel 2 3 16 4, csa_compressor/position_bias 4 3 16, kv_norm/scale 6 3, sinks 2 3),
    decoder/layers/(mhc_mlp/pre_alpha 8 3 2, mlp/wi_0/kernel 8 3 16, mlp/wo/kernel 16 3 8,
    DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 8 3 5, DeepSeekMoeBlock_0/MoeBlock_0/wi_0 5 3 8 16,
    DeepSeekMoeBlock_0/MoeBlock_0/wo 5 3 16 8,
    DeepSeekMoeBlock_0/shared_experts/wi_0/kernel 8 3 16,
    pre_self_attention_layer_norm/scale 8 3, layer_scalar 2 3), decoder/decoder_norm/scale 8,
    token_embedder/embedding 50 8 ->
    decoder/layers/self_attention/({query,key,value}/kernel 0.23, out/kernel 02.3,
    {wq_a,wkv_a}/kernel 0.2, {wq_b,wkv_b}/kernel 0.23, o_a_proj/kernel 2.3,
    csa_compressor/position_bias 0.2, kv_norm/scale scale of kv_norm,
    sinks sinks of self_attention),
    decoder/layers/(mhc_mlp/pre_alpha 0.2, mlp/{wi_0,wo}/kernel 0.2,
    DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 0.2, DeepSeekMoeBlock_0/MoeBlock_0/{wi_0,wo} 2.3,
    DeepSeekMoeBlock_0/shared_experts/wi_0/kernel 0.2,
    pre_self_attention_layer_norm/scale scale of pre_self_attention_layer_norm,
    layer_scalar layer_scalar of layers), token_embedder/embedding embedding
# As `eqx.filter` gives them
equinox: embed/weight 50 8, conv/(weight 8 3 3 3, bias 8 1 1), bare/weight 16 8 3 3,
    sequence/(weight 4 8 3, bias 4 1), dwconv/weight 8 1 3 3, gru/weight_hh 24 8,
    blocks/(up/weight 3 16 8, up/bias 3 16, norm/weight 3 8, down/weight 3 8 16) ->
    embed/weight embedding, {conv,bare}/weight 123.0, {conv,sequence}/bias vector,
    sequence/weight 12.0, dwconv/weight depthwise convolution, gru/weight_hh 1.0,
    blocks/({up,down}/weight 2.1, up/bias bias of up, norm/weight weight of norm)
haiku: layer_stack/(mlp/linear_0/w 3 8 16, mlp/linear_0/b 3 16, layer_norm/scale 3 8),
    conv2_d/w 3 5 8 4, depthwise_conv2_d/w 3 3 1 8, embed/embeddings 50 8 ->
    layer_stack/(mlp/linear_0/w 1.2, mlp/linear_0/b b of linear_0, layer_norm/scale scale of
    layer_norm), conv2_d/w 012.3, depthwise_conv2_d/w depthwise convolution,
    embed/embeddings embedding
# Default rules ask about `attention`, and only axis 0 has layers in `layers`.
linen nnx: ScanBlock_0/(norm/scale 3 8, Dense_0/kernel 3 8 16, attention/query/kernel 3 8 2 4,
    attention/query/bias 3 2 4, attention/out/kernel 3 2 4 8), attention/(query/kernel 12 64 64,
    query/bias 64 64, out/kernel 64 64 12), layers/(norm/scale 12 64,
    attention/query/kernel 12 64 64, mlp/wo/kernel 12 256 64), experts/up/kernel 5 8 16 ->
    ScanBlock_0/(norm/scale scale of norm, Dense_0/kernel 1.2, attention/query/kernel 1.23,
    attention/query/bias bias of query, attention/out/kernel 12.3), attention/(query/kernel 0.12,
    query/bias bias of query, out/kernel 01.2), layers/(norm/scale scale of norm,
    attention/query/kernel 1.2, mlp/wo/kernel 1.2), experts/up/kernel 1.2
# Query, key and value of GPT-2 are side by side.
hf_flax: h/0/(attn/c_attn/kernel 24 8, attn/c_proj/kernel 8 8, mlp/c_fc/kernel 32 8, ln_1/scale 8),
    wte/embedding 50 8 -> h/0/(attn/c_attn/kernel 1.0/3, {attn/c_proj,mlp/c_fc}/kernel 1.0,
    ln_1/scale vector), wte/embedding embedding
keras: multi_head_attention/(query/kernel 8 2 4, query/bias 2 4, attention_output/kernel 2 4 8),
    dense/kernel 8 16, lstm/lstm_cell/recurrent_kernel 8 32, conv1d/kernel 3 4 8,
    conv2d_transpose/kernel 3 3 8 4, depthwise_conv2d/kernel 3 3 8 1,
    separable_conv2d/(depthwise_kernel 3 3 8 1, pointwise_kernel 1 1 8 4),
    layer_normalization/gamma 8, embedding/embeddings 50 8 ->
    multi_head_attention/(query/kernel 0.12, query/bias bias of query,
    attention_output/kernel 01.2), {dense/kernel,lstm/lstm_cell/recurrent_kernel} 0.1,
    conv1d/kernel 01.2, conv2d_transpose/kernel 013.2,
    {depthwise_conv2d/kernel,separable_conv2d/depthwise_kernel} depthwise convolution (keras),
    separable_conv2d/pointwise_kernel 012.3, layer_normalization/gamma vector,
    embedding/embeddings embedding
# Of `keras.applications`
keras: {block1a_dwconv,block2b_dwconv2,conv_dw_1,expanded_conv_depthwise}/kernel 3 3 64 1,
    block_1_depthwise/kernel 3 3 64 1, stage_0_block_0_depthwise_conv/kernel 7 7 1 64,
    block2_sepconv1/depthwise_kernel 3 3 64 1,
    {conv_pw_1,block1a_project_conv}/kernel 1 1 64 8 ->
    {block1a_dwconv,block2b_dwconv2,conv_dw_1,expanded_conv_depthwise}/kernel
    depthwise convolution (keras), block_1_depthwise/kernel depthwise convolution (keras),
    stage_0_block_0_depthwise_conv/kernel depthwise convolution (keras),
    block2_sepconv1/depthwise_kernel depthwise convolution (keras),
    {conv_pw_1,block1a_project_conv}/kernel 012.3
torch_layout: layers/0/mlp/(up_proj 16 8, experts/down_proj 5 8 16, router/weight 5 8),
    stem/conv/kernel 8 3 3 3, embed_tokens/weight 50 8 -> layers/0/mlp/({up_proj,router/weight} 1.0,
    experts/down_proj 2.1), stem/conv/kernel 123.0, embed_tokens/weight embedding
"""


@pytest.mark.parametrize("row", rows(DECIDED))
def test_families(row: Row) -> None:
    assert_decided(row)


def test_stacked_layers_need_evidence() -> None:
    """A norm of other layers, or none, leaves the question open."""
    for norm in ({"block/norm/scale": (7, D)}, {"block/norm/scale": (D,)}, {}):
        assert "block/up/kernel" in offered(
            {"block/up/kernel": (L, D, F), **norm}, curvax.rules.linen
        )


def test_what_the_user_says_goes_before_the_family() -> None:
    shapes, said = {"attention/query/kernel": (D, H, K)}, MatrixAxes(rows=1, columns=2)
    numbers = {"weight_dimension_numbers": {"attention/*": said}}
    found = treated(shapes, dataclasses.replace(curvax.rules.linen, **numbers))
    assert found == {"attention/query/kernel": said}
    optimizer = curvax.muon(0.1, matrices=curvax.rules.linen, **numbers)
    assert "of the family" not in curvax.summarize(optimizer, abstract(shapes))


@pytest.mark.parametrize("rule", [MatrixRule(), curvax.rules.linen, curvax.rules.maxtext])
def test_heads_of_queries_and_keys_may_be_matrices_of_their_own(rule: MatrixRule) -> None:
    layers = ["query", "key", "value"] + ["q_proj"] * (rule == curvax.rules.maxtext)
    shapes = {f"self_attention/{name}/kernel": (D, H, K) for name in layers}
    found = treated(shapes, dataclasses.replace(rule, head_wise=True))
    assert found == {name: MatrixAxes(0, (1, 2) if "value" in name else 2) for name in shapes}


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
