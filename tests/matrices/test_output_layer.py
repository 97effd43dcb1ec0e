"""The output layer is found by its name and place, never by its shape alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import curvax

Shapes = dict[str, tuple[int, ...]]


def found(shapes: Shapes) -> set[str]:
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    treated = curvax.MatrixRule(output_layer="auto")(params)
    names = {name for name, treatment in treated.items() if treatment == "output layer"}
    assert names == curvax.find_output_layer(params)
    return names


@pytest.mark.parametrize(
    ("shapes", "output"),
    [
        ({"lm_head": (8, 32)}, "lm_head"),
        ({"embed_out/weight": (32, 8)}, "embed_out/weight"),
        ({"decoder/logits_dense/kernel": (8, 32)}, "decoder/logits_dense/kernel"),
        ({"lm_head/linear/kernel": (8, 32)}, "lm_head/linear/kernel"),
        ({"unembed": (8, 32)}, "unembed"),
        ({"model/embed/embedding": (32, 8), "model/decode/kernel": (8, 32)}, "model/decode/kernel"),
        ({"wte": (32, 8), "decode": (8, 32), "up": (8, 16)}, None),  # a name that nobody knows
        ({"wte": (32, 8), "out": (8, 32), "up": (8, 16)}, "out"),
        ({"emb/weight": (32, 8), "decode/weight": (32, 8)}, "decode/weight"),
    ],
)
def test_it_is_found(shapes: Shapes, output: str | None) -> None:
    assert found(shapes) == ({output} if output else set())


@pytest.mark.parametrize(
    "shapes",
    [
        # Positions are not tokens.
        {"pos/embedding": (32, 8), "up/kernel": (8, 32)},
        {"pos_embed": (32, 8), "up/kernel": (8, 32)},
        {"wpe/embedding": (32, 8), "up/kernel": (8, 32)},
        # A vocabulary as large as the width, or as the inner width.
        {"embed/embedding": (8, 8), **{f"{i}/kernel": (8, 8) for i in range(3)}},
        {"embed/embedding": (32, 8), "up/kernel": (8, 32), "gate/kernel": (8, 32)},
        # Elsewhere.
        {"embed/embedding": (32, 8), "blocks/mlp/up/kernel": (8, 32)},
        {"encoder/embed/embedding": (32, 8), "decoder/up/kernel": (8, 32)},
        # Heads of attention, and what a module of that name has besides.
        {f"attention/head_{i}/kernel": (8, 4) for i in range(2)},
        {"classifier/up/kernel": (8, 32), "classifier/down/kernel": (32, 8)},
    ],
)
def test_others_are_not_taken_for_it(shapes: Shapes) -> None:
    assert found(shapes) == set()
