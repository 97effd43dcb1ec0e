"""The output layer is found by its name and place, never by its shape alone."""

import pytest

import curvax
from tests.shared.rules import Row, abstract, rows, treated

FOUND = """
lm_head 8 32 -> lm_head
lm_head/kernel 8 32, mlp/kernel 8 8 -> lm_head/kernel
readout_0/weight 8 32, mlp/weight 8 8 -> readout_0/weight
embed/embedding 32 8, dec/kernel 8 32, mlp/kernel 8 8 -> dec/kernel
# Both by shape, or both by name, one of them by both: the other one stays a matrix.
wte/embedding 32 8, {up,head}/kernel 8 32 -> head/kernel
embed/embedding 32 8, lm_head/kernel 8 32, head/kernel 8 2 -> lm_head/kernel
embed_out/weight 32 8 -> embed_out/weight
decoder/logits_dense/kernel 8 32 -> decoder/logits_dense/kernel
lm_head/linear/kernel 8 32 -> lm_head/linear/kernel
unembed 8 32 -> unembed
model/(embed/embedding 32 8, decode/kernel 8 32) -> model/decode/kernel
wte 32 8, out 8 32, up 8 16 -> out
emb/weight 32 8, decode/weight 32 8 -> decode/weight
# None
a/kernel 8 32, b/kernel 8 8 -> none
# A name that nobody knows
wte 32 8, decode 8 32, up 8 16 -> none
# Positions are not tokens.
pos/embedding 32 8, up/kernel 8 32 -> none
pos_embed 32 8, up/kernel 8 32 -> none
wpe/embedding 32 8, up/kernel 8 32 -> none
# A vocabulary as large as the width, or as the inner width
embed/embedding 8 8, {0,1,2}/kernel 8 8 -> none
embed/embedding 32 8, {up,gate}/kernel 8 32 -> none
# Elsewhere
embed/embedding 32 8, blocks/mlp/up/kernel 8 32 -> none
encoder/embed/embedding 32 8, decoder/up/kernel 8 32 -> none
# Heads of attention, and what a module of that name has besides
attention/{head_0,head_1}/kernel 8 4 -> none
classifier/(up/kernel 8 32, down/kernel 32 8) -> none
"""


@pytest.mark.parametrize("row", rows(FOUND))
def test_it_is_found_and_others_are_not_taken_for_it(row: Row) -> None:
    found = treated(row.shapes, output_layer="auto")
    names = {name for name, treatment in found.items() if treatment == "output layer"}
    assert names == curvax.find_output_layer(abstract(row.shapes)) == {*row.treatments} - {"none"}
    assert "output layer" not in treated(row.shapes, output_layer=None).values()
