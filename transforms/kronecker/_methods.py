"""Ways to renew an eigenbasis: the values of `method=` of `in_eigenbasis`, and their names."""

from __future__ import annotations

import dataclasses

from .._validate import Value, check_positive_int


class BasisMethod(Value):
    """The type of `method=` of `in_eigenbasis`."""


@dataclasses.dataclass(frozen=True)
class Eigh(BasisMethod):
    """See `eigh`."""


@dataclasses.dataclass(frozen=True)
class Qr(BasisMethod):
    """See `qr`."""

    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Tracked(BasisMethod):
    """See `tracked`."""

    rotations: int = 16


def eigh() -> Eigh:
    """Decomposes the statistic at each refresh."""
    return Eigh()


def qr(steps: int = 1) -> Qr:
    """Decomposes the statistic at the first refresh, then iterates from the last basis.

    Args:
      steps: the most steps of orthogonal iteration in a refresh. After each step the policy is
        asked again, and the refresh ends when it asks for none, as in the QR algorithm from a warm
        start (Eschenhagen et al., arXiv:2506.03595). More than one step needs a policy that
        examines the bases, such as `policies.diagonal_residual`; `every` takes one.

    Raises:
      ValueError: if `steps` is not a positive integer.
    """
    check_positive_int("steps", steps)
    return Qr(steps)


def tracked(rotations: int = 16) -> Tracked:
    r"""Follows the statistic by products: rotates the basis a little at each refresh.

    The state has the statistic in the basis, $H = U^\top L U$, in place of $L$: it averages the
    Gram matrix of the rotated gradient. The first refresh decomposes it; each later one rotates
    $U$, $H$ and the moments by as many rotations as the change asks for, of four to six products of
    the factor's order each (`linalg/_tracking.py` has the formulas): one or two where the basis is
    refreshed at every step, two to four at every tenth. It needs no QR decomposition and sorts
    nothing: columns keep their eigenvalues. So it takes a refresh at every step on hardware that is
    made for products: GPUs and TPUs. On CPUs a decomposition costs as much as 14 products.

    Args:
      rotations: the most rotations in a refresh. The first refreshes, of an average that is half
        new, take 5 to 16.

    Raises:
      ValueError: if `rotations` is not a positive integer.
    """
    check_positive_int("rotations", rotations)
    return Tracked(rotations)


METHODS = {"eigh": Eigh(), "qr": Qr(), "tracked": Tracked()}
"""The plain methods, by name."""
