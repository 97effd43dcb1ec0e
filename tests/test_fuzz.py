"""A small, seeded set of the examples of `benchmarks/fuzz.py`, which draws ten thousand."""

from __future__ import annotations

import hypothesis
from fuzzing import SHAPES, Example, check, examples
from registry import REGISTRY, Row, every_optimizer

EXAMPLES = 13  # for each method: more than 200


@every_optimizer
def test_nothing_is_found(row: Row) -> None:
    shape = SHAPES[7 * REGISTRY.index(row) % len(SHAPES)]
    ran = []

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @hypothesis.given(examples())
    def holds(example: Example) -> None:
        check(row, shape, example)
        ran.append(example)

    holds()
    assert len(ran) >= EXAMPLES
