"""Leaves that families of models name: what is a matrix, what is not, and what is a guess."""

from typing import Any

import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixAxes
from tests.matrices.test_readings import assert_decided
from tests.shared.rules import Row, abstract, rows, treated

TABLES = """
    wte wpe wte/weight tok_emb pos pos_emb pos_embs pos_embedding posemb token_embedding_table
    W_E W_pos emb/weight embed/embeddings embedder/input_embedding embed_tokens/weight embed/w
    tokens/weight
    rel_pos_h relpos_bias/rel_embedding relative_attention_bias/weight
    relative_attention_bias/embedding register_tokens mask_token cls latents codebook
    label_embedder/embedding_table/embedding
"""
VECTORS = """
    linear/b b b1 bq b_in b_Q c_attn/bias attention_bias attnBias relative_position_bias
    in_proj_bias norm/scale gamma norm/beta layer_norm/offset layer_scale ls1/gamma ln_1/weight
    RMSNorm_0/weight bn/w attn_norm norm_weight A_log log_std log_dt attn_gate gate time_decay
    time_mix_k wq_scale weight_g conv1_bias kernel_scale alpha
"""
MATRICES = """
    kernel dense/kernel up/w w W w1 wi wo wq wk wv W_Q W_U wi_0 wq_a wkv_b w_gate w_in
    wi_0/kernel gate_proj q_proj/kernel up_proj out_proj c_attn c_fc fc1 qkv lora_a lora_b
    recurrent_kernel patch_embed/kernel embedding/kernel unembed/kernel norm_mlp/w pos_proj/w
    gate/kernel lm_head linear relative_attention_bias/kernel scale/kernel token_mixer/w
    experts/kernel weights
"""
TORCH = """
    weight linear/weight in_proj_weight weight_ih weight_hh weight_v patch_embed/weight
    token_mixer/weight lm_head/weight embed_out/weight gate/weight pos_proj/weight
"""
UNKNOWN = "0 0/0 a mixing blocks/3 projector normal B prototypes"
OF_MORE_AXES, OF_TWO_AXES = ((3, 4), (3, 3), (2, 3, 4), (1, 3, 4)), ((3, 4), (4, 4), (1, 4))


def named(name: str) -> str:
    """Why a vector of this name is not a matrix."""
    *_, layer, last = ["", *name.split("/")]
    return f"{last} of {layer}" if layer else last


@pytest.mark.parametrize(
    ("names", "shapes", "treatment"),
    [
        (TABLES, OF_MORE_AXES, lambda name: "embedding"),
        (VECTORS, OF_MORE_AXES, named),
        (MATRICES, OF_TWO_AXES, lambda name: MatrixAxes(0, 1)),
        (TORCH, OF_TWO_AXES, lambda name: MatrixAxes(1, 0)),
        (f"{UNKNOWN} log_std", [(1, 4)], lambda name: "vector"),  # one row has no direction
    ],
    ids=["tables", "vectors", "matrices", "torch", "one row"],
)
def test_names_tell(names: str, shapes: Any, treatment: Any) -> None:
    for shape in shapes:
        for name in names.split():
            assert treated({name: shape}) == {name: treatment(name)}


ARRAYS = """
# Levels below the name of an array are none of its name.
embedding/(q 100 8, scale 100 1) -> embedding/(q embedding, scale vector)
up/kernel/qvalue 16 8, query/bias/value 4 8 -> up/kernel/qvalue 0.1, query/bias/value bias of query
wte.embedding.value 9 8, up.kernel.raw_value 8 4, up.bias.value 8 -> wte.embedding.value embedding,
    up.kernel.raw_value 1.0, up.bias.value vector
up.weight.{re,im} 16 8 -> up.weight.{re,im} 1.0
up.kernel.{real,imag} 16 8 -> up.kernel.{real,imag} 0.1
wte/embedding/array 9 8, up/weight/data_array 16 8 -> wte/embedding/array embedding,
    up/weight/data_array 1.0
a/(weight_v 12 4 3 3 3, weight_g 12 1 1 1 1, bias 12) -> a/(weight_v 1234.0, weight_g vector,
    bias vector)
# Of attention
pos/(q 8 8, k 8 8) -> pos/{q,k} 0.1
{attention/value,dense/kernel} 32 64 -> {attention/value,dense/kernel} 0.1
# The parts of complex parameters, with and without a bias that decides
{norm/scale/real,norm/scale/imaginary} 3 8, {embed/embedding/real,embed/embedding/imaginary} 9 8,
    {up/kernel/real,up/kernel/imaginary} 8 4, {up/bias/real,up/bias/imaginary} 8 ->
    {norm/scale/real,norm/scale/imaginary} scale of norm,
    {embed/embedding/real,embed/embedding/imaginary} embedding,
    {up/kernel/real,up/kernel/imaginary} 1.0, {up/bias/real,up/bias/imaginary} vector
"""


@pytest.mark.parametrize("row", rows(ARRAYS))
def test_names_of_arrays_are_found_in_paths(row: Row) -> None:
    assert_decided(row)


@pytest.mark.parametrize(
    "joined",
    [
        *("{}.{}", "['{}']['{}']", ".{}.{}", "('{}', '{}')", "{}:{}", "{}/{}:0", "{}|{}"),
        *("{}__{}", "(DictKey(key='{}'), GetAttrKey(name='{}'))"),
    ],
)
def test_names_are_read_whatever_is_between_them(joined: str) -> None:
    tree = {"norm/scale": (3, 8), "embed/embedding": (9, 8), "up/kernel": (8, 4), "up/bias": (8,)}
    tree |= {"lm_head/weight": (9, 8)}
    names = {name: joined.format(*name.split("/")) for name in tree}
    expected = {names[name]: treatment for name, treatment in treated(tree).items()}
    shapes = {names[name]: shape for name, shape in tree.items()}
    assert treated(shapes) == expected
    assert curvax.find_output_layer(abstract(shapes)) == {names["lm_head/weight"]}


def test_summaries_mark_guesses_and_nothing_else_knows_them() -> None:
    guessed, known = ({name: jnp.ones((3, 4))} for name in ("foo", "foo_kernel"))
    line = "1 matrix 3×4 in stack 3x4"
    assert f"| {line}; a guess from its two axes |" in curvax.summarize(curvax.muon(0.1), guessed)
    assert f"| {line} |" in curvax.summarize(curvax.muon(0.1), known)
    view = curvax.on_matrices(curvax.momentum())
    assert "a guess" in curvax.summarize(view, guessed)
    said = curvax.muon(0.1, matrices="foo")
    assert "a guess" not in curvax.summarize(said, guessed)
    described = (curvax.describe_state(o, guessed) for o in (curvax.muon(0.1), said))
    assert next(described) == next(described)
