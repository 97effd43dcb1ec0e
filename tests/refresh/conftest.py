"""A count of the decompositions that are executed.

An eigendecomposition is counted where it runs: what the library calls for one is replaced by what
calls back from the compiled program, so that a branch that is not taken does not count. JAX caches
the branches for a platform by their functions: each test has its own.
"""

import collections

import jax
import pytest

from curvax.transforms.linalg import _inverse_root, _turns


@pytest.fixture
def executed(monkeypatch):
    """The orders of all eigendecompositions that have been executed, by their number."""
    log: collections.Counter[int] = collections.Counter()

    def logged(plain):
        def decompose(*args):
            a = args[-1]
            # Handing over an entry makes each matrix of a vmap call back for itself.
            jax.debug.callback(lambda _, order=a.shape[-1]: log.update([order]), a[0, 0])
            return plain(*args)

        return decompose

    for module, name in ((_turns, "by_eigh"), (_inverse_root, "eigh")):  # of bases, stored roots
        monkeypatch.setattr(module, name, logged(getattr(module, name)))
    return log
