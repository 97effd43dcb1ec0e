"""A count of the decompositions that are executed.

An eigendecomposition is counted where it runs: the library's `eigh` is replaced by one that calls
back from the compiled program, so that a branch that is not taken does not count.
"""

import collections

import jax
import pytest

from curvax.transforms.kronecker import _factor
from curvax.transforms.linalg import _inverse_root


@pytest.fixture
def executed(monkeypatch):
    """The orders of all eigendecompositions that have been executed, by their number."""
    log: collections.Counter[int] = collections.Counter()
    plain = _inverse_root.eigh

    def logged(a):
        # Handing over an entry makes each matrix of a vmap call back for itself.
        jax.debug.callback(lambda _, order=a.shape[-1]: log.update([order]), a[0, 0])
        return plain(a)

    monkeypatch.setattr(_inverse_root, "eigh", logged)
    monkeypatch.setattr(_factor, "eigh", logged)
    return log
