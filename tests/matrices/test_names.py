"""Leaves that families of models name: what is a matrix, what is not, and what is a guess."""

import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixAxes
from tests.shared.rules import abstract, treated

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


def test_tables_biases_scales_and_gates_are_not_matrices() -> None:
    for shape in ((3, 4), (3, 3), (2, 3, 4), (1, 3, 4)):
        for name in TABLES.split():
            assert treated({name: shape}) == {name: "embedding"}
        for name in VECTORS.split():
            *_, layer, last = ["", *name.split("/")]
            assert treated({name: shape}) == {name: f"{last} of {layer}" if layer else last}
    assert treated({"log_std": (1, 2)}) == {"log_std": "vector"}


def test_kernels_are_matrices_and_a_weight_has_its_output_axis_first() -> None:
    for shape in ((3, 4), (4, 4), (1, 4)):
        for name in MATRICES.split():
            assert treated({name: shape}) == {name: MatrixAxes(rows=0, columns=1)}
        for name in TORCH.split():
            assert treated({name: shape}) == {name: MatrixAxes(rows=1, columns=0)}


def test_what_projects_to_a_gate_is_a_matrix() -> None:
    for name in ("gate_weight", "gate_einsum", "gate_linear", "scale_fc1", "decay_w1"):
        ends = (1, 0) if name == "gate_weight" else (0, 1)
        assert treated({f"moe/{name}": (8, 32)}) == {f"moe/{name}": MatrixAxes(*ends)}
    for name in ("gate", "scale_bias", "linear_scale"):
        assert treated({f"moe/{name}": (8, 32)}) == {f"moe/{name}": f"{name} of moe"}


def test_a_weight_that_belongs_to_no_layer_is_a_guess() -> None:
    """Gemma 3's projector, `(in, out)`, is called so in PyTorch too."""
    names = {"projector/mm_input_projection_weight": True, "attn/in_proj_weight": False}
    names |= {"mixture/log_weight": True}
    for name, guess in (names | {"weight_ih": False, "linear/weight": False}).items():
        found = treated({name: (3, 4)})[name]
        assert found == MatrixAxes(rows=1, columns=0) and found.is_guess == guess


def test_two_axes_of_an_unknown_name_are_a_guess() -> None:
    said = MatrixAxes(rows=1, columns=0)
    for name in UNKNOWN.split():
        found = treated({name: (3, 4)})
        assert found == {name: MatrixAxes(rows=0, columns=1)} and found[name].is_guess
        assert treated({name: (1, 4)}) == {name: "vector"}  # one row has no direction
        assert treated({name: (3, 4)}, matrices=name) == found
        assert not treated({name: (3, 4)}, matrices=name)[name].is_guess
        assert treated({name: (3, 4)}, weight_dimension_numbers={name: said}) == {name: said}


def test_a_b_beside_an_a_is_not_a_bias() -> None:
    shapes = {"lora/a": (8, 2), "lora/b": (2, 8), "linear/w": (4, 4), "linear/b": (3, 4)}
    found = treated(shapes)
    assert found["lora/b"] == MatrixAxes(0, 1) and found["linear/b"] == "b of linear"


def test_summaries_mark_guesses_and_nothing_else_knows_them() -> None:
    guessed, named = ({name: jnp.ones((3, 4))} for name in ("foo", "foo_kernel"))
    line = "1 matrix 3×4 in stack 3x4"
    assert f"| {line}; a guess from its two axes |" in curvax.summarize(curvax.muon(0.1), guessed)
    assert f"| {line} |" in curvax.summarize(curvax.muon(0.1), named)
    view = curvax.on_matrices(curvax.momentum())
    assert "a guess" in curvax.summarize(view, guessed)
    said = curvax.muon(0.1, matrices="foo")
    assert "a guess" not in curvax.summarize(said, guessed)
    described = (curvax.describe_state(o, guessed) for o in (curvax.muon(0.1), said))
    assert next(described) == next(described)


@pytest.mark.parametrize(
    "joined",
    [
        *("{}.{}", "['{}']['{}']", ".{}.{}", "('{}', '{}')", "{}:{}", "{}/{}:0", "{}|{}"),
        *("{}__{}", "(DictKey(key='{}'), GetAttrKey(name='{}'))"),
    ],
)
def test_names_are_read_whatever_is_between_them(joined: str) -> None:
    tree = {"norm/scale": (3, 8), "embed/embedding": (9, 8), "up/kernel": (8, 4), "up/bias": (8,)}
    names = {name: joined.format(*name.split("/")) for name in tree}
    expected = {names[name]: treatment for name, treatment in treated(tree).items()}
    assert treated({names[name]: shape for name, shape in tree.items()}) == expected


def test_names_in_dots_and_parts_of_complex_parameters() -> None:
    shapes = {"model.layers.0.mlp.gate_proj.weight": (16, 8), "lm_head.weight": (9, 8)}
    tables = {"model.embed_tokens.weight": (9, 8), "model.norms.0.norm.weight": (3, 8)}
    found = treated({**shapes, **tables})
    assert all(found[name] == MatrixAxes(1, 0) and not found[name].is_guess for name in shapes)
    assert list(map(found.get, tables)) == ["embedding", "weight of norm"]
    assert curvax.find_output_layer(abstract({**shapes, **tables})) == {"lm_head.weight"}
    tree = {"norm/scale": (3, 8), "embed/embedding": (9, 8), "up/kernel": (8, 4), "up/bias": (8,)}
    parts = {f"{name}/{part}": x for name, x in tree.items() for part in ("real", "imaginary")}
    whole = treated(tree)
    assert whole["up/kernel"] == MatrixAxes(1, 0)  # as its bias says
    assert treated(parts) == {name: whole[name.rpartition("/")[0]] for name in parts}
    alone = treated({"kernel/real": (3, 4)})
    assert alone["kernel/real"].is_guess  # no part of anything
