"""A small, seeded set of the examples of `benchmarks/fuzz.py`, which draws ten thousand."""

from __future__ import annotations

import hypothesis
import pytest

from tests.cases import in_turns
from tests.fuzzing import SHAPES, Example, check, examples
from tests.registry import REGISTRY, Row

EXAMPLES = 13  # for each method: with half of them more than 100


@pytest.mark.weekly
@in_turns(0, of=9)
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
