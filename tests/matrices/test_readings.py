"""Along which axes a parameter is a matrix: layouts, attention, convolutions, stacks."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms.matrices._form import matrix_forms
from tests.cells import cells
from tests.shared.rules import Row, abstract, offered, rows, treated


def assert_decided(row: Row, *, guess: bool = False) -> None:
    """Reasons are compared without parentheses, which have a meaning in rows."""
    for rule in row.rules:
        found = treated(row.shapes, rule)
        for path, axes in row.treatments.items():
            own = re.sub("[()]", "", x) if isinstance(x := found[path], str) else x
            assert [own] == axes, (rule.family, path)
            assert getattr(x, "is_guess", False) == guess, (rule.family, path)


DECIDED = """
# Attention
# By the siblings, without a bias.
query/kernel 12 4 8, {key,value}/kernel 7 4 8, out/kernel 4 8 20 -> {query,key,value}/kernel 0.12,
    out/kernel 01.2
{query,key,value}/kernel 12 4 8, out/kernel 32 12 -> {query,key,value}/kernel 0.12, out/kernel 0.1
wq 12 4 8, wk 12 1 8, wo 4 8 12 -> {wq,wk} 0.12, wo 01.2
# By the size: features are heads × head dimension.
query/kernel 32 4 8, key/kernel 32 2 8 -> {query,key}/kernel 0.12
out/kernel 4 8 32 -> out/kernel 01.2
# Factors of LoRA
o/(lora_a/kernel 4 8 2, lora_b/kernel 2 32) -> o/lora_a/kernel 01.2
up/kernel_lora_a 32 2 -> up/kernel_lora_a 0.1
down/w_lora_b 2 32 -> down/w_lora_b 0.1
# A bias of outputs
0/(kernel 3 3 128 128, bias 128) -> 0/kernel 012.3
out_proj/(kernel 1 1 4 8, bias 8) -> out_proj/kernel 012.3
q_proj/(kernel 1 1 4 8, bias 8) -> q_proj/kernel 012.3
# Two axes
# A bias fits one end.
linear/(weight 32 8, bias 32) -> linear/weight 1.0
w1 32 8, b1 32 -> w1 1.0
in_proj_weight 8 24, in_proj_bias 24 -> in_proj_weight 0.1
# It fits both or none: the name decides.
linear/(weight 8 8, bias 8) -> linear/weight 1.0
linear/(kernel 8 8, bias 8) -> linear/kernel 0.1
linear/(weight 32 8, bias 5) -> linear/weight 1.0
# Convolutions
conv1/(weight 64 3 1 7, bias 64 1 1) -> conv1/weight 123.0
conv1/(weight 8 8 3 3, bias 8) -> conv1/weight 123.0
patch_embed/kernel 16 16 3 8 -> patch_embed/kernel 012.3
depthwise/kernel 3 3 1 8 -> depthwise/kernel depthwise convolution
patch_embed/proj/kernel 16 16 3 8 -> patch_embed/proj/kernel 012.3
embeddings/patch_embeddings/projection/kernel 16 16 3 8 ->
    embeddings/patch_embeddings/projection/kernel 012.3
"""


@pytest.mark.parametrize("row", rows(DECIDED))
def test_what_the_rule_decides(row: Row) -> None:
    assert_decided(row)


GUESSED = """
# Two axes of a name that nobody knows, or of a `weight` that belongs to no layer: Gemma 3's
# projector, `(in, out)`, is called so in PyTorch too.
{0,0/0,a,mixing,blocks/3,projector,normal,B,prototypes} 3 4 ->
    {0,0/0,a,mixing,blocks/3,projector,normal,B,prototypes} 0.1
{projector/mm_input_projection_weight,mixture/log_weight,moe/gate_weight} 3 4 ->
    {projector/mm_input_projection_weight,mixture/log_weight,moe/gate_weight} 1.0
kernel/real 3 4 -> kernel/real 0.1
moe/{gate_einsum,gate_linear,scale_fc1} 8 32 -> moe/{gate_einsum,gate_linear,scale_fc1} 0.1
lora/(a 8 2, b 2 8) -> lora/{a,b} 0.1
block/(D 3 4, skip 3 7, norm/scale 32) -> block/{D,skip} 0.1
MatrixRule nnx: shared/pytree/0/weight 100 8 -> shared/pytree/0/weight 1.0
# What may be a depthwise convolution
gray/Conv_0/kernel 3 3 1 8 -> gray/Conv_0/kernel 012.3
MatrixRule nnx: layers/0/(kernel 3 3 1 64, bias 64) -> layers/0/kernel 012.3
linen: l/(conv_1d/w 12 4 64, conv_1d/b 12 64, norm/scale 12 32) -> l/conv_1d/w 1.2
"""


@pytest.mark.parametrize("row", rows(GUESSED))
def test_what_the_rule_guesses(row: Row) -> None:
    """And no guess of what is selected, or specified."""
    assert_decided(row, guess=True)
    for name, (axes,) in row.treatments.items():
        for given in ({"matrices": name}, {"weight_dimension_numbers": {name: axes}}):
            found = dataclasses.replace(row.rules[0], **given)(abstract(row.shapes))[name]
            assert found == axes and not found.is_guess


ASKED = """
# Attention
out/kernel 12 64 64 -> out/kernel 01.2 1.2 0.2 0.12 2.01 12.0
# Siblings say that these are layers, or that heads come first.
{query,key,value,out}/kernel 12 64 64 -> {key,query,value}/kernel 1.2 1.02, out/kernel 01.2 1.2
query/(kernel 3 8 8, bias 3 8) -> query/kernel 1.2 1.02
key/(kernel 3 8 8, bias 3 8) -> key/kernel 1.2 1.02
out/(kernel 3 8 8, bias 3 8) -> out/kernel 1.2
# They fit both.
query/kernel 8 8 2, out/kernel 8 2 8 -> out/kernel 01.2 1.2, query/kernel 0.12 1.2 1.02
query/kernel 3 12 4 8 -> query/kernel 1.23 0.23 2.13
# Convolutions
conv/kernel 12 3 3 8 8 -> conv/kernel 0123.4 123.4 23.4
conv/kernel 12 3 4 8 -> conv/kernel 012.3 12.3 02.3
conv/kernel 64 3 7 7 -> conv/kernel 012.3 123.0 12.3 02.3
conv/weight 3 3 4 8 -> conv/weight 123.0 012.3 23.1 23.0
conv/(kernel 12 3 3 4 8, bias 12 8) -> conv/kernel 123.4
# Stacks of layers
mlp/(kernel 12 4 8, bias 12 8) -> mlp/kernel 1.2
mlp/(kernel 12 4 8, bias 4 8) -> mlp/kernel 0.12 0.2
mlp/(kernel 8 8 4, bias 8 4) -> mlp/kernel 1.2 0.12
mlp/kernel 2 12 4 8 -> mlp/kernel 2.3 012.3 1.23 12.3 0.23 02.3
layers/0/weight 8 3 7 7 -> layers/0/weight 123.0 3.2
mlp/kernel 2 2 12 4 8 -> mlp/kernel 3.4
mlp/(kernel 3 8 1, bias 3 1) -> mlp/kernel 1.2
mlp/(weight 3 1 8, bias 3 1) -> mlp/weight 2.1 2.0 2.01
conv/(kernel 3 5 4 1, bias 3 1) -> conv/kernel 12.3
foo 12 4 8 -> foo 1.2 0.2 01.2 0.12 2.01 12.0
# The other layer of an MLP has the same experts and layers.
{wi_0,wi_1} 5 32 16, wo 5 16 32 -> {wi_*,wo} 1.2
wi_0 5 3 32 16, wo 5 3 16 32 -> {wi_0,wo} 2.3
wi/kernel 32 3 16, wo/kernel 16 3 32 -> {wi,wo}/kernel 0.2
# A router, and both factors of LoRA in stacked layers
gate/kernel 32 5, experts/w 5 32 16 -> experts/w 1.2
lora_a 3 32 2, lora_b 3 2 16 -> {lora_a,lora_b} 1.2
lora_a 2 32 2, lora_b 2 2 16 -> lora_a 01.2 1.2, lora_b 0.12 1.2
# Gemma's heads come first.
q_einsum/w 4 32 8 -> q_einsum/w 1.02 1.2 0.2 01.2 0.12 2.01 12.0
qkv_einsum/w 3 4 32 8 -> qkv_einsum/w 2.13 2.3 012.3 1.23 12.3 0.23 02.3
"""


@pytest.mark.parametrize("row", rows(ASKED))
def test_what_the_rule_asks_with_all_that_evidence_leaves(row: Row) -> None:
    assert offered(row.shapes) == row.treatments


def test_rows_are_read_as_written() -> None:
    (param,) = rows("haiku: a/(b/c 2 3, {d,e} 4) ->\n    a/{d,e} 01.2 0.1/3, a/b/c b of a")
    rules, shapes, treatments = param.values[0]
    both = [MatrixAxes((0, 1), 2), MatrixAxes(0, 1, column_heads=3)]
    assert rules == (curvax.rules.haiku,)
    assert shapes == {"a/b/c": (2, 3), "a/d": (4,), "a/e": (4,)}
    assert treatments == {"a/d": both, "a/e": both, "a/b/c": ["b of a"]}


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
    assert pasted["block_10/wq"] == MatrixAxes(0, (1, 2)) and pasted[
        "block_7/mlp/kernel"
    ] == MatrixAxes(0, 1)


SHAPES_OF_ALL_RANKS = [(), (3,), (3, 4), (4, 4), (2, 3, 4), (3, 3, 3), (1, 1, 5), (2, 3, 1, 4)]
SHAPES_OF_ALL_RANKS += [(2, 2, 2, 2), (2, 3, 4, 5, 6), (2, 2, 2, 2, 2, 2)]
LAYER_NAMES = ("mlp", "conv", "query", "key", "out", "embed", "norm", "lm_head")


@pytest.mark.parametrize(
    ("kernel", "matrices"), cells(["kernel", "weight", "w", "foo"], [None, "all"], of=2)
)
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


def test_a_bias_tells_inside_of_the_routing_too() -> None:
    """There it is a hole, for it goes to AdamW; every other method then swaps its sides."""
    tree = {"c_fc": {"weight": jnp.eye(8, 32), "bias": jnp.ones(32)}}
    query = {"query": {"kernel": jnp.ones((12, 4, 4)), "bias": jnp.ones((4, 4))}}
    for params, matrix in ((tree, "8×32"), (query, "12×16")):
        optimizer = curvax.muon(0.1)
        assert f"1 matrix {matrix} in" in curvax.summarize(optimizer, params)
        updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
