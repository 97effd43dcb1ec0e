"""The sample of cells that a run without CURVAX_ALL_CELLS takes."""

import itertools
from collections import Counter

import pytest

from tests import cells as sampler
from tests.cells import cells


def test_a_sample_has_every_value_and_the_samples_of_a_file_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "ALL_CELLS", False)
    monkeypatch.setattr(sampler, "COUNT", Counter())
    methods, policies = "abcdefg", ("every", "foam")
    pairs = cells(methods, policies, of=2)
    assert len(pairs) == 7
    assert sorted(method for method, _ in pairs) == [*methods]
    assert {len([x for x in pairs if x[1] == policy]) for policy in policies} == {3, 4}
    thirds = [cells(methods, of=3) for _ in range(7)]
    assert sorted(itertools.chain(*thirds)) == sorted(3 * methods)
    assert len({*map(tuple, thirds)}) > 2
    monkeypatch.setattr(sampler, "ALL_CELLS", True)
    assert len(cells(methods, policies, of=2)) == 14
