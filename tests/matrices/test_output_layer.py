"""The output layer is found by its name and place, never by its shape alone."""

import pytest

import curvax
from tests.shared.rules import Shapes, abstract, treated


def found(shapes: Shapes) -> set[str]:
    treatments = treated(shapes, output_layer="auto")
    names = {name for name, treatment in treatments.items() if treatment == "output layer"}
    assert names == curvax.find_output_layer(abstract(shapes))
    return names


@pytest.mark.parametrize(
    ("shapes", "output"),
    [
        ({"lm_head": (8, 32)}, "lm_head"),
        ({"lm_head/kernel": (8, 32), "mlp/kernel": (8, 8)}, "lm_head/kernel"),
        ({"readout_0/weight": (8, 32), "mlp/weight": (8, 8)}, "readout_0/weight"),
        ({"embed/embedding": (32, 8), "dec/kernel": (8, 32), "mlp/kernel": (8, 8)}, "dec/kernel"),
        # Both by shape, or both by name, one of them by both: the other one stays a matrix.
        ({"wte/embedding": (32, 8), "up/kernel": (8, 32), "head/kernel": (8, 32)}, "head/kernel"),
        (
            {"embed/embedding": (32, 8), "lm_head/kernel": (8, 32), "head/kernel": (8, 2)},
            "lm_head/kernel",
        ),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, None),
        ({"embed_out/weight": (32, 8)}, "embed_out/weight"),
        ({"decoder/logits_dense/kernel": (8, 32)}, "decoder/logits_dense/kernel"),
        ({"lm_head/linear/kernel": (8, 32)}, "lm_head/linear/kernel"),
        ({"unembed": (8, 32)}, "unembed"),
        ({"model/embed/embedding": (32, 8), "model/decode/kernel": (8, 32)}, "model/decode/kernel"),
        ({"wte": (32, 8), "decode": (8, 32), "up": (8, 16)}, None),  # a name that nobody knows
        ({"wte": (32, 8), "out": (8, 32), "up": (8, 16)}, "out"),
        ({"emb/weight": (32, 8), "decode/weight": (32, 8)}, "decode/weight"),
        # Positions are not tokens.
        ({"pos/embedding": (32, 8), "up/kernel": (8, 32)}, None),
        ({"pos_embed": (32, 8), "up/kernel": (8, 32)}, None),
        ({"wpe/embedding": (32, 8), "up/kernel": (8, 32)}, None),
        # A vocabulary as large as the width, or as the inner width.
        ({"embed/embedding": (8, 8), **{f"{i}/kernel": (8, 8) for i in range(3)}}, None),
        ({"embed/embedding": (32, 8), "up/kernel": (8, 32), "gate/kernel": (8, 32)}, None),
        # Elsewhere.
        ({"embed/embedding": (32, 8), "blocks/mlp/up/kernel": (8, 32)}, None),
        ({"encoder/embed/embedding": (32, 8), "decoder/up/kernel": (8, 32)}, None),
        # Heads of attention, and what a module of that name has besides.
        ({f"attention/head_{i}/kernel": (8, 4) for i in range(2)}, None),
        ({"classifier/up/kernel": (8, 32), "classifier/down/kernel": (32, 8)}, None),
    ],
)
def test_it_is_found_and_others_are_not_taken_for_it(shapes: Shapes, output: str | None) -> None:
    assert found(shapes) == ({output} if output else set())
