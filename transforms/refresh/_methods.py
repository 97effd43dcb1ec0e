"""How a refresh renews a basis or a root of `kronecker`: values of `method=`, and their names."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._validate import OneOf, Value, checked
from ..linalg import _turns
from ..linalg._coefficients import Coefficients, Rows, coefficient_rows
from ..linalg._inverse_root import SOLVERS, Solved, solve_root
from ..linalg._products import HALVES


class RefreshMethod(Value):
    """The type of `method=` of `precondition`: turns a basis, or solves for a root to store."""

    level = "float32"  # of statistics' and refreshes' products by default
    rotates = False  # in programs for GPUs, which then decompose nothing

    def rounds(self, state: Any) -> list[tuple[RefreshMethod, Any]]:
        """The methods of a refresh, and the matrices that each takes: bool (size,), or all."""
        return [(self, True)]


class BasisMethod(RefreshMethod):
    """The type of `method=` of `in_eigenbasis`: turns a basis that a statistic is kept in."""

    @abc.abstractmethod
    def turn(
        self, u: jax.Array, h: jax.Array, again: Callable[[jax.Array], jax.Array], short: float
    ) -> _turns.Turn:
        """The turn of a basis `u (d, d)` with the statistic `h = uᵀ L u`.

        `again(h)` says whether the policy would refresh a basis with another `h`. A rotation
        shorter than `short` is the last.
        """


@dataclasses.dataclass(frozen=True)
class ByDefault(BasisMethod):
    """Exact on CPUs, rotations on GPUs and TPUs: decided by the platform of the program."""

    level, rotates = HALVES, True

    def turn(self, u: jax.Array, h: jax.Array, again: Any, short: float) -> _turns.Turn:
        return _turns.by_default(u, h, short)


@dataclasses.dataclass(frozen=True)
class Eigh(BasisMethod):
    def turn(self, u: jax.Array, h: jax.Array, again: Any, short: float) -> _turns.Turn:
        return _turns.by_eigh(u, h)


@dataclasses.dataclass(frozen=True)
class Qr(BasisMethod):
    steps: int = 1

    def rounds(self, state: Any) -> list[tuple[RefreshMethod, Any]]:
        never = (state.refreshes == 0).reshape(-1)
        return [(Eigh(), never), (self, ~never)]

    def turn(self, u: jax.Array, h: jax.Array, again: Any, short: float) -> _turns.Turn:
        return _turns.by_qr(u, h, self.steps, again)


@dataclasses.dataclass(frozen=True)
class Rotations(BasisMethod):
    most: int = _turns.ROTATIONS
    level, rotates = HALVES, True

    def turn(self, u: jax.Array, h: jax.Array, again: Any, short: float) -> _turns.Turn:
        return _turns.by_rotations(u, h, self.most, short)


@dataclasses.dataclass(frozen=True)
class StoredRoots(RefreshMethod):
    method: str = "eigh"

    def solved(self, a: jax.Array, root: int, eps: Any, damping_mode: str, floor: Any) -> Solved:
        """The inverse root of one matrix, as of `solve_root`."""
        return solve_root(a, root, eps, damping_mode, self.method, floor)


@dataclasses.dataclass(frozen=True)
class SaturatedRoots(StoredRoots):
    method: str = "newton_schulz"
    steps: int = 5
    coefficients: Coefficients = "quintic"

    @property
    def rows(self) -> Rows:
        """The coefficients of each step."""
        return coefficient_rows(self.coefficients, self.steps)

    def solved(self, a: jax.Array, root: int, eps: Any, damping_mode: str, floor: Any) -> Solved:
        return solve_root(a, root, eps, damping_mode, self.method, floor, self.rows)


def eigh() -> Eigh:
    r"""Decomposes the statistic at each refresh: the papers' form, on all platforms.

    The basis of the statistic $H = U^\top L U$ turns to its eigenvectors, by descending eigenvalue.
    """
    return Eigh()


@checked
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
    return Qr(steps)


@checked
def rotations(most: int = _turns.ROTATIONS) -> Rotations:
    r"""Follows the statistic by products: rotates the basis a little at each refresh.

    It rotates $U$, $H = U^\top L U$ and the moments as often as needed, by six products of the
    factor's order each time (`linalg/_turns.py` has the formulas): one to three times where the
    basis is refreshed at every step, four to seven times at every tenth, and twice as often for
    roots. Nothing is decomposed, and nothing is sorted: columns keep their eigenvalues. Programs
    for GPUs and TPUs do this by default; on CPUs a decomposition costs as much as 14 products.

    Args:
      most: the most rotations in a refresh, and turns that make the basis orthonormal again. 80
        lead from the identity to any basis; fewer leave bases behind, which costs loss.

    Raises:
      ValueError: if `most` is not a positive integer.
    """
    return Rotations(most)


@checked
def stored_roots(method: str = "eigh") -> StoredRoots:
    r"""Stores inverse roots beside statistics in the gradient's own coordinates.

    This is the form of the papers on Shampoo in 4 bits. A step has a product less for each side
    than with a basis, and two less if it does not update statistics; a refresh solves for the root
    anew. Take it where refreshes are rare, such as `shampoo` at its period of 500: with "products"
    on GPUs and TPUs, with "eigh" on CPUs.

    Args:
      method: "eigh", "products", "coupled_newton" or "newton_schulz", as `inverse_root` has it.

    Raises:
      ValueError: if `method` is none of these.
    """
    OneOf(SOLVERS).check("method", method)
    return StoredRoots(method)


def saturated_roots(steps: int = 5, *, coefficients: Coefficients = "quintic") -> SaturatedRoots:
    r"""Stores what a few Newton-Schulz steps leave of inverse square roots: a saturated root.

    For the eigenvalues :math:`w` of a statistic over the largest, the root is

    .. math::

        q(w) = f_0 f_1 \cdots f_{k-1}, \qquad f_i = a + b w_i + c w_i^2, \qquad w_0 = w, \quad
        w_{i+1} = f_i^2 w_i

    which is near :math:`w^{-1/2}` where :math:`w` is not small, and at most :math:`a^k` where it
    is: directions that are new or rare are not raised further, and no damping is needed (`eps=0`).
    It takes 4 products of the statistic's order for each step but the first, and 12 for the largest
    eigenvalue. With the root on one side and `orthogonalize` behind it is Marin's Muon with a
    saturated preconditioner.

    Args:
      steps: k.
      coefficients: a name in `NEWTON_SCHULZ_COEFFICIENTS`, three numbers, or a row for each step
        (the last one repeats). (1.5, -0.5, 0.0) is the classical iteration.

    Raises:
      ValueError: if an argument is not allowed.

    Example:
      >>> import curvax
      >>> preconditioned = curvax.precondition(
      ...     curvax.momentum(0.95, accumulate="sum", nesterov=True),
      ...     refresh=curvax.every(1),
      ...     side="right",
      ...     root=2,
      ...     eps=0.0,
      ...     method=curvax.eigenbases.saturated_roots(),
      ... )

    References:
      `Marin <https://github.com/marin-community/marin/pull/6588>`_, 2026.
    """
    coefficient_rows(coefficients, steps)
    return SaturatedRoots(steps=steps, coefficients=coefficients)


def check_steps(method: RefreshMethod, refresh: Any) -> None:
    """Requires a policy that examines the bases, for an iteration of several steps."""
    if isinstance(method, Qr) and method.steps > 1 and refresh.examines is None:
        raise ValueError(
            "method takes more than one step only with a policy that examines the bases, such as "
            f"refresh=curvax.policies.diagonal_residual(); got method={method!r}, "
            f"refresh={refresh!r}."
        )


BASIS_METHODS: dict[Any, Any] = {
    None: ByDefault(),
    "eigh": Eigh(),
    "qr": Qr(),
    "rotations": Rotations(),
}
"""The plain methods, by name."""

ROOT_METHODS = BASIS_METHODS | {name: StoredRoots(name) for name in SOLVERS if name != "eigh"}
"""Those of `precondition`."""
