"""Adapters from two sets of weights, against the transcription."""

import jax
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close
from tests.reference.sumo import extract_adapter


def _trees():
    """Parameters before and after, in float32: two singular values of a change exceed 0.3 of it."""
    generator = np.random.default_rng(0)
    before, after = {}, {}
    for name, shape in {"query": (6, 3, 3), "up": (6, 9), "down": (9, 6)}.items():
        kernel = generator.standard_normal(shape)
        u, _, vt = np.linalg.svd(generator.standard_normal((6, 9)), full_matrices=False)
        change = (u * 0.5 ** np.arange(6)) @ vt
        change = change.T if name == "down" else change.reshape(shape)
        before[name] = {"kernel": kernel, "bias": np.zeros(shape[1:])}
        after[name] = {"kernel": kernel + change, "bias": np.ones(shape[1:])}
    return jax.tree.map(np.float32, (before, after))


ALL = ("query", "up", "down")


@pytest.mark.parametrize(
    ("options", "names", "rank"),
    cells([({"rank": 2}, ALL, 2), ({"rank": 99}, ALL[1:2], 6), ({"tolerance": 0.3}, ALL, 2)], of=3),
    ids=str,
)
def test_factors_are_the_transcriptions(options, names, rank):
    before, after = ({name: tree[name] for name in names} for tree in _trees())
    adapters = curvax.extract_adapter(before, after, **options)
    assert set(adapters) == {f"{name}/kernel" for name in names}
    for name, adapter in adapters.items():
        key = name.split("/")[0]
        kernels = (np.asarray(tree[key]["kernel"], np.float64) for tree in (before, after))
        old, new = (x.reshape(x.shape[0], -1) for x in kernels)
        a, b, error = extract_adapter(old, new, **options)
        assert a.shape[1] == rank
        assert_close(np.asarray(adapter.a)[0], a, 64, condition=1e2, eps=2.0**-23)
        assert_close(np.asarray(adapter.b)[0], b, 64, condition=1e2, eps=2.0**-23)
        found = float(np.asarray(adapter.error)[0])
        assert abs(found - error / np.linalg.norm(new - old)) < 1e-5


def test_nothing_changed_gives_zero_factors_and_no_error():
    before = {"up": _trees()[0]["up"]}
    adapter = curvax.extract_adapter(before, before, tolerance=0.1)["up/kernel"]
    assert not any(np.asarray(x).any() for x in adapter)


def test_bad_arguments_are_named():
    before, after = _trees()
    for options in ({}, {"rank": 2, "tolerance": 0.1}):
        with pytest.raises(ValueError, match="give rank or tolerance"):
            curvax.extract_adapter(before, after, **options)
    with pytest.raises(ValueError, match="after must be a tree like before"):
        curvax.extract_adapter(before, {"up": after["up"]}, rank=1)
    after["up"]["kernel"][0, 0] = np.inf
    with pytest.raises(ValueError, match="change of the parameter 'up/kernel' must be finite"):
        curvax.extract_adapter(before, after, rank=1)
