"""What lies beside a parameter goes before the habits of its family and of its name."""

import pytest

from tests.matrices.test_readings import assert_decided
from tests.shared.rules import Row, offered, rows

DECIDED = """
# Transposed convolutions: an axis that alone fits the bias has the outputs.
haiku: conv2_d_transpose/w 3 3 64 128 -> conv2_d_transpose/w 013.2
MatrixRule torch_layout equinox: up/(weight 64 32 2 2, bias 32) -> up/weight 023.1
torch_layout: conv_transpose/weight 64 32 2 2 -> conv_transpose/weight 023.1
equinox: conv/(weight 64 32 2 2, bias 32 1 1) -> conv/weight 023.1
haiku: conv2_d/(w 3 3 64 32, b 64 1 1) -> conv2_d/w 013.2
torch_layout: {tconv,trans_conv,ConvT_0}/weight 64 32 2 2 ->
    {tconv,trans_conv,ConvT_0}/weight 023.1
# Layers that are stacked, by a scan or a vmap, have a bias each. So one vector says that a sum goes
# over all other axes, as in a convolution and in `DenseGeneral`, also beside three axes.
ALL: up/(kernel 4 12 36, bias 12) -> up/kernel 02.1
ALL: up/(kernel 4 12 36, bias 36) -> up/kernel 01.2
ALL: resblocks/0/(weight_v 64 32 3, weight_g 64 1 1, bias 64) -> resblocks/0/weight_v 12.0
# Axes of size 1 in front of a bias are none.
torch_layout: conv/(weight 16 8 3 3, bias 1 16 1 1) -> conv/weight 123.0
# GPT-Neo has the names of GPT-2, but not its layout.
hf_flax: h/0/attn/c_attn/(kernel 32 96, bias 96) -> h/0/attn/c_attn/kernel 0.1/3
hf_flax: h/0/attn/c_attn/(kernel 96 32, bias 96) -> h/0/attn/c_attn/kernel 1.0/3
hf_flax: h/0/crossattention/c_attn/(kernel 32 64, bias 64) -> h/0/crossattention/c_attn/kernel 0.1/2
hf_flax: h/attn/c_attn/(kernel 3 32 96, bias 3 96) -> h/attn/c_attn/kernel 1.2/3
# Experts of torch are stored either way round; a bias tells, or the features of a router.
torch_layout: mlp/(experts/gate_up_proj 4 8 32, experts/down_proj 4 16 8, gate/kernel 8 4) ->
    mlp/experts/{gate_up_proj,down_proj} 1.2
torch_layout: mlp/experts/(gate_up_proj 4 32 8, down_proj 4 8 16, gate_up_proj_bias 4 32,
    down_proj_bias 4 8) -> mlp/experts/{gate_up_proj,down_proj} 2.1
torch_layout: mlp/(experts/gate_up_proj 4 32 8, experts/down_proj 4 8 16, gate/kernel 8 4) ->
    mlp/experts/{gate_up_proj,down_proj} 2.1
torch_layout: experts/(w2 3 4 16 8, b2 3 4 8) -> experts/w2 2.3
torch_layout: mlp/(experts/gate_up_proj 3 4 8 32, experts/down_proj 3 4 16 8, router/weight 4 8) ->
    mlp/experts/{gate_up_proj,down_proj} 2.3
# Layers on axis 1, or on axis 0
FLAX maxtext: l/(up/kernel 3 8 16, down/kernel 3 16 8, norm/scale 3 8) -> l/{up,down}/kernel 1.2
FLAX maxtext: l/(self_attention/query/kernel 8 3 2 4, self_attention/out/kernel 2 3 4 8, norm/scale
    8 3) -> l/self_attention/(query/kernel 0.23, out/kernel 02.3)
# Layers on the last axis
FLAX: l/(up/kernel 8 16 3, down/kernel 16 8 3, norm/scale 8 3) -> l/{up,down}/kernel 0.1
equinox: l/(up/weight 8 16 3, down/weight 16 8 3, norm/scale 8 3) -> l/{up,down}/weight 1.0
FLAX: l/(Conv_0/kernel 2 5 6 7, norm/scale 2 6) -> l/Conv_0/kernel 12.3
haiku: layer_stack/conv1_d/w 2 5 6 7 -> layer_stack/conv1_d/w 12.3
haiku: layer_stack/conv1_d_transpose/w 6 3 12 36 -> layer_stack/conv1_d_transpose/w 13.2
# A norm of each head
FLAX: attn/(query/kernel 32 4 8, q_norm/scale 4 8) -> attn/query/kernel 0.12
FLAX: action_expert/(q_proj/kernel 12 4 8, o_proj/kernel 4 8 12) ->
    action_expert/(q_proj/kernel 0.12, o_proj/kernel 01.2)
# As many heads as entries of each, which a bias of layers on axis 1 would fit too
ALL: mha/(query/kernel 64 8 8, query/bias 8 8, query_norm/scale 8 8, out/kernel 8 8 64, out/bias 64)
    -> mha/(query/kernel 0.12, out/kernel 01.2)
# KerasHub's Gemma has heads first; grouped keys tell, also with as many features as heads.
MatrixRule keras: attention/(query/kernel 8 20 4, {key,value}/kernel 2 20 4, attention_output/kernel
    8 4 20) -> attention/({query,key,value}/kernel 1.02, attention_output/kernel 01.2)
MatrixRule keras: attention/(query/kernel 8 8 4, {key,value}/kernel 2 8 4, attention_output/kernel 8
    4 8) -> attention/({query,key,value}/kernel 1.02, attention_output/kernel 01.2)
keras: attention/({query,key,value}/kernel 8 20 4, attention_output/kernel 8 4 20) ->
    attention/({query,key,value}/kernel 1.02, attention_output/kernel 01.2)
linen: attention/(query/kernel 8 20 4, {key,value}/kernel 2 20 4, attention_output/kernel 8 4 20) ->
    attention/{query,key,value}/kernel 1.02
FLAX: attn/(q_einsum_1/w 8 20 4, kv_einsum_1/w 2 2 20 4, attn_vec_einsum_1/w 8 4 20) ->
    attn/(q_einsum_1/w 1.02, kv_einsum_1/w 2.13, attn_vec_einsum_1/w 01.2)
# Layers of an MLP are not heads, and the keys of a cross-attention have other features.
FLAX: l/(mlp/wi_0/kernel 4 64 256, mlp/wo/kernel 4 256 64, norm/scale 4 64) ->
    l/mlp/{wi_0,wo}/kernel 1.2
keras: cross/(query/kernel 8 64 16, {key,value}/kernel 8 96 16, attention_output/kernel 8 16 64) ->
    cross/{query,key,value}/kernel 1.02
# Stages of a pipeline, or copies of a model, in front of scanned layers
maxtext: l/(mlp/wi_0/kernel 4 64 3 256, mlp/wo/kernel 4 256 3 64, norm/scale 4 64 3) ->
    l/mlp/{wi_0,wo}/kernel 1.3
maxtext: l/(self_attention/query/kernel 4 64 3 8 16, self_attention/out/kernel 4 8 3 16 64,
    norm/scale 4 64 3, layer_scalar 4 3) -> l/self_attention/(query/kernel 1.34, out/kernel 13.4)
maxtext FLAX: l/(self_attention/query/kernel 4 3 64 8 16, self_attention/out/kernel 4 3 8 16 64,
    norm/scale 4 3 64) -> l/self_attention/(query/kernel 2.34, out/kernel 23.4)
equinox: l/(up/weight 2 4 16 8, down/weight 2 4 8 16, norm/weight 2 4 8) -> l/{up,down}/weight 3.2
# AlphaFold 3
MatrixRule haiku: q_projection/(weights 32 4 8, bias 4 8), k_projection/weights 32 4 8 ->
    {q,k}_projection/weights 0.12
# TransformerLens has heads first, as a bias of one layer or `D = H·K` tells.
MatrixRule FLAX: attn/(W_Q 4 20 8, W_K 2 20 8, W_O 4 8 20, b_Q 4 8, b_O 20) -> attn/W_Q 1.02
MatrixRule: attn/(W_Q 4 32 8, W_O 4 8 32) -> attn/(W_Q 1.02, W_O 01.2)
# A bias is that of Keras' own attention.
keras: attention/({query,key,value}/kernel 8 8 4, attention_output/kernel 8 4 8,
    {query,key,value}/bias 8 4) -> attention/{query,key,value}/kernel 0.12
# No table has a bias.
MatrixRule: position_activations/(weights 9 64, bias 64) -> position_activations/weights 0.1
MatrixRule haiku: pos_embedding/(weights 9 64, biases 64) -> pos_embedding/weights 0.1
# No norm has a bias of another shape.
equinox: l/(adaLN/weight 6 96 8, adaLN/bias 6 96, norm/weight 6 8, up/weight 6 32 8) ->
    l/{adaLN,up}/weight 2.1
torch_layout: kv_einsum/(w_lora_a 20 4, w_lora_b 4 2 3 5) -> kv_einsum/w_lora_b 0.23
torch_layout: qkv_einsum/(w_lora_a 20 4, w_lora_b 4 3 8 8) -> qkv_einsum/w_lora_b 0.23
# A gate beside the layer that it opens, scanned
maxtext: layers/(mlp/wi/kernel 8 3 2 16, norm/scale 8 3) -> layers/mlp/wi/kernel 0.3
maxtext: layers/mlp/wi/kernel 8 2 16 -> layers/mlp/wi/kernel 0.2
# A kernel for each place
FLAX: patches/(kernel 8 8 36 12, bias 8 8 12) -> patches/kernel 2.3
FLAX: ConvLocal_0/kernel 8 8 36 12 -> ConvLocal_0/kernel 2.3
FLAX: ConvLocal_0/(kernel 8 36 12, bias 12) -> ConvLocal_0/kernel 1.2
# A `b` beside a `w` is a bias, one beside an `a` a factor.
MatrixRule FLAX: attn/(wq_a/kernel 32 6, wq_b/kernel 6 4 8, wkv_a 32 8, wkv_b 8 4 5) ->
    attn/(wq_b/kernel 0.12, wkv_b 0.12)
MatrixRule: query_w 9 4 8, output_w 4 8 9 -> query_w 0.12
MatrixRule FLAX: {shift,scale,gate}_mlp_w 8 16 -> {shift,scale,gate}_mlp_w 0.1
# The height of a kernel is not a number of layers elsewhere.
linen: l/(up/kernel 3 8 16, down/kernel 3 16 8, norm/scale 3 8), stem/Conv_0/kernel 3 5 8 4 ->
    stem/Conv_0/kernel 012.3
# What a catch-all asks without evidence
maxtext: block/up/kernel 16 8 3, block/norm/scale 16 8 -> block/up/kernel 0.2
equinox: block/up/(weight 16 8 3, bias 16 1) -> block/up/weight 12.0
# A `b` beside a `w` is a vector, and so is a norm, in a list of layers too.
gating_w 9 32, gating_b 4 8, att/time_faaaa 4 8 -> gating_b gating_b, gating_w 0.1,
    att/time_faaaa time_faaaa of att
MatrixRule equinox torch_layout: layers/2/(weight 4 32, bias 4 32) -> layers/2/weight weight of 2
MatrixRule equinox torch_layout: layers/2/(weight 4 8 8, bias 4 8 8) -> layers/2/weight weight of 2
MatrixRule equinox torch_layout: layers/2/(weight 4 8 8 8, bias 4 8 8 8) ->
    layers/2/weight weight of 2
norm/(w 4 32, b 4 32) -> norm/(w w of norm, b b of norm)
h/mlp_norm/w 5 24 -> h/mlp_norm/w w of mlp_norm
linen: h/(w1/kernel 5 24 64, w2/kernel 5 64 24, ffn_norm/kernel 5 24) ->
    h/(ffn_norm/kernel kernel of ffn_norm, w1/kernel 1.2)
quantizer/codevectors 2 64 8, ssm/A_logs 4 8 -> quantizer/codevectors embedding,
    ssm/A_logs A_logs of ssm
# Vectors of stacked layers: a norm says that one of their axes is of layers, or A_log, which has a
# state per channel in Mamba 1.
linen: block/(D 3 4, skip 3 7, norm/scale 3 32) -> block/{D,skip} a vector per layer
MatrixRule linen maxtext: mixer/(D 3 4, A_log 3 4) -> mixer/D a vector per layer
MatrixRule linen maxtext: mixer/(D 3 4, A_log 3 4 8) -> mixer/D a vector per layer
MatrixRule linen maxtext: mixer/(D 4 3, A_log 4 3 8) -> mixer/D a vector per layer
sinks 3 4, layer_scalar 3 2, resid_lambdas 3 2 -> sinks sinks, layer_scalar layer_scalar,
    resid_lambdas resid_lambdas
# Depthwise convolutions
MatrixRule nnx linen equinox: mamba/(conv1d/kernel 4 1 64, A_log 4) ->
    mamba/conv1d/kernel depthwise convolution
MatrixRule nnx linen equinox: delta/(conv1d/weight 64 1 4, dt_bias 4) ->
    delta/conv1d/weight depthwise convolution
MatrixRule nnx linen equinox: block1a_dwconv/kernel 3 3 64 1 ->
    block1a_dwconv/kernel depthwise convolution
"""


@pytest.mark.parametrize("row", rows(DECIDED))
def test_what_lies_beside_decides(row: Row) -> None:
    assert_decided(row)


ASKED = """
# The name of a transposed convolution without a bias, or with one that fits two axes
MatrixRule FLAX: ConvTranspose_0/(kernel 3 3 12 12, bias 12) -> ConvTranspose_0/kernel 012.3 013.2
MatrixRule: conv_transpose/weight 64 32 2 2 -> conv_transpose/weight 123.0 023.1
MatrixRule: conv_transpose/weight 6 64 32 2 2 -> conv_transpose/weight 134.2 234.1
MatrixRule: conv_transpose/(kernel 6 2 2 32 32, bias 6 32) -> conv_transpose/kernel 123.4 124.3
# Experts, relations, the matrices of a graph or of frequencies may share a bias.
ALL: {experts,RGCNConv_0,relations}/(kernel 4 12 36, bias 36) ->
    {experts,RGCNConv_0,relations}/kernel 1.2 01.2
ALL: RGCNConv_0/(weight 4 12 36, bias 36) -> RGCNConv_0/weight 1.2 01.2
ALL: experts/up/(kernel 4 36 12, bias 36) -> experts/up/kernel 2.1 02.1
ALL: experts/up/(kernel 3 4 12 36, bias 36) -> experts/up/kernel 2.3 012.3
ALL: fno/SpectralConv1d_0/(weight 16 32 8, bias 32) -> fno/SpectralConv1d_0/weight 0.1
# A bias that contradicts the siblings: convolutions of queries, or a bias of each head
ALL: attention/{query,key,value,out}/(kernel 3 64 64, bias 64) -> attention/query/kernel 1.02 01.2
ALL: attention/{query,key,value}/(kernel 64 12 32, bias 12), attention/out/kernel 12 32 64 ->
    attention/{query,key,value}/kernel 0.12 02.1
# Layers on axis 1 without a norm or a bias
MatrixRule FLAX: l/Conv_0/kernel 3 12 3 8 16 -> l/Conv_0/kernel 0123.4 023.4
MatrixRule equinox: l/conv/weight 16 12 8 3 3 -> l/conv/weight 1234.0 234.0
MatrixRule equinox: l/conv/weight 12 16 8 3 3 -> l/conv/weight 1234.0 234.1
MatrixRule equinox: l/conv/(weight 16 12 8 3 3, bias 16 12 1 1) -> l/conv/weight 234.0
MatrixRule FLAX: up/(kernel_lora_a 8 3 2, kernel_lora_b 2 3 16) -> up/(kernel_lora_a 0.2 01.2,
    kernel_lora_b 0.2 0.12)
MatrixRule maxtext linen: mlp/(wi_0/kernel 4 64 3 256, wo/kernel 4 256 3 64) ->
    mlp/{wi_0,wo}/kernel 1.3
MatrixRule: l/(q_einsum/w 8 3 20 4, attn_vec_einsum/w 8 3 4 20, norm/scale 20 3) ->
    l/(q_einsum/w 2.03, attn_vec_einsum/w 02.3)
# Stages in front of scanned layers
MatrixRule: l/(attn/query/kernel 2 4 8 2 4, attn/out/kernel 2 4 2 4 8, norm/scale 2 4 8) ->
    l/attn/(query/kernel 2.34, out/kernel 23.4)
# Norms that fit both axes
FLAX maxtext: attention/(query/kernel 64 12 32, out/kernel 32 12 64) ->
    attention/{query,out}/kernel 0.2
FLAX: l/(q_proj/kernel 3 8 8 6, q_proj/bias 3 8 6, norm/scale 3 8) -> l/q_proj/kernel 1.23
MatrixRule: l/(dense/kernel 64 12 64, dense/bias 64 12, norm/scale 64 12) -> l/dense/kernel 0.2
FLAX: attention/(query/kernel 64 12 4 16, out/kernel 4 12 16 64) ->
    attention/(query/kernel 0.23 1.23, out/kernel 02.3 12.3)
equinox: l/up/(weight 3 16 8, bias 3 16) -> l/up/weight 2.1 2.0
maxtext: l/({q,o}_proj/kernel 6 32 32, norm/scale 6 32) -> l/{q,o}_proj/kernel 1.2 0.2
equinox: l/conv/(weight 3 32 16 5, bias 3 32 1) -> l/conv/weight 23.1 23.0
# Heads first
MatrixRule keras: attention/({query,key,value}/kernel 8 8 4, attention_output/kernel 8 4 8) ->
    attention/{query,key,value}/kernel 1.02 0.12
MatrixRule linen: a/(q/kernel 4 20 8, q/bias 4 8, o/kernel 4 8 20) -> a/q/kernel 1.02 1.2
MatrixRule linen: attn/(W_Q 3 4 20 8, W_O 3 4 8 20) -> attn/(W_Q 2.13, W_O 12.3)
MatrixRule FLAX: attn/W_Q 3 4 20 8 -> attn/W_Q 2.13
# An axis of size 1 for the inputs, of layers (`(L, 1, out)`) or in KerasHub
MatrixRule keras: attention/query/(kernel 8 20 4, bias 8 1 4) -> attention/query/kernel 1.02 1.2
# Experts either way round
MatrixRule: mlp/(experts/gate_up_proj 4 8 32, experts/down_proj 4 16 8, router/weight 4 8) ->
    mlp/experts/{gate_up_proj,down_proj} 1.2
MatrixRule: mlp/(experts/gate_up_proj 4 32 8, experts/down_proj 4 8 16, router/weight 4 8) ->
    mlp/experts/{gate_up_proj,down_proj} 2.1
# Convolutions with a matrix for each frequency or relation, and what is not a convolution
ALL: fno/SpectralConv2d_0/weights1 16 32 8 8 -> fno/SpectralConv2d_0/weights1 0.1
ALL: fno/spectral_conv/real_weights 16 32 8 -> fno/spectral_conv/real_weights 0.1
MatrixRule FLAX keras equinox torch_layout: SpectralConv1d_0/weight 16 32 8 ->
    SpectralConv1d_0/weight 0.1 1.0
keras: spectral_conv/kernel 16 32 8 8 -> spectral_conv/kernel 0.1
# Layers of a convolution, or of what is called so
MatrixRule: l/(pointwise_conv/kernel 5 8 16, norm/scale 5 8) -> l/pointwise_conv/kernel 01.2 1.2
MatrixRule: l/(Conv_0/kernel 3 3 8 16, norm/scale 3 8) -> l/Conv_0/kernel 012.3 12.3
equinox torch_layout: experts/up/weight 2 8 32 16 -> experts/up/weight 3.2
torch_layout: experts/up_proj 2 8 32 16 -> experts/up_proj 3.2 2.3
# Layers of one output each, or a convolution
equinox: critics/(weight 2 1 16, bias 2 1) -> critics/weight 2.1 12.0
# A bias for each place of the output
MatrixRule FLAX: Conv_0/(kernel 3 3 4 12, bias 3 3 12) -> Conv_0/kernel 012.3 2.3
MatrixRule: l/(up/kernel 8 16 3, down/kernel 16 8 3, norm/scale 8 3) -> l/{up,down}/kernel 0.1
MatrixRule linen: Conv_0/kernel 2 4 5 6 7 -> Conv_0/kernel 23.4
MatrixRule: q_einsum/w 8 20 4, attn_vec_einsum/w 8 4 20 -> q_einsum/w 1.02, attn_vec_einsum/w 01.2
# The right one is offered.
MatrixRule haiku keras: ConvLocal_0/(kernel 8 8 36 12, bias 12) -> ConvLocal_0/kernel 2.3
MatrixRule: B 12 20 2, C 20 12 2 -> {B,C} 1.0
# Gates beside the layer that they open, in one kernel, and experts in the middle
MatrixRule FLAX: moe/(router/kernel 32 8, experts/kernel 32 8 64) -> moe/experts/kernel 0.2
# A bias that layers on axis 1 fit by chance
MatrixRule FLAX maxtext: DenseGeneral_0/(kernel 16 8 8, bias 8 8) -> DenseGeneral_0/kernel 0.12
# Layers of what is asked without layers
MatrixRule: B 6 12 20 2, C 6 20 12 2 -> {B,C} 2.1
# A pattern covers kernels of one shape. A catch-all asks for three axes without evidence.
equinox: block/up/weight 16 8 3 -> block/up/weight 2.1 12.0
"""


@pytest.mark.parametrize("row", rows(ASKED))
def test_what_nothing_decides_is_asked(row: Row) -> None:
    """The right readings are offered, beside others."""
    for rule in row.rules:
        found = offered(row.shapes, rule)
        for path, axes in row.treatments.items():
            assert {*axes} <= {*found[path]}, (rule.family, path)


FIRST = """
# That of the siblings, of the layer's name, and of kernels that have no pattern: the reading of a
# 1×1 one makes nine matrices of each 3×3 one.
mlp/(gating_einsum 2 16 8, linear 16 8) -> mlp/gating_einsum 2.1
mlp/(gating_einsum 2 8 16, linear 16 8) -> mlp/gating_einsum 1.2
mlp/(gating_einsum 5 2 16 8, linear 5 16 8) -> mlp/gating_einsum 3.2
out_einsum/w 8 4 20 -> out_einsum/w 01.2
"""


@pytest.mark.parametrize("row", rows(FIRST))
def test_the_likeliest_reading_is_offered_first(row: Row) -> None:
    found = offered(row.shapes)
    assert {path: found[path][:1] for path in row.treatments} == row.treatments
