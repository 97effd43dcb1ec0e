"""Directions of groups of heads: `column_heads` counts matrices, so half of them makes pairs."""

import functools

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference.head_groups import on_head_groups
from tests.reference.muon import muon

HEADS, AMPLIFIED = 4, 3.4445**5


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("split", [True, False])
def test_heads_in_groups_follow_the_transcription(group: int, split: bool) -> None:
    """Of kernels with an axis of heads, and of kernels in which heads are columns."""
    draw = np.random.default_rng(0)
    gradients = [draw.standard_normal((6, HEADS * 3)) for _ in range(8)]
    columns = (1, 2) if split else 1
    optimizer = curvax.assemble(
        curvax.scale_by_muon(),
        1.0,
        weight_dimension_numbers={
            "*query/kernel": curvax.MatrixAxes(0, columns, column_heads=HEADS // group)
        },
    )
    shape = (6, HEADS, 3) if split else (6, HEADS * 3)
    trees = [{"query": {"kernel": g.reshape(shape)}} for g in gradients]
    with jax.enable_x64(True):
        found, _ = run_scanned(optimizer, trees)
    on_groups = functools.partial(on_head_groups, muon, heads=HEADS, group=group, axis=1)
    for x, expected in zip(found, on_groups(gradients), strict=True):
        own = -x["query"]["kernel"].reshape(6, -1)
        assert_close(own, expected, condition=AMPLIFIED)
